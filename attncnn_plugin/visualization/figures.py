"""Figures of what the heads of a model attend to (C20, Figures 3 to 14).

Shifts are drawn as they lie in the image: the x axis is the column, the y axis is the row and points down.
"""

from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from ..analysis.attention_maps import layer_label, require_attention_layers
from ..analysis.head_centers import gaussian_heads, head_centers, middle, query_index, query_maps
from .contours import check_mass, gaussian_contour, outline, region_of_mass
from .style import MAP_COLORS, color_of, draw_heads, styled

Query = Optional[Tuple[int, int]]
LEAST_MASS = 0.1  # of a query's attention in the grid, for a centre to mean something
CONTOUR_STYLES = ('solid', (0, (1, 1.2)), (0, (4, 2)))


@styled
def plot_attention_centers(
    model: nn.Module,
    height: int,
    width: int,
    masses: Sequence[float] = (0.5, 0.9),
    query: Query = None,
    probs: Optional[Dict[str, Tensor]] = None,
    numbers: Optional[Dict[str, Sequence[int]]] = None,
) -> Figure:
    """The centre of every head and the contours of what it attends to, one panel a layer (C20, Figures 4, 12 and 14).

    Contours of Gaussian heads are circles and ellipses; for others they surround the fewest pixels that hold the mass,
    drawn a little inside of them so that the heads can be told apart.

    Args:
        model (nn.Module): A model with attention layers.
        height, width (int): Size of the grid in tokens.
        masses (Sequence[float]): The shares of a head's attention inside its contours, three at most. Defaults to
            (0.5, 0.9).
        query (tuple[int, int], optional): Row and column of the query, for heads that are not Gaussian. Defaults to the
            middle of the grid.
        probs (dict[str, Tensor], optional): By layer, the probabilities to use for heads that are not Gaussian,
            ``(N_h, H*W, H*W)``: for layers whose scores depend on content, for instance their mean over images.
        numbers (dict[str, Sequence[int]], optional): By layer, what to call its heads, for those that are left after
            others were pruned. Defaults to 0, 1, 2, ….

    Returns:
        Figure: One axes a layer; a head's disc and contours are at (column, row) of their shifts. Heads that look
        beyond the grid, by the null key of CMHSA, with more than 0.9 of their attention are named but not drawn.

    Raises:
        ValueError: A model without attention layers; a layer without a term of position alone and not in ``probs``; a
            mass or a query out of range.
    """
    layers = require_attention_layers(model)
    for mass in masses:
        check_mass(mass)
    if not 1 <= len(masses) <= len(CONTOUR_STYLES):
        raise ValueError(f'masses={masses} must be one to {len(CONTOUR_STYLES)} shares')
    heads = {
        name: _head_lines(layer, height, width, masses, query, (probs or {}).get(name))
        for name, layer in layers.items()
    }
    reach = min(_reach(list(heads.values())), max(height, width) - 0.5)
    figure, panels = _panels(list(layers))
    for name, axes in zip(layers, panels):
        _shift_axes(axes, reach)
        called = (numbers or {}).get(name, range(layers[name].num_heads))
        beyond = [called[head] for head in range(layers[name].num_heads) if head not in heads[name]]
        if beyond:
            axes.set_title(f'{layer_label(name)}, beyond the grid: {", ".join(map(str, beyond))}')
        for head, (_, contours) in heads[name].items():
            for lines, style in zip(contours, CONTOUR_STYLES):
                for line in lines:
                    axes.plot(
                        line[:, 1],
                        line[:, 0],
                        color=color_of(called[head]),
                        linestyle=style,
                        linewidth=1.1,
                        solid_joinstyle='miter',
                        zorder=3,
                    )
        draw_heads(axes, {called[head]: tuple(center.tolist()) for head, (center, _) in heads[name].items()}, reach)
    styles = ', '.join(f'{mass:.0%} {name}' for mass, name in zip(masses, ('solid', 'dotted', 'dashed')))
    figure.supxlabel(f'Black square: query. Contours: {styles}. Hollow: centre beyond the panel.', fontsize=8)
    return figure


