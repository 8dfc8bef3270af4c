"""Attention probabilities of every layer of a model (Cordonnier et al. 2020 (C20), eq. 1 and 8).

A model is any module with softmax attention inside, of this package or of others, an attention layer itself among them.
Images are what its forward pass takes, normalized as in training.
"""

import math
import re
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import torch
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..attention import AttentionLayer
from ..attention.evaluation_mode import evaluating
from ..attention.positions import GaussianHeads
from ..attention.window import Window, per_axis, shown
from ..heads.choice import Layers, chosen_by
from ..heads.places import Places
from ..pruning.criteria import relative_entropy_of_maps
from ..pruning.prune import BLOCK
from .recorder import Call, called, no_attention, observe

BATCH_SIZE = 4  # images in a pass
HIDDEN = 1e-30  # of a probability; a mask of −100 leaves less
CHUNK_ELEMENTS = 2**24  # scores that a layer computes at once, 64 MiB of float32

Grid = Tuple[int, int]


@dataclass(frozen=True, eq=False)
class MeanAttention:
    """The attention probabilities of a layer's heads, mean over images or position-only.

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
        if self.window is None:
            return torch.arange(self.grid[0], device='cpu'), torch.arange(self.grid[1], device='cpu')
        return self.window.queries(0, self.grid[0], 'cpu'), self.window.queries(1, self.grid[1], 'cpu')

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
    if not has_own_attention(model):
        if images is None or size is not None or part != 'all':
            raise ValueError(
                f'size={shown(size)} and part={part!r}, but the attention of model, a {type(model).__name__}, depends '
                'on images, which say the grid, and has no parts: give only images'
            )
        return _maps_of_patches(model, images, layers, call)
    own_layers = {name: layer for name, layer in attention_layers(model).items() if chosen_by(layers)(name)}
    by_images = {
        name: layer
        for name, layer in own_layers.items()
        if layer.depends_on_content and not (part == 'position' and layer.has_position_scores)
    }
    grids = grids_of_layers(model, own_layers, images, size, call)
    maps = maps_of_images(model, by_images, images, part, call)
    for name in own_layers.keys() - by_images:
        exact = position_maps(own_layers[name], grids[name])
        maps[name] = replace(exact, probs=exact.probs.float())
    return {name: maps[name] for name in own_layers}


def grids_of_layers(
    model: nn.Module,
    layers: Mapping[str, AttentionLayer],
    images: Optional[Tensor],
    size: Optional[Sequence[int]],
    call: Call = None,
) -> Dict[str, Grid]:
    """Returns height and width of the keys of each layer, by one of the images or as they are given."""
    if (images is None) == (size is None):
        raise ValueError(f'images={shown(images)} and size={shown(size)}: give images, or the size of a grid in tokens')
    if images is None:
        height, width = per_axis('size', size, 2)  # type: ignore[arg-type]
        return dict.fromkeys(layers, (height, width))
    grids: Dict[str, Grid] = {}
    visit_layers(
        model, in_batches(images, 1)[0], layers, lambda name, layer, x: grids.update({name: layer.grid_of(x)}), call
    )
    return grids


@torch.no_grad()
def position_maps(layer: AttentionLayer, grid: Grid) -> MeanAttention:
    """Returns the position-only probabilities, in float64 if the layer has no others."""
    probs = layer.position_probs(grid) if layer.depends_on_content else layer.exact_attention_probs(grid)
    assert probs is not None
    gaussian = layer.gaussian_heads()
    if gaussian is not None:
        gaussian = GaussianHeads(*(values.cpu().double() for values in gaussian))
    return MeanAttention(probs.cpu(), grid, layer.window, gaussian)


def maps_of_images(
    model: nn.Module, layers: Mapping[str, AttentionLayer], images: Optional[Tensor], part: str, call: Call = None
) -> Dict[str, MeanAttention]:
    """Returns the mean over images of a part of the attention of layers whose scores depend on content."""
    if images is None:
        for name, layer in layers.items():
            raise ValueError(
                f'the scores of {name or "layer"}, {layer.extra_repr()}, depend on images: give images instead of '
                "size, or choose part='position' where a term depends only on position"
            )
        return {}
    means = ImageMeans()
    grids: Dict[str, Any] = {}

    def add(name: str, layer: AttentionLayer, x: Tensor) -> None:
        grids[name] = layer.grid_of(x)
        scores_of = layer.position_scores if part == 'position' else layer.attention_scores
        for some in few_images(layer, x):
            probs = probs_of_scores(scores_of(some), grids[name])
            means.add(name, probs, relative_entropy_of_maps(probs))

    for batch in in_batches(images, BATCH_SIZE) if layers else ():
        visit_layers(model, batch, layers, add, call)
    return {
        name: MeanAttention(probs.cpu(), grids[name], layers[name].window, None, number_of(images), entropy.cpu())
        for name, (probs, entropy) in means.items()
    }


class ImageMeans:
    """Means over images of tensors that come a few images at a time: those of all of them need not fit into memory."""

    def __init__(self) -> None:
        self._sums: Dict[str, List[Tensor]] = {}
        self._counts: Counter = Counter()

    def add(self, key: str, *values: Tensor) -> None:
        """Adds tensors ``(B, …)`` of some images, of the same shapes but for B at every call with this key."""
        sums = [value.sum(0) for value in values]
        self._sums[key] = [a + b for a, b in zip(self._sums[key], sums)] if key in self._sums else sums
        self._counts[key] += len(values[0])

    def items(self) -> List[Tuple[str, List[Tensor]]]:
        """Returns the means by key, in the order of the first images."""
        return [(key, [value / self._counts[key] for value in sums]) for key, sums in self._sums.items()]


def number_of(images: Any) -> int:
    """Returns how many images a tensor has, or the first of a mapping."""
    return len(next(iter(images.values())) if isinstance(images, Mapping) else images)


def in_batches(images: Any, size: int) -> Sequence[Any]:
    """Returns images, or a mapping of tensors of them, in batches of at most ``size``."""
    if not isinstance(images, Mapping):
        return images.split(size)
    return [dict(zip(images, parts)) for parts in zip(*(own.split(size) for own in images.values()))]


def few_images(layer: AttentionLayer, x: Tensor) -> Tuple[Tensor, ...]:
    """Returns inputs of a layer in parts of a few images, whose scores take 64 MiB at most, or of one image."""
    keys = math.prod(layer.grid_of(x))
    return x.split(max(1, CHUNK_ELEMENTS // (max(layer.num_heads, 1) * keys**2)))


def probs_of_scores(scores: Tensor, grid: Grid) -> Tensor:
    """Returns the softmax of the scores of an input, without the null key, ``(B, N_h, Q, H*W)``, float32."""
    return scores.float().softmax(-1)[..., : grid[0] * grid[1]]


@torch.no_grad()
def _maps_of_patches(model: nn.Module, images: Tensor, layers: Layers, call: Call) -> Dict[str, MeanAttention]:
    means = ImageMeans()
    found: Dict[str, Tuple[Grid, bool]] = {}  # the grid, and whether queries see only the keys of a window
    others: Dict[str, Tuple[int, ...]] = {}

    def add(name: str, probs: Tensor, places: Places) -> None:
        if not probs.isfinite().all():
            raise ValueError(
                f'the probabilities of {name or "attention"} are not finite: the parameters of model and the images '
                'must be'
            )
        in_windows = places.are_windows
        for some, of_some in places.by_image(probs) if in_windows else [(probs, places)]:
            on_grid = of_some.on_grid(some)
            if on_grid is None or on_grid[0].shape[-1] < 2:
                others[name] = tuple(probs.shape)
                return
            whole, grid = on_grid
            found[name] = grid, in_windows
            total = whole.sum(-1, keepdim=True)
            own = whole / total.clamp(min=torch.finfo(whole.dtype).tiny)
            entropy = torch.special.entr(own).sum(-1).mean(-1)  # −Σ_k P[q, k] log P[q, k]
            largest = math.log(own.shape[-1])
            if in_windows:
                seen = (own.amax((0, 1)) > HIDDEN).sum(-1)  # keys of each query
                largest = seen.clamp(min=1).double().log().mean().item()
            relative = (entropy / max(largest, torch.finfo(torch.float).tiny)).clamp(max=1)
            means.add(name, own, entropy, relative, 1 - total.squeeze(-1).mean(-1))

    model = unwrap_model(model)
    for batch in in_batches(images, BATCH_SIZE):
        observe(model, batch, add, layers, call)
    if not found:
        raise no_attention(model, others)
    return {
        name: MeanAttention(
            probs=probs.cpu(),
            grid=found[name][0],
            num_images=number_of(images),
            relative_entropy=relative.cpu(),
            entropy=entropy.cpu(),
            prefix_mass=left_out.cpu(),
            in_windows=found[name][1],
        )
        for name, (probs, entropy, relative, left_out) in means.items()
    }


def attention_layers(model: nn.Module) -> Dict[str, AttentionLayer]:
    """Returns the attention layers of this package in a model by name, in the order of its blocks.

    Raises:
        ValueError: The model has none, as a CMHSA in the convolution phase, or one along one or three axes.

    Examples:
        >>> import timm, attncnn_plugin
        >>> list(attention_layers(timm.create_model('sa_quadratic_cifar', depth=2)))
        ['blocks.0.attn', 'blocks.1.attn']
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, AttentionLayer)}
    if not layers:
        raise ValueError(
            f'the model, of type {type(model).__name__}, has no attention layers of this package (a CMHSA in the '
            'convolution phase gets them with its transition)'
        )
    for name, layer in layers.items():
        if layer.window is not None and layer.window.ndim != 2:
            raise ValueError(f'{name or "layer"} has {layer.window.ndim} axes of pixels, but heads are shown for two')
    return layers


