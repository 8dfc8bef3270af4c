"""Figures of attention probabilities around a query (Cordonnier et al. 2020 (C20), Figures 5 to 10)."""

from typing import List, Mapping, Optional, Sequence, Tuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from ..analysis import MeanAttention
from ..analysis.layer_maps import layer_labels
from .style import attention_bar, check_maps, draw_attention, settings


@settings()
def plot_attention_probs(
    maps: Mapping[str, MeanAttention],
    query: Optional[Sequence[int]] = None,
    zoom: Optional[int] = 7,
    image: Optional[np.ndarray] = None,
    numbers: Optional[Mapping[str, Sequence[int]]] = None,
) -> Figure:
    """Draws the probabilities of a query, one row a layer, one column a head (C20, Figures 5 to 10).

    The heads of a layer are ordered by locality, the mean distance from the query to the pixels that they attend to,
    and have their numbers and their largest probability above their maps. The colours say how many times uniform
    attention a pixel gets, so that a head that attends to all pixels alike is white.

    Args:
        maps (Mapping[str, MeanAttention]): By layer, from :func:`~attncnn_plugin.analysis.mean_attention`.
        query (Sequence[int], optional): Row and column of the query, on each layer's grid; where not every pixel is a
            query, it is the nearest one. Defaults to the middle of the grid.
        zoom (int, optional): Rows and columns around the query that are drawn, odd; None for the whole grid. Defaults
            to 7. Outside of the grid it is grey.
        image (ndarray, optional): The image that the probabilities are of, shown at the left with the query,
            ``(rows, columns, 3)``, uint8. Defaults to none.
        numbers (Mapping[str, Sequence[int]], optional): See :func:`plot_attention_centers`.

    Returns:
        Figure: One axes a map, after that of the image if there is one; its data is in tokens, x the column and y the
        row, counted from the query's with ``zoom`` and from the grid's corner without. A layer whose heads were all
        pruned has one axes that says so.

    Raises:
        TypeError: ``maps`` are no attention maps.
        ValueError: No maps; an even ``zoom``; a query outside of the grid.
    """
    check_maps(maps)
    if zoom is not None and (zoom < 1 or zoom % 2 == 0):
        raise ValueError(f'zoom={zoom} must be odd and at least 1, so that the query is in the middle; None shows all')
    drawn = {name: own.of_query(query) for name, own in maps.items()}
    columns = max(1, *(len(own.probs) for own in maps.values()))
    left = 0 if image is None else 2
    figure = Figure(figsize=(0.95 * (columns + left) + 0.7, 1.05 * len(maps) + 0.2), layout='constrained')
    grid = figure.add_gridspec(len(maps), columns + left)
    if image is not None:
        first, place = next(iter(drawn.values()))
        _draw_image(figure.add_subplot(grid[:, :2]), image, place, *first.shape[1:])
    labels = layer_labels(maps)
    shown = None
    for line, (name, (keys, place)) in enumerate(drawn.items()):
        layer = keys.numpy()
        number_of = (numbers or {}).get(name, range(len(layer)))
        panels = [figure.add_subplot(grid[line, left + column]) for column in range(max(len(layer), 1))]
        panels[0].set_ylabel(labels[name])
        if not len(layer):
            panels[0].set(xticks=[], yticks=[], title='no heads')
        for axes, head in zip(panels, _by_locality(layer, *place)):
            shown = _draw_map(axes, layer[head], place, zoom)
            axes.set_title(f'head {number_of[head]}: {layer[head].max():.2g}', fontsize=6.5, pad=2)
    if shown is not None:
        attention_bar(figure, shown, ax=figure.axes[left // 2 :], shrink=min(1, 2 / len(maps)), pad=0.01, aspect=15)
    return figure


def _by_locality(maps: np.ndarray, row: int, column: int) -> List[int]:
    rows, columns = np.ogrid[: maps.shape[1], : maps.shape[2]]
    distance = np.hypot(rows - row, columns - column)
    return np.argsort((maps * distance).sum((1, 2)) / maps.sum((1, 2)).clip(min=1e-12), kind='stable').tolist()


def _draw_map(axes: Axes, keys: np.ndarray, query: Tuple[int, int], zoom: Optional[int]) -> AxesImage:
    """Draws one map, with a black square around the query."""
    top, left = (0, 0) if zoom is None else query
    row, column = query[0] - top, query[1] - left
    height, width = keys.shape
    extent = -left - 0.5, width - left - 0.5, height - top - 0.5, -top - 0.5
    shown = draw_attention(axes, keys * keys.size, extent=extent)
    if zoom is not None:
        axes.set(facecolor='#CCCCCC', xlim=(-zoom / 2, zoom / 2), ylim=(zoom / 2, -zoom / 2))
    axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor='none', edgecolor='black', linewidth=1.1))
    return shown


def _draw_image(axes: Axes, image: np.ndarray, query: Tuple[int, int], height: int, width: int) -> None:
    row, column = query
    axes.imshow(image, interpolation='nearest', extent=(-0.5, width - 0.5, height - 0.5, -0.5), cmap='gray')
    axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor='none', edgecolor='black', linewidth=1.1))
    axes.set(xticks=[], yticks=[], title=f'query at row {row}, column {column}')
