"""Head reports of all layers of a model, together as text and as JSON."""

import dataclasses
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from torch import Tensor, nn

from ...attention import AttentionLayer
from ...attention.window import shown
from ...pruning.criteria import relative_entropy_of_maps
from ...transformers.image_means import ImageMeans, few_images
from ..attention_maps import probs_of_scores, require_attention_layers, visit_layers
from ..model_attention import grids_of, is_other_vit
from .layer import TOLERANCE, head_report, maps_report, pair
from .report import THRESHOLDS_OF_KINDS, LayerReport
from .vision_transformers import vit_reports

SCHEMA_VERSION = 1
BATCH_SIZE = 10  # images in a pass


def model_reports(
    model: nn.Module,
    images: Optional[Tensor] = None,
    size: Optional[Sequence[int]] = None,
    tolerance: float = TOLERANCE,
) -> List[LayerReport]:
    """Reports each layer of a model with the attention of this package.

    - A layer with a part that depends on position alone has a report of that part.
    - A layer whose scores depend on content has a report of its attention, averaged over the images. If its only
      positional term is q·r_δ, which depends on the query too, it also has one of attention by that term, averaged over
      the images, before the other.
    - A vision transformer of timm or mmpretrain has the reports of
      :func:`~attncnn_plugin.analysis.vit_reports`.

    Args:
        model (nn.Module): The model.
        images (Tensor, optional): ``(B, C, H, W)``, as the model takes them. Needed where scores depend on content.
        size (Sequence[int], optional): Height and width in tokens of the grid for the parts that depend on position
            alone; means over images are on the grid of the images. Defaults to the grid of the images.
        tolerance (float): Residual up to which a shift is expressible, 1e-7 or more. Defaults to 1e-6.

    Returns:
        list[LayerReport]: In the order of the blocks.

    Raises:
        ValueError: The model has no attention layers; neither images nor a size; content without images; a size, but
            no part that depends on position alone.

    Examples:
        >>> import timm, torch, attncnn_plugin
        >>> model = timm.create_model('sa_learned_content_cifar', embed_dim=12, depth=2, num_heads=3)
        >>> for report in model_reports(model, torch.rand(2, 3, 12, 12)):
        ...     print(report.name, report.attention, report.grid, report.num_images)
        blocks.0.attn position (6, 6) 2
        blocks.0.attn images (6, 6) 2
        blocks.1.attn position (6, 6) 2
        blocks.1.attn images (6, 6) 2
    """
    if is_other_vit(model):
        if images is None or size is not None:
            raise ValueError(
                f'size={shown(size)} and images={None if images is None else tuple(images.shape)}, but the attention '
                f'of model, a {type(model).__name__}, depends on images, which say the grid: give images and no size'
            )
        return vit_reports(model, images, tolerance)
    layers = require_attention_layers(model)
    if images is not None and size is not None and not any(layer.has_position_scores for layer in layers.values()):
        raise ValueError(
            f'size={shown(size)} is that of a grid for scores by position alone, but model has none: what it '
            'has is averaged over images, on their own grid'
        )
    means: Dict[Tuple[str, str], Tuple[Tensor, ...]] = {}
    if images is not None:
        grids, means, num_images = grids_of(model, images), _means(model, images), len(images)
    elif size is not None and not any(layer.depends_on_content for layer in layers.values()):
        grids, num_images = dict.fromkeys(layers, pair('size', size)), 0
    else:
        raise ValueError(
            f'images=None and size={shown(size)}, but the {len(layers)} attention layers of model need images '
            'where scores depend on content, and otherwise a size of the grid'
        )
    given = None if size is None else pair('size', size)
    reports = []
    for name, module in model.named_modules():
        own = []
        if isinstance(module, AttentionLayer):
            if module.has_position_scores:
                own.append(head_report(module, grids[name] if given is None else given, tolerance))
            for attention in ('position', 'images'):
                if (name, attention) in means:
                    probs, entropy = means[name, attention]
                    report = maps_report(probs, grids[name], module, num_images, entropy, tolerance)
                    own.append(dataclasses.replace(report, attention=attention))
        reports += [dataclasses.replace(report, name=name) for report in own]
    return reports


def _means(model: nn.Module, images: Tensor) -> Dict[Tuple[str, str], Tuple[Tensor, ...]]:
    """Probabilities and relative entropies of layers whose scores depend on content, means over images.

    By the layer's name and ``'images'``, or ``'position'`` for the terms with position where no term depends on it
    alone.
    """
    means = ImageMeans()

    def add(name: str, layer: AttentionLayer, x: Tensor) -> None:
        for part in few_images(layer, x):
            for attention, scores in _scores(layer, part):
                probs = probs_of_scores(scores, layer.grid_of(part))
                means.add((name, attention), probs, relative_entropy_of_maps(probs))

    names = [name for name, layer in require_attention_layers(model).items() if layer.depends_on_content]
    for batch in images.split(BATCH_SIZE):
        visit_layers(model, batch, names, add)
    return dict(means.items())


def _scores(layer: AttentionLayer, x: Tensor) -> Iterator[Tuple[str, Tensor]]:
    if not layer.has_position_scores:
        scores = layer.position_scores(x)
        if scores is not None:
            yield 'position', scores
    yield 'images', layer.attention_scores(x)


def reports_to_dict(reports: Sequence[LayerReport], **origin: Any) -> Dict[str, Any]:
    """Reports as data for JSON.

    Args:
        reports (Sequence[LayerReport]): The reports.
        origin: Further entries, for instance the model and the checkpoint that they are of.

    Examples:
        >>> reports_to_dict([], model='sa_quadratic_cifar').keys()
        dict_keys(['schema_version', 'model', 'thresholds', 'layers'])
    """
    return {
        'schema_version': SCHEMA_VERSION,
        **origin,
        'thresholds': THRESHOLDS_OF_KINDS,
        'layers': [report.to_dict() for report in reports],
    }


def reports_to_text(reports: Sequence[LayerReport]) -> str:
    """The reports one after the other, then a table with a line for each, whose masses are means over its heads.

    Examples:
        >>> import torch
        >>> print(reports_to_text([maps_report(torch.eye(36)[None], size=(6, 6))]))  # doctest: +ELLIPSIS
        layer: by position, 6x6 tokens, 1 heads: one convolution, 1x1, error 0
          3x3 convolution (best): error 0, 0 inside
        ...
    """
    rows: List[Tuple[str, ...]] = [
        ('layer', 'attention', 'heads', 'hard', 'soft', 'uniform', 'degenerate', '3x3', '5x5', 'best convolution')
    ]
    for report in reports:
        heads = report.heads
        masses = (
            f'{sum(values) / len(values):.3f}' if values else '-'
            for values in ([head.mass_3x3 for head in heads], [head.mass_5x5 for head in heads])
        )
        degenerate = [head.degenerate for head in heads if head.degenerate is not None]
        rows.append(
            (
                report.name,
                report.attention,
                str(report.num_heads),
                str(report.kind.hard),
                str(report.kind.soft),
                str(report.kind.uniform),
                str(sum(degenerate)) if degenerate else '-',
                *masses,
                report.best_text,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    table = ['  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return '\n\n'.join([*map(str, reports), '\n'.join(table)])
