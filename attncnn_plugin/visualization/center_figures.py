"""Figures of the centres of heads, of their paths during a training, and of how far heads look by depth.

Figures 3, 4, 12 and 14 of Cordonnier et al. 2020 (C20); Figure 7 of Dosovitskiy et al. 2021; Figure 3 of Raghu et al.
2021. Shifts are drawn as they lie in the image: the x axis is the column, the y axis is the row and points down.
"""

import math
from typing import Dict, Iterable, List, Mapping, Sequence, Tuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..analysis import HeadReport, MeanAttention, head_centers
from ..analysis.layer_maps import layer_labels
from ..analysis.shift_statistics import MAX_WIDTH
from .style import Numbers, check_maps, color_of, draw_grid, draw_heads, settings

CONTOURS = {0.5: 'solid', 0.9: (0, (1, 1.2))}  # the share of a head's attention inside of a line, and its style
PANELS = {'distance': 'mean distance, % of the image side', 'mass_3x3': 'attention within 3×3, %'}


@settings()
def plot_attention_centers(maps: Mapping[str, MeanAttention], numbers: Numbers = None) -> Figure:
    """Draws the centre of every head, one panel a layer, with contours of Gaussian heads (C20, Figures 4, 12 and 14).

    Contours hold 50% and 90% of a head's attention. A head that is not Gaussian has only its centre: the mean shift to
    what a query in the middle attends to.

    Args:
        maps (Mapping[str, MeanAttention]): By layer, from :func:`~attncnn_plugin.analysis.mean_attention`.
        numbers (Mapping[str, Sequence[int]], optional): By layer, the numbers of its heads, for those that are left
            after others were pruned. Defaults to 0, 1, 2, ….

    Returns:
        Figure: One axes a layer; a head's disc and contours are at (column, row) of their shifts. A head that gives
        nothing to the grid has no centre, and is not drawn.

    Raises:
        TypeError: ``maps`` are no attention maps.
        ValueError: No maps.
    """
    check_maps(maps)
    figure, panels = _panels(list(maps))
    for (name, own), axes in zip(maps.items(), panels):
        number_of = (numbers or {}).get(name, range(len(own.probs)))
        centers = {head: center for head, center in enumerate(head_centers(own)[0].tolist()) if center[0] == center[0]}
        lines = {}
        if own.gaussian is not None:
            shapes = (own.gaussian.factor @ own.gaussian.factor.mT).numpy()  # Σ⁻¹ = MMᵀ
            for head, center in centers.items():
                lines[head] = [gaussian_contour(center, shapes[head], mass) for mass in CONTOURS]
        reach = min(_reach(centers.values(), [own[0] for own in lines.values()]), max(own.grid) - 0.5)
        _shift_axes(axes, reach)
        for head, contours in lines.items():
            for line, style in zip(contours, CONTOURS.values()):
                look = dict(color=color_of(number_of[head]), linewidth=1.1, linestyle=style, zorder=3)
                axes.plot(line[:, 1], line[:, 0], **look)
        draw_heads(axes, {number_of[head]: tuple(center) for head, center in centers.items()}, reach)
    text = 'Square: query. Contours: 50% solid, 90% dotted; wide ones are cut. Hollow: centre beyond the panel.'
    figure.supxlabel(text, fontsize=8)
    return figure


@settings()
def plot_center_movement(centers: Dict[str, Dict[int, np.ndarray]]) -> Figure:
    """Draws the paths of the heads' centres during a training, one panel a layer (C20, Figure 3).

    Args:
        centers (dict[str, dict[int, ndarray]]): By layer and head, epoch, row and column of the centre, ``(T, 3)``, as
            :func:`~attncnn_plugin.analysis.read_centers` reads them.

    Returns:
        Figure: One axes a layer. A head's path ends at its numbered disc, or at a cross if the head was pruned or came
        to give nothing to the grid.

    Raises:
        ValueError: There are no centres.
    """
    if not any(centers.values()):
        raise ValueError('centers is empty: train with AttentionVisualizationHook, which records them')
    everything = np.concatenate([way for heads in centers.values() for way in heads.values()])
    first, last = everything[:, 0].min(), everything[:, 0].max()
    reach = max(float(np.abs(everything[:, 1:]).max()) * 1.1, 2.5)
    figure, panels = _panels(list(centers))
    for heads, axes in zip(centers.values(), panels):
        _shift_axes(axes, reach)
        for head, way in sorted(heads.items()):
            color = color_of(head)
            axes.plot(way[:, 2], way[:, 1], color=color, linewidth=1.1, zorder=3)
            start = dict(markersize=3.5, markeredgecolor=color, markerfacecolor='white', markeredgewidth=0.8)
            axes.plot(way[:1, 2], way[:1, 1], 'o', zorder=3.5, **start)
            if way[-1, 0] < last:
                axes.plot(way[-1:, 2], way[-1:, 1], 'x', color=color, markersize=5, zorder=3)
                axes.annotate(str(head), (way[-1, 2], way[-1, 1]), (4, 0), textcoords='offset points', fontsize=6)
        left = {head: tuple(way[-1, 1:].tolist()) for head, way in heads.items() if way[-1, 0] == last}
        draw_heads(axes, left, reach, beside=True)
    text = f'Square: query. Centres from epoch {first:g}, hollow, to epoch {last:g}, numbered; '
    figure.supxlabel(f'{text}a cross where a head was pruned, or left the grid.', fontsize=8)
    return figure