def has_own_attention(model: nn.Module) -> bool:
    """Says whether a model has attention of this package."""
    return any(isinstance(module, AttentionLayer) for module in model.modules())


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


@torch.no_grad()
def visit_layers(
    model: nn.Module,
    images: Tensor,
    layers: Mapping[str, nn.Module],
    visit: Callable[[str, Any, Tensor], None],
    call: Call = None,
) -> None:
    """Calls ``visit(name, layer, x)`` with the input of each layer in one pass of the images, in evaluation mode.

    Raises:
        ValueError: A layer that the model does not run on images.

    Examples:
        >>> import timm, attncnn_plugin
        >>> model = timm.create_model('sa_quadratic_cifar', embed_dim=12, depth=2, num_heads=3)
        >>> layers = attention_layers(model)
        >>> visit_layers(model, torch.rand(1, 3, 8, 8), layers, lambda name, layer, x: print(name, tuple(x.shape)))
        blocks.0.attn (1, 4, 4, 12)
        blocks.1.attn (1, 4, 4, 12)
    """
    seen = set()

    def see(name: str, layer: nn.Module, args: Any) -> None:
        seen.add(name)
        visit(name, layer, args[0])

    with evaluating(model), ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_pre_hook(partial(see, name)).remove)
        called(model, images, call)
    for name in sorted(layers.keys() - seen):
        raise ValueError(f'{name} is attention that the model does not run on images: there is nothing to show')
