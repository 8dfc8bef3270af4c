"""Figures of how far heads look by depth (Dosovitskiy et al. 2021, Figure 7; Raghu et al. 2021, Figure 3)."""

import math
from typing import Any, Dict, List, Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import color_of, draw_grid, settings

PANELS = ('mean distance, % of the image side', 'attention within 3×3, %')


@settings()
def plot_attention_distance(reports: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draws how far, and how locally, the heads of each layer look, one column a model.

    Above is the mean distance from a query to its keys, each of which counts by its probability, as a share of the side
    of the grid, √(H·W): so grids of several sizes can be compared. Below is the attention that lies within the 3x3
    tokens around the query. A dot is a head, the line the mean of the heads of a layer.

    Args:
        reports (Mapping[str, Mapping]): By the names of models in the figure, their head reports as data, see
            :meth:`~attncnn_plugin.analysis.HeadReport.to_dict`. Where a layer has a report of its attention to images
            beside one by position, it is the former that is drawn.

    Returns:
        Figure: Two axes a model; x is the number of the layer, from 0.

    Raises:
        ValueError: No reports, or one without layers that have heads.
    """
    if not reports:
        raise ValueError('reports is empty: give at least one, of analyze_heads.py --json')
    layers = {label: _layers(label, report) for label, report in reports.items()}
    figure = Figure(figsize=(max(2.7 * len(reports), 3.6), 4.6), layout='constrained')
    panels = figure.subplots(2, len(reports), sharex='col', sharey='row', squeeze=False)
    for column, (label, own) in enumerate(layers.items()):
        sides = [math.sqrt(math.prod(layer['grid'])) for layer in own]
        far = [_percent(layer, 'distance', side) for layer, side in zip(own, sides)]
        near = [_percent(layer, 'mass_3x3', 1) for layer in own]
        for axes, values, name in zip(panels[:, column], (far, near), PANELS):
            _draw(axes, values, color_of(column))
            if column == 0:
                axes.set_ylabel(name)
        panels[0, column].set_title(label)
        panels[1, column].set_xlabel('layer')
    for row in panels:  # which share their axis
        largest = max(max(line.get_ydata(), default=0) for axes in row for line in axes.get_lines())
        row[0].set_ylim(0, 1.05 * max(largest, 1))
    return figure


def _layers(label: str, report: Mapping[str, Any]) -> List[Mapping[str, Any]]:
    """Returns one report a layer: the last one, that of its attention to images where there is one."""
    last: Dict[str, Mapping[str, Any]] = {layer['name']: layer for layer in report.get('layers', ()) if layer['heads']}
    if not last:
        raise ValueError(f'the report of {label} has no layers with heads')
    return list(last.values())


def _percent(layer: Mapping[str, Any], name: str, whole: float) -> List[float]:
    """Returns a number of the heads in per cent, without heads that give nothing to the grid."""
    return [100 * head[name] / whole for head in layer['heads'] if head[name] is not None]


def _draw(axes: Axes, values: List[List[float]], color: str) -> None:
    """Draws the heads of each layer as dots, and their mean as a line."""
    dots = dict(color=color, alpha=0.45, markersize=3.5, markeredgewidth=0, clip_on=False)
    for layer, heads in enumerate(values):
        axes.plot([layer] * len(heads), heads, 'o', **dots)
    means = {layer: sum(heads) / len(heads) for layer, heads in enumerate(values) if heads}
    axes.plot(list(means), list(means.values()), color=color, linewidth=1.3)
    axes.locator_params(axis='x', integer=True, nbins=7)
    draw_grid(axes)
