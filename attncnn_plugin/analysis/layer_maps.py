"""Attention probabilities of every layer of a model (Cordonnier et al. 2020 (C20), eq. 1 and 8).

A model is any module with softmax attention inside, of this package or of others, an attention layer itself among them.
Images are what its forward pass takes, normalized as in training.
"""

import math
import re
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Dict, Iterable, Iterator, Mapping, Optional, Sequence, Tuple

import torch
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..attention import AttentionLayer
from ..attention.positions import GaussianHeads
from ..attention.window import Window, per_axis, same_window, shown
from ..heads.choice import Layers, chosen_by
from ..heads.found import BLOCK
from ..heads.places import Places
from ..pruning.criteria import relative_entropy_of_maps
from .recorder import Call, attention_layers, no_attention, observe

BATCH_SIZE = 4  # images in a pass
CHUNK_ELEMENTS = 2**24  # scores that a layer computes at once, 64 MiB of float32, or those of a single image

Grid = Tuple[int, int]


@dataclass(frozen=True, eq=False)
class MeanAttention:
    """The attention probabilities of a layer's heads: their mean over images, or those that depend on position only.

    Attributes:
        probs (Tensor): P, ``(N_h, Q, H*W)`` for Q queries, row-major, float32, on the CPU. Rows add up to 1 or, with a
            null key or the zeros of a padding, to less.
        grid (tuple[int, int]): Height H and width W of the grid of keys, in tokens, patches or pixels.
        window (Window | None): Where the queries of an ``ImageAttention`` are; None where each key is a query.
        gaussian (GaussianHeads | None): Centres and shapes of Gaussian heads, where the probabilities are theirs.
        num_images (int): Number of images of the mean; 0 for position-only probabilities.
        relative_entropy (Tensor | None): Entropy of single images relative to that of uniform attention to all keys
            that a query sees, mean over queries and images, ``(N_h,)``; None for that of ``probs``. The mean of the
            probabilities has a larger one: a head can look at one key in each image, and at all of them in the mean.
        entropy (Tensor | None): The entropy in nats; None for ``relative_entropy`` times log H·W.
        prefix_mass (Tensor | None): What patches give to class tokens, registers and padding, mean over patches and
            images, ``(N_h,)``, for models of other libraries. What they give to patches was renormalized to 1.
        in_windows (bool): Whether queries see only the keys of their window, as in Swin transformers.
    """

    probs: Tensor
    grid: Grid
    window: Optional[Window] = None
    gaussian: Optional[GaussianHeads] = None
    num_images: int = 0
    relative_entropy: Optional[Tensor] = None
    entropy: Optional[Tensor] = None
    prefix_mass: Optional[Tensor] = None
    in_windows: bool = False

    @property
    def queries(self) -> Tuple[Tensor, Tensor]:
        """Rows and columns of the queries on the grid of keys."""
        window = self.window or same_window((1, 1))
        return window.queries(0, self.grid[0], 'cpu'), window.queries(1, self.grid[1], 'cpu')

    def of_query(self, query: Optional[Sequence[int]] = None) -> Tuple[Tensor, Tuple[int, int]]:
        """Returns the probabilities of the keys for the query that is nearest to a place, and where this query is.

        Args:
            query (Sequence[int], optional): Row and column of the place. Defaults to the middle of the grid.

        Returns:
            tuple[Tensor, tuple[int, int]]: ``(N_h, H, W)``, float64, and row and column of the query.

        Raises:
            ValueError: The place is outside of the grid.

        Examples:
            >>> MeanAttention(torch.eye(6)[None], (2, 3)).of_query((0, 1))
            (tensor([[[0., 1., 0.],
                     [0., 0., 0.]]], dtype=torch.float64), (0, 1))
        """
        height, width = self.grid
        row, column = (height // 2, width // 2) if query is None else query
        if not (0 <= row < height and 0 <= column < width):
            raise ValueError(
                f'query={(row, column)} must be a row from 0 to {height - 1} and a column from 0 to {width - 1}'
            )
        rows, columns = self.queries
        i, j = int((rows - row).abs().argmin()), int((columns - column).abs().argmin())
        keys = self.probs[:, i * len(columns) + j].double().unflatten(1, self.grid)
        return keys, (int(rows[i]), int(columns[j]))


def mean_attention(
    model: nn.Module,
    images: Any = None,
    size: Optional[Sequence[int]] = None,
    part: str = 'all',
    layers: Layers = None,
    call: Call = None,
) -> Dict[str, MeanAttention]:
    """Returns the attention probabilities of every layer of a model, mean over images, on the CPU.

    Probabilities that depend only on position are computed in float64. The model runs in evaluation mode, and stays as
    it was.

    Of attention of other libraries it is that of patches to patches, renormalized to 1, and 0 between windows. Class
    tokens, registers and the padding of windows are left out; so is attention whose queries and keys are not the same
    patches, such as that of class tokens alone, of pooled keys or over channels.

    Args:
        model (nn.Module): A model with softmax attention, of this package or of others.
        images (Tensor | Mapping, optional): ``(B, C, H, W)``, or keyword arguments with batches of these, at least one
            image; give a single one for its own attention. Without images there has to be a ``size``.
        size (Sequence[int], optional): Height and width of the grid in tokens, instead of images, where no layer
            depends on content.
        part (str): ``'all'``, or ``'position'``: the term that depends only on position, v·r_δ of C20's eq. 8 or the
            position bias of CMHSA, or q·r_δ in layers without one. Defaults to ``'all'``.
        layers (str | Iterable[str] | callable, optional): As of :func:`attncnn_plugin.attention_maps`. Defaults to
            None, all.
        call (Callable, optional): ``call(model, images)`` runs the model. Defaults to None, ``model(images)``.

    Returns:
        dict[str, MeanAttention]: By the layer's name in the model, in the order of the forward pass.

    Raises:
        ValueError: No attention between patches, as in a CMHSA in the convolution phase, or a layer that the images do
            not reach; both images and a size, or neither; a size where scores depend on content; a part of attention
            of another library.

    Examples:
        >>> import timm, attncnn_plugin
        >>> model = timm.create_model('sa_learned_content_cifar', embed_dim=12, depth=1, num_heads=3)
        >>> maps = mean_attention(model, torch.rand(9, 3, 8, 8))['blocks.0.attn']
        >>> maps.probs.shape, maps.grid, maps.of_query((1, 2))[0].shape
        (torch.Size([3, 16, 16]), (4, 4), torch.Size([3, 4, 4]))
    """
    if part not in ('all', 'position'):
        raise ValueError(f"part={part!r} is unknown: choose 'all' or 'position'")
    maps = maps_of_layers(model, images, size, (part,), layers, call)
    return {name: replace(own, probs=own.probs.float()) for name, _, _, own in maps}


def maps_of_layers(
    model: nn.Module, images: Any, size: Optional[Sequence[int]], parts: Sequence[str], layers: Layers, call: Call
) -> Iterator[Tuple[str, Optional[AttentionLayer], str, MeanAttention]]:
    """Yields name, layer, part and maps of all attention of a model, one after the other: they can be gigabytes.

    The layer is None for attention of another library, which has only the part ``'all'``. What depends only on position
    has the first of the parts, in float64.
    """
    if (images is None) == (size is None):
        raise ValueError(f'images={shown(images)} and size={shown(size)}: give images, or the size of a grid in tokens')
    model = unwrap_model(model)
    own_layers = {name: own for name, own in attention_layers(model).items() if chosen_by(layers)(name)}
    if not own_layers and (images is None or 'all' not in parts):
        raise ValueError(
            f'size={shown(size)} and part={parts[0]!r}, but the attention of model, a {type(model).__name__}, depends '
            'on images, which say the grid, and has no parts: give only images'
        )
    for name, own in own_layers.items():
        if any(hasattr(parameter, 'full_tensor') for parameter in own.parameters()):
            raise ValueError(f'{name} has parameters that are DTensors, as by fully_shard: give a model that is whole')
    if images is not None:
        seen, means = _seen_on_images(model, images, parts, layers, call)
    else:
        grid = per_axis('size', size, 2)  # type: ignore[arg-type]
        seen, means = {name: (own, grid) for name, own in own_layers.items()}, {}
    for name, (layer, grid) in seen.items():
        for part in parts if layer is None or layer.depends_on_content else parts[:1]:
            if layer is not None and is_of_position(layer, part):
                yield name, layer, part, position_maps(layer, grid)
            elif (name, part) in means:
                yield name, layer, part, means[name, part]
            elif layer is not None:
                raise ValueError(
                    f'the scores of {name or "layer"}, {layer.extra_repr()}, depend on images: give images instead of '
                    "size, or choose part='position' where a term depends only on position"
                )


@torch.no_grad()
def _seen_on_images(
    model: nn.Module, images: Any, parts: Sequence[str], layers: Layers, call: Call
) -> Tuple[Dict[str, Tuple[Any, Any]], Dict[Tuple[str, str], MeanAttention]]:
    """Returns the layers that run on images, in this order, with their grids, and means by name and part."""
    seen: Dict[str, Tuple[Any, Any]] = {}
    sums: Dict[Tuple[str, str], Any] = {}
    windows: Dict[str, bool] = {}
    others: Dict[str, Tuple[int, ...]] = {}

    def add(name: str, part: str, **values: Tensor) -> None:
        own = sums.setdefault((name, part), Counter())
        own.update({field: value.sum(0) for field, value in values.items()}, count=len(values['probs']))

    def visit_own(name: str, layer: AttentionLayer, x: Tensor) -> None:
        seen[name] = layer, layer.grid_of(x)
        number = max(1, CHUNK_ELEMENTS // (layer.num_heads * math.prod(seen[name][1]) ** 2))
        for part in parts:
            scores_of = layer.position_scores if part == 'position' else layer.attention_scores
            for some in x.split(number) if not is_of_position(layer, part) else ():
                probs = probs_of_scores(scores_of(some), seen[name][1])
                add(name, part, probs=probs, relative_entropy=relative_entropy_of_maps(probs))

    def visit(name: str, probs: Tensor, places: Places) -> None:
        if 'all' not in parts or not are_between_patches(name, probs, places):
            others[name] = tuple(probs.shape)
            return
        windows[name] = places.are_windows
        for grid, values in maps_between_patches(probs, places):
            seen[name] = None, grid
            add(name, 'all', **values)

    for batch in in_batches(images):
        observe(model, batch, visit, layers, call, visit_own)
        if not sums:  # all depends only on position
            break
    if not seen:
        raise no_attention(model, others)
    warn_of(model, others)
    means, number = {}, len(next(iter(images.values())) if isinstance(images, Mapping) else images)
    for (name, part), own in sums.items():
        (layer, grid), count = seen[name], own.pop('count')
        values: Dict[str, Any] = {field: (value / count).cpu() for field, value in own.items()}
        values.update(window=getattr(layer, 'window', None), in_windows=windows.get(name, False))
        means[name, part] = MeanAttention(grid=grid, num_images=number, **values)
    return seen, means


def are_between_patches(name: str, probs: Tensor, places: Places) -> bool:
    """Says whether attention of another library is between all patches of a grid, and has no negative weights.

    Raises:
        ValueError: Probabilities that are not finite.
    """
    if not probs.isfinite().all():
        raise ValueError(
            f'the probabilities of {name or "attention"} are not finite: the parameters of model and the images must be'
        )
    on_grid = places.on_grid(probs[:, :1])
    return on_grid is not None and on_grid[1] != (1, 1) and bool((probs >= 0).all())


def warn_of(model: nn.Module, others: Mapping[str, Sequence[int]]) -> None:
    """Warns that attention of these shapes is left out."""
    if others:
        shapes = ', '.join(f'{name} {tuple(shape)}' for name, shape in others.items())
        warnings.warn(
            f'attention of a {type(model).__name__} is left out, for it is not between all patches of a grid, has '
            f'negative weights, or no part that depends only on position: {shapes}; attention_maps returns it',
            stacklevel=2,
        )


def maps_between_patches(probs: Tensor, places: Places) -> Iterator[Tuple[Grid, Dict[str, Tensor]]]:
    """Yields the grid of patches and the fields of :class:`MeanAttention`; of windows, image by image."""
    for some, of_some in places.by_image(probs) if places.are_windows else [(probs, places)]:
        whole, grid = of_some.on_grid(some)  # type: ignore[misc]
        total = whole.sum(-1, keepdim=True)
        own = whole / total.clamp(min=torch.finfo(whole.dtype).tiny)
        entropy = torch.special.entr(own).sum(-1).mean(-1)  # −Σ_k P[q, k] log P[q, k]
        largest = math.log(own.shape[-1])
        if places.are_windows:
            number = of_some.sees(some).sum(-1)[of_some.queries > 0]  # type: ignore[operator]
            largest = max(number.double().log().mean().item(), torch.finfo(torch.float).tiny)
        relative, left_out = (entropy / largest).clamp(max=1), 1 - total.squeeze(-1).mean(-1)
        yield grid, dict(probs=own, entropy=entropy, relative_entropy=relative, prefix_mass=left_out)


def is_of_position(layer: AttentionLayer, part: str) -> bool:
    """Says whether a part of the attention of a layer depends only on position."""
    return not layer.depends_on_content or part == 'position' and layer.has_position_scores


@torch.no_grad()
def position_maps(layer: AttentionLayer, grid: Grid) -> MeanAttention:
    """Returns the position-only probabilities, in float64 if the layer has no others."""
    probs = layer.position_probs(grid) if layer.depends_on_content else layer.exact_attention_probs(grid)
    assert probs is not None
    if (gaussian := layer.gaussian_heads()) is not None:
        gaussian = GaussianHeads(*(values.cpu().double() for values in gaussian))
    return MeanAttention(probs.cpu(), grid, layer.window, gaussian)


def in_batches(images: Any, number: int = BATCH_SIZE) -> Sequence[Any]:
    """Splits images, or each tensor of a mapping, into batches of so many images."""
    if not isinstance(images, Mapping):
        return images.split(number)
    return [dict(zip(images, parts)) for parts in zip(*(own.split(number) for own in images.values()))]


def probs_of_scores(scores: Tensor, grid: Grid) -> Tensor:
    """Returns the softmax of the scores of an input, without the null key, ``(B, N_h, Q, H*W)``, float32."""
    return scores.float().softmax(-1)[..., : grid[0] * grid[1]]


def layer_labels(names: Iterable[str]) -> Dict[str, str]:
    """Returns short names of layers for figures; their names in the model where others would have the same.

    Examples:
        >>> layer_labels(['backbone.blocks.0.attn', 'stages.0.blocks.1.attn.w_msa', 'layers.1.conv1', 'layers.1.conv2'])
        ... # doctest: +NORMALIZE_WHITESPACE
        {'backbone.blocks.0.attn': 'block 0', 'stages.0.blocks.1.attn.w_msa': 'stage 0 block 1',
         'layers.1.conv1': 'layers.1.conv1', 'layers.1.conv2': 'layers.1.conv2'}
    """
    labels = {}
    for name in names:
        staged = re.search(r'(?:^|\.)(?:stages|layers)\.(\d+)\.blocks\.(\d+)\.', name)
        block = re.search(BLOCK.format(r'\d+'), name)
        labels[name] = f'stage {staged[1]} block {staged[2]}' if staged else f'block {block[1]}' if block else name
    count = Counter(labels.values())
    return {name: label if count[label] == 1 else name for name, label in labels.items()}