@settings()
def plot_attention_distance(reports: Mapping[str, HeadReport]) -> Figure:
    """Draws how far, and how locally, the heads of each layer look, one column a model.

    Above is the mean distance from a query to its keys, each of which counts by its probability, as a share of the side
    of the grid, √(H·W): so grids of several sizes can be compared. Below is the attention that lies within the 3x3
    tokens around the query. A dot is a head, the line the mean of the heads of a layer.

    Args:
        reports (Mapping[str, HeadReport]): By the names of models in the figure, see
            :func:`~attncnn_plugin.analysis.head_report`. Where a layer has a report of its attention to images beside
            one by position, it is the former that is drawn.

    Returns:
        Figure: Two axes a model; x is the number of the layer, from 0.
    """
    figure = Figure(figsize=(max(2.7 * len(reports), 3.6), 4.6), layout='constrained')
    panels = figure.subplots(2, len(reports), sharex='col', sharey='row', squeeze=False)
    for column, (label, report) in enumerate(reports.items()):
        layers = {layer.name: layer for layer in report.layers}.values()  # the last one of a layer
        for axes, (number, name) in zip(panels[:, column], PANELS.items()):
            means = []
            for place, layer in enumerate(layers):
                whole = math.sqrt(math.prod(layer.grid)) if number == 'distance' else 1
                heads = [getattr(head, number) for head in layer.heads]
                heads = [100 * value / whole for value in heads if value is not None]
                look = dict(color=color_of(column), alpha=0.45, markersize=3.5, markeredgewidth=0, clip_on=False)
                axes.plot([place] * len(heads), heads, 'o', **look)
                means += [(place, sum(heads) / len(heads))] if heads else []
            axes.plot(*zip(*means), color=color_of(column), linewidth=1.3)
            axes.locator_params(axis='x', integer=True, nbins=7)
            draw_grid(axes)
            if column == 0:
                axes.set_ylabel(name)
        panels[0, column].set_title(label)
        panels[1, column].set_xlabel('layer')
    for row in panels:  # which share their axis
        row[0].set_ylim(bottom=0)
    return figure


def gaussian_contour(center: Sequence[float], precision: np.ndarray, mass: float) -> np.ndarray:
    """Returns the ellipse around a Gaussian head that holds a share p of it: (δ − Δ)ᵀΣ⁻¹(δ − Δ) = 2 ln(1/(1 − p)).

    For the quadratic encoding, Σ⁻¹ = 2α·I (C20, eq. 9), it is the circle r² = ln(1/(1 − p))/α. Along an axis on which
    the head is wider than 1000 tokens it is drawn as if it were that wide: a stripe is two parallel lines.

    Args:
        center (Sequence[float]): Δ in tokens, (row, column).
        precision (ndarray): Σ⁻¹, ``(2, 2)``.
        mass (float): p, above 0 and below 1.

    Returns:
        ndarray: Rows and columns, ``(181, 2)``, the last as the first.
    """
    eigenvalues, vectors = np.linalg.eigh(precision)
    radii = np.sqrt(-2 * math.log1p(-mass) / eigenvalues.clip(min=MAX_WIDTH**-2))
    angle = np.linspace(0, 2 * np.pi, 181)
    return np.asarray(center) + np.stack([np.cos(angle), np.sin(angle)], axis=-1) * radii @ vectors.T


def _reach(centers: Iterable[Sequence[float]], inner: Sequence[np.ndarray]) -> float:
    """Returns how far a panel goes from the query: 3.5 tokens at least, to all centres and most inner contours."""
    lines = [np.abs(line).max() for line in inner]
    most = [np.quantile(lines, 0.75, method='lower')] if lines else []
    return max([3.5, *(reach + 0.5 for reach in [*most, *(max(map(abs, center)) for center in centers)])])


def _panels(names: Sequence[str]) -> Tuple[Figure, List[Axes]]:
    """Returns a figure with one square panel a layer, four in a row at most."""
    columns = min(len(names), 3 if len(names) > 4 else 4)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(max(2.6 * columns, 5.0), 2.75 * rows + 0.4), layout='constrained')
    panels = [figure.add_subplot(rows, columns, i + 1) for i in range(len(names))]
    for i, (label, axes) in enumerate(zip(layer_labels(names).values(), panels)):
        axes.set_title(label)
        if i + columns >= len(names):
            axes.set_xlabel('column shift')
        if i % columns == 0:
            axes.set_ylabel('row shift')
    return figure, panels


def _shift_axes(axes: Axes, reach: float) -> None:
    """Sets axes of shifts from the query, whose pixel is a black square, with the row pointing down."""
    axes.set(aspect='equal', xlim=(-reach, reach), ylim=(reach, -reach))
    for line in (axes.axhline, axes.axvline):
        line(0, color='#DDDDDD', linewidth=0.5, zorder=0)
    axes.add_patch(Rectangle((-0.5, -0.5), 1, 1, facecolor='black', edgecolor='none', zorder=2))
    axes.locator_params(integer=True, nbins=7)
