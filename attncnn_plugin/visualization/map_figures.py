"""Maps of what heads attend to (Cordonnier et al. 2020 (C20), Figures 5 to 10), and what each head is worth."""

import math
from dataclasses import replace
from typing import Any, Dict, List, Mapping, Tuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from timm.utils import unwrap_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..analysis import MeanAttention
from ..analysis.layer_maps import layer_labels
from ..analysis.recorder import beside_the_grid, no_attention, observe, rollout
from ..analysis.shift_statistics import keys_of_query
from ..attention.window import shown
from ..heads.choice import Layers
from ..heads.places import Places, cells
from ..pruning import HeadAblation
from .style import Numbers, Query, attention_bar, check_maps, draw_attention, draw_photo, ramp, settings

CHANGES = ramp(least=0, less=0.25, uniform=0.5, more=0.65, much=0.8, most=1)  # of the loss: red where it rises
IMPORTANCE = ramp(uniform=0, more=0.3, much=0.6, most=1)
MOST_COLUMNS = 12


@settings()
def plot_attention(
    model: nn.Module,
    images: Tensor,
    layers: Layers = None,
    query: Query = None,
    overlay: bool = False,
) -> Figure:
    """Draws where the class token of each image, or one patch, looks: each head, their mean, and the rollout.

    Where a model does not read a class token it is the mean over all patches. The colours of a map say how its
    attention to patches is divided among them, relative to uniform attention: 1 is a patch that gets as much as if all
    got the same.

    Args:
        model (nn.Module): As of :func:`~attncnn_plugin.attention_maps`, with a grid of patches.
        images (Tensor): ``(B, C, H, W)``, normalized as in training; the photos are drawn from their lowest to their
            highest value.
        layers (str | Iterable[str] | callable, optional): As of :func:`~attncnn_plugin.attention_maps`; a group of maps
            each. Defaults to None, the last one.
        query (Sequence[int], optional): Row and column of a patch that looks in place of the class token; there is no
            rollout then. Defaults to None.
        overlay (bool): Whether the maps are drawn on the photo. Defaults to False.

    Returns:
        Figure: Maps from left to right, for each image and layer: the mean of heads, then the heads; before those of an
        image's first layer the photo and the rollout. Where layers have other tokens than those before, as in Swin
        transformers, there is no rollout.

    Raises:
        TypeError: ``images`` are no tensor.
        ValueError: The model has no attention that is known, or not these layers; the images are not for it; a query
            outside of the grid.
    """
    if not isinstance(images, Tensor):
        raise TypeError(f'images={shown(images)} must be a tensor (B, C, H, W), normalized as in training')
    model = unwrap_model(model)
    rows, of_class = _rows(model, images, layers, query)
    try:
        reached = None if query is not None else rollout(model, images).cpu()
    except ValueError:  # there are other tokens after some layers: all else was fine above
        reached = None
    names = list(rows)[-1:] if layers is None else list(rows)
    left = 2 if reached is None else 3  # photo, rollout, mean of heads
    panels = left + max(1, *(rows[name].shape[1] for name in names))
    groups = [(image, name) for image in range(len(images)) for name in names]
    deep = math.ceil(panels / min(math.ceil(math.sqrt(panels * len(groups))), MOST_COLUMNS))
    lines, columns = len(groups) * deep, math.ceil(panels / deep)
    figure = Figure(figsize=(max(1.05 * columns + 0.7, 3.6), 1.14 * lines + 0.4), layout='constrained')
    grid, labels = figure.add_gridspec(lines, columns), layer_labels(rows)
    for group, (image, name) in enumerate(groups):
        own, photo = rows[name][image], _photo(images[image])
        maps = [own.mean(0), *own]
        titles = [f'{labels[name]}\nmean of heads', *(f'head {head}' for head in range(len(own)))]
        if name == names[0]:
            axes = figure.add_subplot(grid[group * deep, 0])
            axes.set_title(f'image {image}', fontsize=8, pad=2)
            draw_photo(axes, photo, own.shape[1:], query)
            if reached is not None:
                maps, titles = [reached[image], *maps], ['rollout', *titles]
        for place, (of_map, title) in enumerate(zip(maps, titles), left + len(own) - len(maps)):
            axes = figure.add_subplot(grid[group * deep + place // columns, place % columns])
            axes.set_title(title, fontsize=8, pad=2)
            drawn = draw_attention(axes, _relative(of_map).numpy(), photo if overlay else None, query)
    looks = 'the class token looks' if of_class else 'the patches look, mean over them'
    return _finish(figure, drawn, f'Where {looks if query is None else "the patch in the square looks"}.')


@settings()
def plot_heads(maps: Mapping[str, MeanAttention], query: Query = None, numbers: Numbers = None) -> Figure:
    """Draws all heads of all layers as small maps of what a patch attends to (C20, Figures 5 to 10).

    Rows are layers, columns heads. The colours are those of :func:`plot_attention`, so that a head that attends to all
    patches alike is white; the square is the query.

    Args:
        maps (Mapping[str, MeanAttention]): By layer, from :func:`~attncnn_plugin.analysis.mean_attention`.
        query (Sequence[int], optional): Row and column of the query, on each layer's grid; where not every patch is a
            query, it is the nearest one. Defaults to the middle of the grid; in windows to the mean over the queries
            that see a shift.
        numbers (Mapping[str, Sequence[int]], optional): See :func:`plot_attention_centers`.

    Returns:
        Figure: One axes a map; its data is in tokens, x the column and y the row.

    Raises:
        TypeError: ``maps`` are no attention maps.
        ValueError: No maps; a query outside of the grid.
    """
    check_maps(maps)
    columns, labels = max(len(own.probs) for own in maps.values()), layer_labels(maps)
    size = max(0.62, 2.6 / columns)  # inches of a map
    figure = Figure(figsize=(size * columns + 1.7, (size + 0.12) * len(maps) + 0.5), layout='constrained')
    grid = figure.add_gridspec(len(maps), columns)
    for line, (name, own) in enumerate(maps.items()):
        probs, place = keys_of_query(own, query)
        times = probs * math.prod(own.grid)
        if own.in_windows and query is None:
            times, place = _in_windows(own, probs, place)
        number_of = (numbers or {}).get(name, range(len(probs)))
        for head, of_head in enumerate(times.numpy()):
            axes = figure.add_subplot(grid[line, head])
            axes.set_title(f'head {number_of[head]}', fontsize=6.5, pad=2)
            if head == 0:
                axes.set_ylabel(labels[name], rotation=0, ha='right', va='center')
            drawn = draw_attention(axes, of_head, query=place)
    images = max(own.num_images for own in maps.values())
    mean = f', mean over {images} images' if images > 1 else ''
    return _finish(figure, drawn, f'What the patch in the square attends to{mean}.')


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
    size = max(0.22, 1.6 / width)  # of a cell: the titles need room
    figure = Figure(figsize=(3 * (size * width + 0.3) + 0.9, size * height + 1.7), layout='constrained')
    panels = figure.subplots(1, 3, sharey=True)
    largest = max(np.nanmax(np.abs(own)) for own in tables[:2]) or 1.0
    changes: Dict[str, Any] = dict(cmap=CHANGES, vmin=-largest, vmax=largest)
    titles = 'output at its mean', 'output at zero', 'gradient importance'
    looks = changes, changes, dict(cmap=IMPORTANCE, vmin=0)
    for axes, values, title, look in zip(panels, tables, titles, looks):
        axes.imshow(values, **look)
        axes.set(title=title, xlabel='head', xticks=range(0, width, 1 + width // 12), facecolor='#CCCCCC')
    label = f'change of the loss, which is {ablation.loss:.3g}'
    figure.colorbar(panels[0].images[0], ax=panels[:2], location='bottom', label=label, shrink=0.6, aspect=25)
    figure.colorbar(panels[2].images[0], ax=panels[2], location='bottom', label='mean |change of loss|', aspect=25)
    panels[0].set_yticks(range(height), layer_labels(ablation.importance).values())
    return figure


@torch.no_grad()
def _rows(model: nn.Module, images: Tensor, layers: Layers, query: Query) -> Tuple[Dict[str, Tensor], bool]:
    """Returns by layer what each patch gets, ``(B, N_h, H, W)``, and whether it is from the token that is read."""
    shapes: Dict[str, List[int]] = {}
    of_patches: Dict[str, Tensor] = {}
    of_tokens: Dict[str, Dict[float, Tensor]] = {}

    def add(name: str, probs: Tensor, places: Places) -> None:
        _, key, grid = cells(torch.zeros(1, 1) if places.keys is None else places.keys)
        on_grid, shapes[name] = places.on_grid(probs), list(probs.shape)
        if on_grid is not None:
            own = on_grid[0].float().cpu()
            rows = own.mean(2).unflatten(-1, grid)
            if query is not None:
                rows = torch.stack([MeanAttention(image, grid).of_query(query)[0] for image in own])
            of_patches[name] = rows
        if on_grid is None or not places.are_windows:
            order = key[0].argsort()[(key[0] < 0).sum() :]
            rows = {n: row[..., order] for n, row in beside_the_grid(probs, places).items()}
            if len(order) == grid[0] * grid[1] > 1:
                of_tokens[name] = {n: row.unflatten(-1, grid).float().cpu() for n, row in rows.items()}

    token = observe(model, images, add, layers)
    from_token = {name: rows[token] for name, rows in of_tokens.items() if token in rows and query is None}
    rows = from_token or of_patches
    others = {name: shape for name, shape in shapes.items() if name not in rows}
    if not rows or layers is not None and others:
        raise no_attention(model, others)
    return rows, bool(from_token)


def _relative(attention: Tensor) -> Tensor:
    """Returns attention relative to uniform attention to the patches that are shown."""
    return attention / attention.mean((-2, -1), keepdim=True).clamp(min=1e-12)


def _in_windows(maps: MeanAttention, probs: Tensor, place: Tuple[int, int]) -> Tuple[Tensor, Tuple[int, int]]:
    """Returns attention to the shifts that queries see, mean over those that do, and the place of shift 0."""
    share = keys_of_query(replace(maps, probs=(maps.probs > 0).float().amax(0, keepdim=True)))[0]
    down, right = (int((share[0] > 0).any(axis).nonzero().max()) - at for axis, at in zip((1, 0), place))
    rows, columns = (slice(at - reach, at + reach + 1) for at, reach in zip(place, (down, right)))
    return _relative((probs / share.clamp(min=1e-12))[:, rows, columns]), (down, right)


def _finish(figure: Figure, drawn: AxesImage, text: str) -> Figure:
    """Adds the colour bar of the maps, and a line of text below."""
    figure.supxlabel(text, fontsize=8)
    attention_bar(figure, drawn, ax=figure.axes, shrink=min(1, 2.5 / figure.get_figheight()), pad=0.01, aspect=15)
    return figure


def _photo(image: Tensor) -> np.ndarray:
    """Returns an image from 0 to 1, ``(H, W, 3)``, or grey ``(H, W)`` with another number of channels."""
    own = image.detach().float().cpu()
    own = own.permute(1, 2, 0) if len(own) == 3 else own.mean(0)
    return ((own - own.min()) / (own.max() - own.min()).clamp(min=1e-12)).numpy()
