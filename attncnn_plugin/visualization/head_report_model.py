"""Head reports of all layers of a model, together as text and as JSON."""
import dataclasses
from typing import Any, Dict, List, Optional, Sequence, Tuple

from torch import Tensor, nn

from .attention_maps import (depends_on_content, grid_of, mean_attention_probs_of, position_only_probs_of,
                             position_probs, require_attention_layers)
from .head_report import TOLERANCE, head_report, maps_report
from .head_report_kinds import error_text
from .head_report_types import THRESHOLDS_OF_KINDS, LayerReport

SCHEMA_VERSION = 1
BATCH_SIZE = 10


def model_reports(
        model: nn.Module,
        images: Optional[Tensor] = None,
        size: Optional[Tuple[int, int]] = None,
        tolerance: float = TOLERANCE,
) -> List[LayerReport]:
    """The reports of each layer of a model with the attention of this package.

    A layer with a part that depends on position alone has the report of that part. One whose scores depend on content
    has the report of its attention averaged over the images too; if its only positional term is q·r_δ, which the query
    has a say in, attention by that term is averaged over the images in the place of the first.

    Args:
        model (nn.Module): The model.
        images (Tensor, optional): ``(B, C, H, W)``, as the model takes them. Needed where scores depend on content.
        size (tuple[int, int], optional): Grid in tokens on which positions are judged. Defaults to that of the images.
        tolerance (float): Residual up to which a shift is expressible. Defaults to 1e-6.

    Returns:
        list[LayerReport]: In the order of the blocks.

    Raises:
        ValueError: The model has no attention layers; neither images nor a size; content without images.
    """
    layers = require_attention_layers(model)
    if images is None and (size is None or any(map(depends_on_content, layers.values()))):
        raise ValueError(f'images=None and size={size!r}, but the {len(layers)} attention layers of model need images '
                         'where scores depend on content, and otherwise a size of the grid')
    grid = None if images is None else grid_of(model, images)
    size = grid if size is None else size
    means = {} if images is None else mean_attention_probs_of(model, images)
    positional = {} if images is None else _mean_position_probs_of(model, images)
    reports = []
    for name, layer in layers.items():
        own = []
        if position_probs(layer, *size) is not None:
            own.append(head_report(layer, *size, tolerance=tolerance))
        for attention, probs in (('position', positional), ('images', means)):
            if name in probs and not (own and attention == 'position'):
                report = maps_report(probs[name], *grid, layer=layer, num_images=len(images), tolerance=tolerance)
                own.append(dataclasses.replace(report, attention=attention))
        reports += [dataclasses.replace(report, name=name) for report in own]
    return reports


def _mean_position_probs_of(model: nn.Module, images: Tensor) -> Dict[str, Tensor]:
    totals = {}
    for batch in images.split(BATCH_SIZE):
        for name, probs in position_only_probs_of(model, batch).items():
            totals[name] = totals.get(name, 0) + probs.sum(0)
    return {name: total / len(images) for name, total in totals.items()}


def reports_to_dict(reports: Sequence[LayerReport], **origin: Any) -> Dict[str, Any]:
    """Plain data for JSON.

    Args:
        reports (Sequence[LayerReport]): The reports.
        origin: What else the file says: of which model and checkpoint they are.
    """
    return {
        'schema_version': SCHEMA_VERSION, **origin, 'thresholds': THRESHOLDS_OF_KINDS,
        'layers': [report.to_dict() for report in reports]
    }


def reports_to_text(reports: Sequence[LayerReport]) -> str:
    """The reports one after the other, then a line for each: masses are means over its heads."""
    rows = [('layer', 'attention', 'heads', 'hard', 'soft', 'uniform', 'degenerate', '3x3', '5x5', 'best convolution')]
    for report in reports:
        best, heads = report.best, report.heads
        masses = (
            f'{sum(values) / len(values):.3f}' if values else '-'
            for values in ([head.mass_3x3 for head in heads], [head.mass_5x5 for head in heads]))
        rows.append((
            report.name, report.attention, str(report.num_heads), str(report.kind.hard), str(report.kind.soft),
            str(report.kind.uniform), str(sum(head.degenerate for head in heads)), *masses,
            '-' if best is None else f'{best.kernel_size[0]}x{best.kernel_size[1]}, error {error_text(best.error)}'))
    widths = [max(map(len, column)) for column in zip(*rows)]
    table = ['  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return '\n\n'.join([*map(str, reports), '\n'.join(table)])
