"""Head reports of all layers of a model, together as text and as JSON."""

import dataclasses
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from torch import Tensor, nn

from ...layers.grid_convolution import GridConvolution
from ..attention_maps import (
    attention_probs_of,
    depends_on_content,
    grid_of,
    has_position_scores,
    mean_over_images,
    position_only_probs_of,
    relative_entropy_of,
    require_attention_layers,
)
from .layer import TOLERANCE, empty_report, head_report, maps_report
from .report import THRESHOLDS_OF_KINDS, LayerReport

SCHEMA_VERSION = 1


def model_reports(
    model: nn.Module,
    images: Optional[Tensor] = None,
    size: Optional[Tuple[int, int]] = None,
    tolerance: float = TOLERANCE,
) -> List[LayerReport]:
    """The reports of each layer of a model with the attention of this package.

    A layer with a part that depends on position alone has the report of that part. One whose scores depend on content
    has the report of its attention averaged over the images too; if its only positional term is q·r_δ, which the query
    has a say in, attention by that term is averaged over the images in the place of the first. A convolution that
    ``switch_to_deploy`` put in the place of a layer has a report without heads.

    Args:
        model (nn.Module): The model.
        images (Tensor, optional): ``(B, C, H, W)``, as the model takes them. Needed where scores depend on content.
        size (tuple[int, int], optional): Grid in tokens on which the parts that depend on position alone are judged;
            means over images have the grid of the images. Defaults to that.
        tolerance (float): Residual up to which a shift is expressible, 1e-7 or more. Defaults to 1e-6.

    Returns:
        list[LayerReport]: In the order of the blocks.

    Raises:
        ValueError: The model has no attention layers; neither images nor a size; content without images; a size, but
            no part that depends on position alone.
    """
    layers = require_attention_layers(model)
    if images is None and (size is None or any(map(depends_on_content, layers.values()))):
        raise ValueError(
            f'images=None and size={size!r}, but the {len(layers)} attention layers of model need images '
            'where scores depend on content, and otherwise a size of the grid'
        )
    if size is not None and not any(map(has_position_scores, layers.values())):
        raise ValueError(
            f'size={size!r} is that of a grid for scores by position alone, but model has none: what it '
            'has is averaged over images, on their own grid'
        )
    grid = None if images is None else grid_of(model, images)
    size = grid if size is None else size
    means = {} if images is None else _means(attention_probs_of, model, images)
    positional = {} if images is None else _means(position_only_probs_of, model, images)
    reports = []
    for name, layer in model.named_modules():
        own = []
        if isinstance(layer, GridConvolution):
            own.append(empty_report(size, 'converted', kernel_size=layer.conv.kernel_size))
        elif name in layers and has_position_scores(layer):
            own.append(head_report(layer, *size, tolerance=tolerance))
        for attention, mean in (('position', positional), ('images', means)):
            if name in mean and not (own and attention == 'position'):
                probs, entropy = mean[name]
                report = maps_report(probs, *grid, layer, len(images), entropy, tolerance)
                own.append(dataclasses.replace(report, attention=attention))
        reports += [dataclasses.replace(report, name=name) for report in own]
    return reports


def _means(
    probs_of: Callable[[nn.Module, Tensor], Dict[str, Tensor]],
    model: nn.Module,
    images: Tensor,
) -> Dict[str, Tuple[Tensor, Tensor]]:
    """Probabilities, and their relative entropies, by the layer's name."""
    return mean_over_images(
        lambda batch: {name: (probs, relative_entropy_of(probs)) for name, probs in probs_of(model, batch).items()},
        images,
    )


def reports_to_dict(reports: Sequence[LayerReport], **origin: Any) -> Dict[str, Any]:
    """Plain data for JSON.

    Args:
        reports (Sequence[LayerReport]): The reports.
        origin: What else the file says: of which model and checkpoint they are.
    """
    return {
        'schema_version': SCHEMA_VERSION,
        **origin,
        'thresholds': THRESHOLDS_OF_KINDS,
        'layers': [report.to_dict() for report in reports],
    }


def reports_to_text(reports: Sequence[LayerReport]) -> str:
    """The reports one after the other, then a line for each: masses are means over its heads."""
    rows = [('layer', 'attention', 'heads', 'hard', 'soft', 'uniform', 'degenerate', '3x3', '5x5', 'best convolution')]
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