@styled
def plot_center_movement(centers: Dict[str, Dict[int, np.ndarray]]) -> Figure:
    """The way of the heads' centres over a training, one panel a layer (C20, Figure 3).

    Args:
        centers (dict[str, dict[int, ndarray]]): By layer and head, epoch, row and column of the centre, ``(T, 3)``, as
            :func:`~attncnn_plugin.visualization.training_curves.read_centers` reads them.

    Returns:
        Figure: One axes a layer; a head's way ends at its disc, that of a head that was pruned at a cross.

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
            axes.plot(
                way[:1, 2],
                way[:1, 1],
                'o',
                markersize=3.5,
                markeredgecolor=color,
                markerfacecolor='white',
                markeredgewidth=0.8,
                zorder=3.5,
            )
            if way[-1, 0] < last:
                axes.plot(way[-1:, 2], way[-1:, 1], 'x', color=color, markersize=5, zorder=3)
                axes.annotate(str(head), (way[-1, 2], way[-1, 1]), (4, 0), textcoords='offset points', fontsize=6)
        left = {head: tuple(way[-1, 1:].tolist()) for head, way in heads.items() if way[-1, 0] == last}
        draw_heads(axes, left, reach, beside=True)
    figure.supxlabel(
        f'Black square: query. Centres from epoch {first:g}, hollow, to epoch {last:g}, numbered; '
        'a cross where a head was pruned.',
        fontsize=8,
    )
    return figure


@styled
def plot_attention_probs(
    maps: Dict[str, Tensor],
    query: Query = None,
    zoom: Optional[int] = 7,
    image: Optional[np.ndarray] = None,
    numbers: Optional[Dict[str, Sequence[int]]] = None,
) -> Figure:
    """The probabilities of a query, one row a layer, one column a head (C20, Figures 5 to 10).

    The heads of a layer are ordered by locality, the mean distance from the query to the pixels that they attend to,
    and have their numbers and their largest probability above their maps, which are coloured from 0 to it.

    Args:
        maps (dict[str, Tensor]): ``(N_h, H, W)`` by layer, the probabilities of the keys for the query, see
            :func:`~attncnn_plugin.analysis.head_centers.query_maps`: of positions, the mean over images, or of one
            image.
        query (tuple[int, int], optional): Row and column of the query. Defaults to the middle of the grid.
        zoom (int, optional): Rows and columns around the query that are drawn, odd; None for the whole grid. Defaults
            to 7. What lies outside of the grid is grey.
        image (ndarray, optional): The image that the probabilities are of, shown at the left with the query,
            ``(rows, columns, 3)``, uint8. Defaults to none.
        numbers (dict[str, Sequence[int]], optional): See :func:`plot_attention_centers`.

    Returns:
        Figure: One axes a map, after that of the image if there is one; its data is in tokens, x the column and y the
        row, counted from the query's with ``zoom`` and from the grid's corner without. A layer whose heads were all
        pruned has one axes that says so.

    Raises:
        ValueError: No maps; an even ``zoom``; a query outside of the grid.
    """
    if not maps:
        raise ValueError('maps is empty: the model has no attention, or none that depends on content')
    if zoom is not None and (zoom < 1 or zoom % 2 == 0):
        raise ValueError(f'zoom={zoom} must be odd and at least 1, so that the query is in the middle; None shows all')
    maps = {name: layer.detach().cpu().numpy() for name, layer in maps.items()}
    height, width = next(iter(maps.values())).shape[1:]
    row, column = divmod(query_index(query, height, width), width)
    columns = max(max(len(layer) for layer in maps.values()), 1)
    left = 0 if image is None else 2
    figure = Figure(figsize=(0.95 * (columns + left) + 0.7, 1.05 * len(maps) + 0.2), layout='constrained')
    grid = figure.add_gridspec(len(maps), columns + left)
    if image is not None:
        _draw_image(figure.add_subplot(grid[:, :2]), image, row, column, height, width)
    shown = None
    for line, (name, layer) in enumerate(maps.items()):
        called = (numbers or {}).get(name, range(len(layer)))
        panels = [figure.add_subplot(grid[line, place + left]) for place in range(max(len(layer), 1))]
        panels[0].set_ylabel(layer_label(name))
        if not len(layer):
            panels[0].set(xticks=[], yticks=[], title='no heads')
        for axes, head in zip(panels, _by_locality(layer, row, column)):
            shown = _draw_map(axes, layer[head], (row, column), zoom)
            axes.set_title(f'head {called[head]}: {layer[head].max():.2f}', fontsize=6.5, pad=2)
    if shown is not None:
        bar = figure.colorbar(
            shown, ax=figure.axes[left // 2 :], ticks=[0, 1], shrink=min(1, 2 / len(maps)), pad=0.01, aspect=15
        )
        bar.ax.set_yticklabels(['0', 'largest'])
        bar.outline.set_linewidth(0.6)
    return figure


@torch.no_grad()
def _head_lines(
    layer: nn.Module, height: int, width: int, masses: Sequence[float], query: Query, probs: Optional[Tensor]
) -> Dict[int, Tuple[np.ndarray, List[List[np.ndarray]]]]:
    """By head the centre and, for each mass, the lines of its contour, as shifts (row, column)."""
    centers, _ = head_centers(layer, height, width, query, probs)
    gaussian = gaussian_heads(layer)
    if gaussian is not None:
        return {
            head: (center, [[gaussian_contour(center, precision, mass)] for mass in masses])
            for head, (center, precision) in enumerate(zip(*(part.numpy() for part in gaussian)))
        }
    origin = np.array(middle(height, width) if query is None else query)
    heads = {}
    for head, (center, keys) in enumerate(zip(centers.numpy(), query_maps(layer, height, width, query, probs).numpy())):
        if keys.sum() >= LEAST_MASS:
            inset = 0.03 + 0.25 * head / max(len(centers) - 1, 1)
            heads[head] = (
                center,
                [[line - origin for line in outline(region_of_mass(keys, mass), inset)] for mass in masses],
            )
    return heads


def _reach(layers: List[dict]) -> float:
    """How far the panels go from the query: to the centres and the inner contours, 3.5 tokens at least."""
    drawn = [head for heads in layers for head in heads.values()]
    lines = [line for _, contours in drawn for line in contours[0]]
    points = [np.abs(center).max() + 0.5 for center, _ in drawn] + [np.abs(line).max() + 0.5 for line in lines]
    return max([3.5, *points])


def _panels(names: Sequence[str]) -> Tuple[Figure, List[Axes]]:
    """A figure with one square panel a layer, four in a row at most."""
    columns = min(len(names), 3 if len(names) > 4 else 4)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(max(2.6 * columns, 5.0), 2.75 * rows + 0.4), layout='constrained')
    panels = [figure.add_subplot(rows, columns, i + 1) for i in range(len(names))]
    for i, (name, axes) in enumerate(zip(names, panels)):
        axes.set_title(layer_label(name))
        if i + columns >= len(names):
            axes.set_xlabel('column shift')
        if i % columns == 0:
            axes.set_ylabel('row shift')
    return figure, panels


def _shift_axes(axes: Axes, reach: float) -> None:
    """Shifts from the query, whose pixel is a black square, with the row pointing down."""
    axes.set_aspect('equal')
    axes.set_xlim(-reach, reach)
    axes.set_ylim(reach, -reach)
    axes.axhline(0, color='#DDDDDD', linewidth=0.5, zorder=0)
    axes.axvline(0, color='#DDDDDD', linewidth=0.5, zorder=0)
    axes.add_patch(Rectangle((-0.5, -0.5), 1, 1, facecolor='black', edgecolor='none', zorder=2))
    axes.locator_params(integer=True, nbins=7)


def _by_locality(maps: np.ndarray, row: int, column: int) -> List[int]:
    rows, columns = np.ogrid[: maps.shape[1], : maps.shape[2]]
    distance = np.hypot(rows - row, columns - column)
    return np.argsort((maps * distance).sum((1, 2)) / maps.sum((1, 2)).clip(min=1e-12), kind='stable').tolist()


def _draw_map(axes: Axes, keys: np.ndarray, query: Tuple[int, int], zoom: Optional[int]):
    """One map, from 0 to its largest value on the whole grid, with a black square around the query."""
    row, column = query
    top, left = 0, 0
    keys = keys / max(keys.max(), 1e-12)
    if zoom is not None:
        reach = zoom // 2
        keys = np.pad(keys, reach, constant_values=np.nan)[row : row + zoom, column : column + zoom]
        top, left, row, column = -reach, -reach, 0, 0
    height, width = keys.shape
    axes.set_facecolor('#CCCCCC')
    shown = axes.imshow(
        keys,
        cmap=MAP_COLORS,
        vmin=0,
        vmax=1,
        interpolation='nearest',
        extent=(left - 0.5, left + width - 0.5, top + height - 0.5, top - 0.5),
    )
    axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor='none', edgecolor='black', linewidth=1.1))
    axes.set_xticks([])
    axes.set_yticks([])
    return shown


def _draw_image(axes: Axes, image: np.ndarray, row: int, column: int, height: int, width: int) -> None:
    axes.imshow(image, interpolation='nearest', extent=(-0.5, width - 0.5, height - 0.5, -0.5), cmap='gray')
    axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor='black', edgecolor='white', linewidth=0.8))
    axes.set_title(f'query at row {row}, column {column}')
    axes.set_xticks([])
    axes.set_yticks([])
