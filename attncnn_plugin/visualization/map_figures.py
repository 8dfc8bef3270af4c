"""Maps of what heads attend to (Cordonnier et al. 2020 (C20), Figures 5 to 10), and what each head is worth."""

from dataclasses import replace
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from timm.utils import unwrap_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..analysis import MeanAttention, mean_attention
from ..analysis.layer_maps import layer_labels
from ..analysis.recorder import beside_the_grid, no_attention, observe, rollout
from ..analysis.shift_statistics import keys_of_query
from ..attention.window import shown
from ..heads.places import Places, cells
from ..pruning import HeadAblation
from .style import MAP_COLORS, attention_bar, check_maps, draw_attention, settings

CHANGES = 'RdBu_r'  # of the loss: white for none, red where it rises
MOST_COLUMNS = 12  # of heads


@settings()
def plot_attention(model: nn.Module, images: Tensor, layers: Optional[Sequence[str]] = None) -> Figure:
    """Draws where the class token of each image looks: each head, their mean, and the rollout through all layers.

    Where a model does not read a class token it is the mean over all patches. The colours of a map say how its
    attention to patches is divided among them, relative to uniform attention: 1 is a patch that gets as much as if all
    got the same.

    Args:
        model (nn.Module): As of :func:`~attncnn_plugin.attention_maps`, with a grid of patches.
        images (Tensor): ``(B, C, H, W)``, normalized as in training; the photos are drawn from their lowest to their
            highest value.
        layers (Sequence[str], optional): Names of layers, a row each. Defaults to None, the last one.

    Returns:
        Figure: A row for each image and layer: photo and rollout in the first row of an image, mean of heads, heads.
        Where layers have other tokens than those before, as in Swin transformers, there is no rollout.

    Raises:
        TypeError: ``images`` are no tensor.
        ValueError: The model has no attention that is known, or not these layers; the images are not for it.
    """
    model = _unwrapped(model, images)
    rows, of_class = _rows(model, images)
    names = [list(rows)[-1]] if layers is None else list(layers)
    if not names or not set(names) <= set(rows):
        raise ValueError(f'layers={shown(layers)} must be some of {", ".join(rows)}')
    try:
        reached = rollout(model, images).cpu()
    except ValueError:  # there are other tokens after some layers: all else was fine above
        reached = None
    left = 2 if reached is None else 3  # photo, rollout, mean of heads
    heads = max(1, *(rows[name].shape[1] for name in names))
    columns, deep = min(heads, MOST_COLUMNS), -(-heads // MOST_COLUMNS)  # more heads are below
    lines = len(images) * len(names) * deep
    figure = Figure(figsize=(max(0.95 * (left + columns) + 1.4, 4.8), 1.1 * lines + 0.8), layout='constrained')
    grid, labels = figure.add_gridspec(lines, left + columns), layer_labels(rows)
    for line, (image, name) in enumerate((image, name) for image in range(len(images)) for name in names):
        line *= deep
        own = rows[name][image]
        drawn = _draw(figure.add_subplot(grid[line, left - 1]), own.mean(0), f'{labels[name]}\nmean of heads')
        for head, of_head in enumerate(own):
            place = grid[line + head // columns, left + head % columns]
            _draw(figure.add_subplot(place), of_head, f'head {head}')
        if name == names[0]:
            axes = figure.add_subplot(grid[line, 0])
            axes.imshow(_photo(images[image]), cmap='gray')
            axes.set(xticks=[], yticks=[])
            axes.set_title(f'image {image}', fontsize=6.5, pad=2)
            if reached is not None:
                _draw(figure.add_subplot(grid[line, 1]), reached[image], 'all layers\n(rollout)')
    query = 'the class token looks' if of_class else 'the patches look, mean over them'
    _finish(figure, drawn, f'Where {query}.')
    return figure


@settings()
def plot_heads(model: nn.Module, images: Tensor) -> Figure:
    """Draws all heads of all layers as small maps: what the patch in the middle attends to, mean over images.

    Rows are layers, columns heads. In windows it is the mean over the queries that see a shift. The colours are those
    of :func:`plot_attention`; the square is the query.

    Args:
        model (nn.Module): As of :func:`~attncnn_plugin.analysis.mean_attention`.
        images (Tensor): ``(B, C, H, W)``, normalized as in training; some are enough.

    Returns:
        Figure: One axes for each head.

    Raises:
        TypeError, ValueError: As of :func:`plot_attention`.
    """
    model = _unwrapped(model, images)
    maps = {name: own for name, own in mean_attention(model, images).items() if len(own.probs)}
    if not maps:
        raise ValueError(f'model is a {type(model).__name__} that has no heads left: there is nothing to draw')
    columns = max(len(own.probs) for own in maps.values())
    figure = Figure(figsize=(max(0.62 * columns + 2.2, 4.8), 0.66 * len(maps) + 0.7), layout='constrained')
    grid, labels = figure.add_gridspec(len(maps), columns), layer_labels(maps)
    for line, (name, own) in enumerate(maps.items()):
        probs, (row, column) = keys_of_query(own)
        if own.in_windows:  # mean over those queries that see a shift; shifts that none sees are left out
            sees = replace(own, probs=(own.probs > 0).float().amax(0, keepdim=True))
            share = keys_of_query(sees)[0]
            seen, probs = share[0] > 0, probs / share.clamp(min=1e-12)
            reach = [int(seen.any(axis).nonzero().max()) - at for axis, at in ((1, row), (0, column))]
            probs = probs[:, row - reach[0] : row + reach[0] + 1, column - reach[1] : column + reach[1] + 1]
            row, column = reach
        for head, of_head in enumerate(probs):
            axes = figure.add_subplot(grid[line, head])
            drawn = _draw(axes, of_head, f'head {head}')
            axes.plot(column, row, 's', markersize=4, markerfacecolor='none', markeredgecolor='black')
            if head == 0:
                axes.set_ylabel(labels[name], rotation=0, ha='right', va='center')
    _finish(figure, drawn, f'What the patch in the black square attends to, mean over images: {len(images)}.')
    return figure


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
    grid, labels, of_map = figure.add_gridspec(len(maps), columns + left), layer_labels(maps), None
    if image is not None:
        (_, height, width), (row, column) = next((keys.shape, place) for keys, place in drawn.values())
        axes = figure.add_subplot(grid[:, :2])
        axes.imshow(image, interpolation='nearest', extent=(-0.5, width - 0.5, height - 0.5, -0.5), cmap='gray')
        axes.set(xticks=[], yticks=[], title=f'query at row {row}, column {column}')
        _draw_query(axes, row, column)
    for line, (name, (keys, (row, column))) in enumerate(drawn.items()):
        heads, height, width = keys.shape
        number_of = (numbers or {}).get(name, range(heads))
        panels = [figure.add_subplot(grid[line, left + place]) for place in range(max(heads, 1))]
        panels[0].set_ylabel(labels[name])
        if not heads:
            panels[0].set(xticks=[], yticks=[], title='no heads')
        distance = np.hypot(*np.ogrid[-row : height - row, -column : width - column])
        locality = (keys.numpy() * distance).sum((1, 2)) / keys.sum((1, 2)).clamp(min=1e-12).numpy()
        top, start = (0, 0) if zoom is None else (row, column)
        extent = -start - 0.5, width - start - 0.5, height - top - 0.5, -top - 0.5
        for axes, head in zip(panels, locality.argsort(kind='stable').tolist()):
            of_map = draw_attention(axes, (keys[head] * height * width).numpy(), extent=extent)
            if zoom is not None:
                axes.set(facecolor='#CCCCCC', xlim=(-zoom / 2, zoom / 2), ylim=(zoom / 2, -zoom / 2))
            _draw_query(axes, row - top, column - start)
            axes.set_title(f'head {number_of[head]}: {keys[head].max():.2g}', fontsize=6.5, pad=2)
    if of_map is not None:
        attention_bar(figure, of_map, ax=figure.axes[left // 2 :], shrink=min(1, 2 / len(maps)), pad=0.01, aspect=15)
    return figure


@settings()
def plot_head_ablation(ablation: HeadAblation) -> Figure:
    """Draws what each head is worth, layers by heads: the change of loss at its mean and at zero, and its importance.

    Args:
        ablation (HeadAblation): Of :func:`~attncnn_plugin.pruning.head_ablation`.

    Returns:
        Figure: Three axes; the first two share their colours, red where the model needs the head.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(ablation, HeadAblation):
        raise TypeError(f'ablation={shown(ablation)} must be the result of head_ablation(model, batches, loss)')
    of_layers = ablation.mean_loss, ablation.zero_loss, ablation.importance
    tables = [pad_sequence([*own.values()], True, torch.nan).numpy() for own in of_layers]  # no more heads: grey
    height, width = tables[0].shape
    figure = Figure(figsize=(3 * (0.22 * width + 0.5) + 1.2, 0.22 * height + 1.7), layout='constrained')
    panels = figure.subplots(1, 3, sharey=True)
    largest = max(np.nanmax(np.abs(own)) for own in tables[:2]) or 1.0
    changes: Dict[str, Any] = dict(cmap=CHANGES, vmin=-largest, vmax=largest)
    titles = "head's output at its mean", "head's output at zero", 'gradient importance'
    looks = changes, changes, dict(cmap=MAP_COLORS, vmin=0)
    for axes, values, title, look in zip(panels, tables, titles, looks):
        axes.imshow(values, **look)
        axes.set(title=title, xlabel='head', xticks=range(0, width, 1 + width // 12), facecolor='#CCCCCC')
    label = f'change of the loss, which is {ablation.loss:.3g}'
    figure.colorbar(panels[0].images[0], ax=panels[:2], location='bottom', label=label, shrink=0.6, aspect=25)
    figure.colorbar(panels[2].images[0], ax=panels[2], location='bottom', label='E|∂loss/∂gate|', aspect=25)
    panels[0].set_yticks(range(height), layer_labels(ablation.importance).values())
    return figure


def _unwrapped(model: nn.Module, images: Any) -> nn.Module:
    """Returns a model without what compiles or distributes it, once the images are a tensor."""
    if not isinstance(images, Tensor):
        raise TypeError(f'images={shown(images)} must be a tensor (B, C, H, W), normalized as in training')
    return unwrap_model(model)


@torch.no_grad()
def _rows(model: nn.Module, images: Tensor) -> Tuple[Dict[str, Tensor], bool]:
    """Returns by layer what each patch gets, ``(B, N_h, H, W)``, and whether it is from the token that is read."""
    of_patches: Dict[str, Tensor] = {}
    of_tokens: Dict[str, Dict[float, Tensor]] = {}

    def add(name: str, probs: Tensor, places: Places) -> None:
        _, key, grid = cells(torch.zeros(1, 1) if places.keys is None else places.keys)
        on_grid = places.on_grid(probs)
        if on_grid is not None:
            of_patches[name] = on_grid[0].mean(2).unflatten(-1, grid).float().cpu()
        if on_grid is None or not places.are_windows:
            order = key[0].argsort()[(key[0] < 0).sum() :]
            rows = {n: row[..., order] for n, row in beside_the_grid(probs, places).items()}
            if len(order) == grid[0] * grid[1] > 1:
                of_tokens[name] = {n: row.unflatten(-1, grid).float().cpu() for n, row in rows.items()}

    token = observe(model, images, add)
    from_token = {name: rows[token] for name, rows in of_tokens.items() if token in rows}
    rows = from_token or of_patches
    if not rows:
        raise no_attention(model)
    return rows, bool(from_token)


def _draw_query(axes: Axes, row: int, column: int) -> None:
    """Draws a black square around the query."""
    axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor='none', edgecolor='black', linewidth=1.1))


def _draw(axes: Axes, attention: Tensor, title: str) -> AxesImage:
    """Draws attention to patches, relative to uniform attention to those that are shown."""
    axes.set_title(title, fontsize=6.5, pad=2)
    return draw_attention(axes, (attention / attention.mean().clamp(min=1e-12)).numpy())


def _finish(figure: Figure, drawn: AxesImage, text: str) -> None:
    """Adds the colour bar of the maps, and lines below."""
    figure.supxlabel(f'{text}\nRed: more than uniform attention, white: uniform, blue: less.', fontsize=8)
    attention_bar(figure, drawn, ax=figure.axes, shrink=min(1, 3 / figure.get_figheight()), pad=0.01, aspect=15)


def _photo(image: Tensor) -> np.ndarray:
    """Returns an image from 0 to 1, ``(H, W, 3)``, or grey ``(H, W)`` with another number of channels."""
    own = image.detach().float().cpu()
    own = own.permute(1, 2, 0) if len(own) == 3 else own.mean(0)
    return ((own - own.min()) / (own.max() - own.min()).clamp(min=1e-12)).numpy()
