"""Figures of the centres of heads: where they are, and their way over a training (Cordonnier et al. 2020 (C20)).

Shifts are drawn as they lie in the image: the x axis is the column, the y axis is the row and points down.
"""

from typing import Dict, List, Mapping, Sequence, Tuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..analysis import MeanAttention, head_centers
from ..analysis.layer_maps import layer_labels
from ..analysis.shift_statistics import keys_of_query
from .contours import gaussian_contour, outline, region_of_mass
from .style import Numbers, Query, check_maps, color_of, draw_heads, settings

LEAST_MASS = 0.1  # of a query's attention in the grid, for a centre to mean something
CONTOURS = {0.5: 'solid', 0.9: (0, (1, 1.2))}  # the share of a head's attention inside of a line, and its style

HeadLines = Dict[int, Tuple[np.ndarray, List[List[np.ndarray]]]]


@settings()
def plot_attention_centers(maps: Mapping[str, MeanAttention], query: Query = None, numbers: Numbers = None) -> Figure:
    """Draws the centre of every head and contours of its attention, one panel a layer (C20, Figures 4, 12 and 14).

    Contours hold 50% and 90% of a head's attention. Those of Gaussian heads are circles and ellipses. For others they
    surround the fewest pixels that hold as much, drawn a little inside of them so that the heads can be told apart.

    Args:
        maps (Mapping[str, MeanAttention]): By layer, from :func:`~attncnn_plugin.analysis.mean_attention`.
        query (Sequence[int], optional): Row and column of the query, for heads that are not Gaussian. Defaults as in
            :func:`~attncnn_plugin.analysis.head_centers`.
        numbers (Mapping[str, Sequence[int]], optional): By layer, the numbers of its heads, for those that are left
            after others were pruned. Defaults to 0, 1, 2, ….

    Returns:
        Figure: One axes a layer; a head's disc and contours are at (column, row) of their shifts. Heads that look
        beyond the grid, by the null key of CMHSA, with more than 0.9 of their attention are named but not drawn.

    Raises:
        TypeError: ``maps`` are no attention maps.
        ValueError: No maps; a query outside of the grid.
    """
    check_maps(maps)
    heads = {name: _head_lines(own, query) for name, own in maps.items()}
    figure, panels = _panels(list(maps))
    for (name, own), axes in zip(maps.items(), panels):
        reach = min(_reach(heads[name]), max(own.grid) - 0.5)
        _shift_axes(axes, reach)
        number_of = (numbers or {}).get(name, range(len(own.probs)))
        beyond = [str(number_of[head]) for head in range(len(own.probs)) if head not in heads[name]]
        if beyond:
            axes.set_title(f'{axes.get_title()}, beyond the grid: {", ".join(beyond)}')
        for head, (_, contours) in heads[name].items():
            drawn = dict(color=color_of(number_of[head]), linewidth=1.1, solid_joinstyle='miter', zorder=3)
            for lines, style in zip(contours, CONTOURS.values()):
                for line in lines:
                    axes.plot(line[:, 1], line[:, 0], linestyle=style, **drawn)
        draw_heads(axes, {number_of[head]: tuple(center.tolist()) for head, (center, _) in heads[name].items()}, reach)
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
        Figure: One axes a layer; a head's way ends at its disc, that of a head that was pruned, or that came to give
        nothing to the grid, at a cross.

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


def _head_lines(maps: MeanAttention, query: Query) -> HeadLines:
    """Returns by head the centre and the lines of each contour, as shifts (row, column)."""
    centers = head_centers(maps, query)[0].numpy()
    if maps.gaussian is not None:
        ellipses = enumerate(zip(centers, maps.gaussian.inverse_covariance.numpy()))
        return {head: (own[0], [[gaussian_contour(*own, mass)] for mass in CONTOURS]) for head, own in ellipses}
    probs, origin = keys_of_query(maps, query)
    heads = {}
    for head, (center, keys) in enumerate(zip(centers, probs.numpy())):
        if keys.sum() >= LEAST_MASS:
            inset = 0.03 + 0.2 * head / max(len(centers) - 1, 1)
            regions = [region_of_mass(keys, mass) for mass in CONTOURS]
            heads[head] = center, [[line - origin for line in outline(region, inset)] for region in regions]
    return heads


def _reach(heads: HeadLines) -> float:
    """Returns how far a panel goes from the query: 3.5 tokens at least, to all centres and most inner contours."""
    lines = [np.abs(np.concatenate(contours[0])).max() for _, contours in heads.values()]
    most = [np.quantile(lines, 0.75, method='lower')] if lines else []
    return max([3.5, *(reach + 0.5 for reach in most + [np.abs(center).max() for center, _ in heads.values()])])


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
