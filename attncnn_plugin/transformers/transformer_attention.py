"""The attention of vision transformers of timm and mmpretrain, as they compute it on images.

Modules are told by what they have, and are not changed. Windows are found by the module that cuts the tokens itself.
"""

import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor, nn

from ..attention.evaluation_mode import evaluating
from .image_means import ImageMeans
from .vision_transformer import BLOCKS, find_transformer, num_prefix_tokens, patch_grid

BATCH_SIZE = 4  # images in a pass
CUTS = ('_attn', '_shifted_window_attn')  # methods of timm's blocks that cut tokens into windows

Visit = Callable[[str, Tensor, 'TokenPlaces'], None]


@dataclass(frozen=True, eq=False)
class TokenPlaces:
    """Where the tokens of an attention lie.

    Attributes:
        grid (tuple[int, int]): Height H and width W of the grid of patches.
        prefix (int): Number of tokens beside the patches, which come before them: class tokens, registers.
        windows (Tensor | None): The numbers of the patches in each window, ``(windows, M)``, row-major, H·W for
            padding. None where all tokens attend to all.
        masked (Tensor | None): Whether a query does not see a key of its window, ``(windows, M, M)``, bool, as of
            shifted windows. None where it sees all.
    """

    grid: Tuple[int, int]
    prefix: int = 0
    windows: Optional[Tensor] = None
    masked: Optional[Tensor] = None

    def of_patches(self, probs: Tensor) -> Tuple[Tensor, Tensor]:
        """What patches give to patches, renormalized to 1, where it lies: no larger than the model's probabilities.

        Args:
            probs (Tensor): As the model computes them, ``(B, N_h, N, N)``, of windows ``(B·windows, N_h, M, M)``.

        Returns:
            tuple[Tensor, Tensor]: The probabilities, ``(B, N_h, H·W, H·W)``, of windows ``(B, N_h, windows, M, M)``
            with 0 for padding, and what patches give to other tokens and to padding, mean over patches, ``(B, N_h)``.
        """
        if self.windows is None:
            kept = probs[:, :, self.prefix :, self.prefix :]
        else:
            kept = probs.unflatten(0, (-1, len(self.windows))).transpose(1, 2) * self._of_patches
        total = kept.sum(-1, keepdim=True)
        left_out = 1 - total.flatten(2).sum(-1) / (self.grid[0] * self.grid[1])
        return kept / total.clamp(min=torch.finfo(kept.dtype).tiny), left_out

    def on_grid(self, own: Tensor) -> Tensor:
        """The probabilities of :meth:`of_patches` between all patches.

        Args:
            own (Tensor): ``(…, H·W, H·W)``, of windows ``(…, windows, M, M)``.

        Returns:
            Tensor: ``(…, H·W, H·W)``, 0 between windows.
        """
        if self.windows is None:
            return own
        windows, among = self.windows.to(own.device), self._of_patches.to(own.device)
        query, key = windows[:, :, None].expand_as(among), windows[:, None].expand_as(among)
        patches = self.grid[0] * self.grid[1]
        whole = own.new_zeros(*own.shape[:-3], patches, patches)
        whole[..., query[among], key[among]] = own[..., among]
        return whole

    def between_patches(self, probs: Tensor) -> Tuple[Tensor, Tensor]:
        """:meth:`of_patches`, between all patches.

        Args:
            probs (Tensor): As the model computes them, ``(B, N_h, N, N)``, of windows ``(B·windows, N_h, M, M)``.

        Returns:
            tuple[Tensor, Tensor]: The probabilities, ``(B, N_h, H·W, H·W)``, 0 between windows, and what patches give
            to other tokens and to padding, mean over patches, ``(B, N_h)``.

        Examples:
            >>> places = TokenPlaces((1, 2), windows=torch.tensor([[0, 2], [1, 2]]))  # two windows, half of each padded
            >>> probs, left_out = places.between_patches(torch.full((2, 1, 2, 2), 0.5))
            >>> probs, left_out
            (tensor([[[[1., 0.],
                      [0., 1.]]]]), tensor([[0.5000]]))
        """
        own, left_out = self.of_patches(probs)
        return self.on_grid(own), left_out

    def entropies(self, own: Tensor) -> Tuple[Tensor, float]:
        """The entropy of each head, and that of attention to all patches alike that a query sees.

        Args:
            own (Tensor): Probabilities, ``(B, N_h, H·W, H·W)``, of windows ``(B, N_h, windows, M, M)``.

        Returns:
            tuple[Tensor, float]: ``(B, N_h)`` and the largest that it can be, in nats, means over patches.

        Examples:
            >>> places = TokenPlaces((1, 4), windows=torch.tensor([[0, 1], [2, 3]]))
            >>> places.entropies(torch.full((1, 1, 2, 2, 2), 0.5))  # log 2
            (tensor([[0.6931]]), 0.6931471824645996)
        """
        patches = self.grid[0] * self.grid[1]
        entropy = torch.special.entr(own).flatten(2).sum(-1) / patches  # −Σ_k P[q, k] log P[q, k]
        if self.windows is None:
            return entropy, math.log(patches)
        seen = self._of_patches if self.masked is None else self._of_patches & ~self.masked
        return entropy, (seen.sum(-1).clamp(min=1).float().log().sum() / patches).item()

    @property
    def _of_patches(self) -> Tensor:
        """Whether the query and the key of a window are patches and not padding, ``(windows, M, M)``."""
        assert self.windows is not None
        patches = self.windows < self.grid[0] * self.grid[1]
        return patches[:, :, None] & patches[:, None]


def vit_attention(model: nn.Module, images: Tensor) -> Tuple[Dict[str, Tensor], Dict[str, Tensor]]:
    """The attention of patches to patches in every layer of a vision transformer.

    Class, distillation and register tokens come before the patches: as many tokens as a layer has beyond the patches
    of the image are left out at the front, as queries and as keys. So is the padding of windows. The probabilities that
    a patch gives to patches are renormalized to 1.

    Args:
        model (nn.Module): A model of timm or mmpretrain, or one with such a backbone, whose attention has its
            probabilities pass through ``attn_drop``, or is computed by its ``scaled_dot_product_attention``: ViT,
            DeiT, BEiT, EVA, DINOv3, ConViT, Swin and their relatives. timm's fused attention is off meanwhile.
        images (Tensor): ``(B, C, H, W)``, normalized as for the model.

    Returns:
        tuple[dict, dict]: By the name of the attention, the probabilities ``(B, N_h, patches, patches)``, 0 between
        windows, and what patches give to the tokens left out, mean over patches, ``(B, N_h)``.

    Raises:
        ValueError: The model is built in another way: pooled keys, attention over channels, mixed heads.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, embed_dim=12, num_heads=3, depth=1)
        >>> probs, prefix_mass = vit_attention(model, torch.rand(2, 3, 32, 32))
        >>> probs['blocks.0.attn'].shape, prefix_mass['blocks.0.attn'].shape
        (torch.Size([2, 3, 4, 4]), torch.Size([2, 3]))
    """
    found, prefix_mass = {}, {}

    def keep(name: str, probs: Tensor, places: TokenPlaces) -> None:
        found[name], prefix_mass[name] = places.between_patches(probs)

    visit_vit_attention(model, images, keep)
    return found, prefix_mass


def mean_vit_attention(model: nn.Module, images: Tensor, batch_size: int = BATCH_SIZE) -> Dict[str, Tensor]:
    """The mean over images of :func:`vit_attention`, without all of them in memory.

    Args:
        model (nn.Module): See :func:`vit_attention`.
        images (Tensor): ``(B, C, H, W)``, normalized as for the model, at least one.
        batch_size (int): Images in a pass. Defaults to 4.

    Returns:
        dict[str, Tensor]: ``(N_h, patches, patches)`` by the name of the attention, float32, on the CPU.

    Raises:
        ValueError: See :func:`vit_attention`.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, embed_dim=12, num_heads=3, depth=1)
        >>> mean_vit_attention(model, torch.rand(9, 3, 32, 32))['blocks.0.attn'].shape
        torch.Size([3, 4, 4])
    """
    means = ImageMeans()
    places: Dict[str, TokenPlaces] = {}

    def add(name: str, probs: Tensor, where: TokenPlaces) -> None:
        means.add(name, where.of_patches(probs)[0])
        places[name] = where

    for batch in images.split(batch_size):
        visit_vit_attention(model, batch, add)
    # Of windows it is large: (H·W)² entries a head, of which few are not 0.
    return {name: places[name].on_grid(probs.cpu()) for name, (probs,) in means.items()}


def vit_grids(model: nn.Module, images: Tensor) -> Dict[str, Tuple[int, int]]:
    """Height and width of the grid of patches of every layer.

    Args:
        model (nn.Module): See :func:`vit_attention`.
        images (Tensor): ``(B, C, H, W)``; the first one is run.

    Raises:
        ValueError: See :func:`vit_attention`.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, embed_dim=12, num_heads=3, depth=1)
        >>> vit_grids(model, torch.rand(1, 3, 32, 32))
        {'blocks.0.attn': (2, 2)}
    """
    grids = {}

    def keep(name: str, probs: Tensor, places: TokenPlaces) -> None:
        grids[name] = places.grid

    visit_vit_attention(model, images[:1], keep)
    return grids


def vit_layers(model: nn.Module) -> Dict[str, Any]:
    """The attention in the blocks of a vision transformer by name, each with ``num_heads``.

    Args:
        model (nn.Module): See :func:`vit_attention`.

    Raises:
        ValueError: There is none that can be seen.

    Examples:
        >>> import timm
        >>> list(vit_layers(timm.create_model('vit_tiny_patch16_224', depth=1)))
        ['blocks.0.attn']
    """
    prefix, network = find_transformer(model)
    return {f'{prefix}.{name}' if prefix else name: module for name, module in _attention_modules(network).items()}


def vit_layers_in_windows(model: nn.Module) -> List[str]:
    """Names of the attention of a vision transformer that is computed in windows, as that of Swin transformers.

    Args:
        model (nn.Module): See :func:`vit_attention`.

    Raises:
        ValueError: See :func:`vit_layers`.
    """
    return [name for name in vit_layers(model) if _cuts_windows(model.get_submodule(name.rpartition('.')[0]))]


@torch.no_grad()
def visit_vit_attention(model: nn.Module, images: Tensor, visit: Visit) -> None:
    """Calls ``visit(name, probs, places)`` for each attention in one pass of the images, in evaluation mode.

    Args:
        model (nn.Module): See :func:`vit_attention`.
        images (Tensor): ``(B, C, H, W)``, normalized as for the model.
        visit (Callable): Takes the name of an attention, its probabilities as the model computes them, float32, and the
            :class:`TokenPlaces` of their queries and keys.

    Raises:
        ValueError: See :func:`vit_attention`.
    """
    name, network = find_transformer(model)
    grid = patch_grid(network, images)
    modules = _attention_modules(network)
    windows: Dict[str, TokenPlaces] = {}
    seen = dict.fromkeys(modules, 0)

    def visit_probs(own_name: str, probs: Tensor) -> None:
        seen[own_name] += 1
        places = windows.get(own_name) or TokenPlaces(grid, probs.shape[-1] - grid[0] * grid[1])
        _check_probs(network, own_name, probs, len(images), modules[own_name].num_heads, places)
        visit(f'{name}.{own_name}' if name else own_name, probs.float(), places)

    def visit_no_heads(own_name: str, in_windows: bool, module: nn.Module, args: Any) -> None:
        if in_windows == (own_name in windows):  # not while these are looked for
            visit_probs(own_name, args[0].new_zeros(len(args[0]), 0, args[0].shape[1], args[0].shape[1]))

    with evaluating(network), ExitStack() as stack:
        for own_name, module in modules.items():
            owner = network.get_submodule(own_name.rpartition('.')[0])
            in_windows = _cuts_windows(owner)
            handles = []
            if in_windows:
                handles.append(owner.register_forward_pre_hook(partial(_keep_windows, windows, own_name, module)))
            if module.num_heads == 0:
                handles.append(module.register_forward_pre_hook(partial(visit_no_heads, own_name, in_windows)))
            else:
                stack.enter_context(visited_attention(module, partial(visit_probs, own_name)))
            for handle in handles:
                stack.callback(handle.remove)
        network(images)
    for own_name, count in seen.items():
        if count != 1:
            raise _other_structure(network, f'{own_name} has its probabilities computed {count} times')


@contextmanager
def visited_attention(module: Any, visit: Callable[[Tensor], None]) -> Iterator[None]:
    """Calls ``visit(probs)`` inside, whenever the attention is computed."""
    if _computes_by_function(module):
        function = module.scaled_dot_product_attention

        def attend(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
            every_key = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], -1)
            visit(function(query, key, every_key, **kwargs))  # P·I = P
            return function(query, key, value, **kwargs)

        module.scaled_dot_product_attention = attend
        try:
            yield
        finally:
            module.scaled_dot_product_attention = function
        return
    fused = getattr(module, 'fused_attn', False)
    if fused:
        module.fused_attn = False  # the other path has the probabilities
    handle = module.attn_drop.register_forward_pre_hook(lambda _, args: visit(args[0]))
    try:
        yield
    finally:
        handle.remove()
        if fused:
            module.fused_attn = fused


def _computes_by_function(module: nn.Module) -> bool:
    """Whether attention is computed by a function of its own, as mmpretrain's ``MultiheadAttention`` has it."""
    return callable(getattr(module, 'scaled_dot_product_attention', None))


def _attention_modules(network: Any) -> Dict[str, Any]:
    """The attention in the blocks of a transformer, by its name there."""
    modules = {
        f'{blocks}.{name}': module
        for blocks in BLOCKS
        if isinstance(getattr(network, blocks, None), nn.Module)
        for name, module in network.get_submodule(blocks).named_modules()
        if hasattr(module, 'num_heads')
        and (isinstance(getattr(module, 'attn_drop', None), nn.Module) or _computes_by_function(module))
    }
    if not modules:
        raise _other_structure(network, 'its blocks have no attention with num_heads and attn_drop')
    return modules


def _cuts_windows(owner: nn.Module) -> bool:
    """Whether a module cuts tokens into windows for the attention inside, as those of Swin transformers."""
    return any(hasattr(owner, name) for name in CUTS) or hasattr(owner, 'window_partition')


def _keep_windows(windows: Dict[str, TokenPlaces], name: str, attention: Any, owner: Any, args: Any) -> None:
    """Finds the windows and their mask by running their owner on the numbers of the tokens, from 1 on; padding is 0."""
    if hasattr(owner, 'window_partition'):  # of mmpretrain
        _, (height, width) = args
        cut = owner.forward
    else:
        _, height, width, _ = args[0].shape
        cut = next(getattr(owner, method) for method in CUTS if hasattr(owner, method))
    numbers = torch.arange(1, height * width + 1, dtype=torch.float, device=args[0].device)  # half has no 2049
    found: List[Tuple[Tensor, Optional[Tensor]]] = []

    def keep(x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        found.append((x, mask))
        return x

    own = attention.__dict__.get('forward')  # that another library has set
    attention.forward = keep
    try:
        if hasattr(owner, 'window_partition'):
            cut(numbers[None, :, None], (height, width))
        else:
            cut(numbers.reshape(1, height, width, 1))
    finally:
        del attention.forward
        if own is not None:
            attention.forward = own
    ((x, mask),) = found
    number = x[..., 0].long()
    numbers = torch.where(number == 0, height * width, number - 1)
    windows[name] = TokenPlaces((height, width), 0, numbers, None if mask is None else mask < 0)


def _check_probs(network: Any, name: str, probs: Tensor, batch: int, num_heads: int, places: TokenPlaces) -> None:
    """Whether the probabilities are those of all tokens, or of windows, and add up to 1."""
    allowed = num_prefix_tokens(network)
    if places.windows is None:
        # A layer may come before the class token is added, as in ConViT. Differential attention has two maps a head.
        fits = places.prefix in (0, allowed)
        leading, tokens = batch, f'the {places.grid[0] * places.grid[1]} patches and up to {allowed} other tokens'
    else:
        count, size = places.windows.shape
        fits = probs.shape[-1] == size
        leading, tokens = batch * count, f'the {size} tokens of a window'
    square = probs.ndim == 4 and probs.shape[2] == probs.shape[3]
    if not fits or not square or probs.shape[:2] != (leading, num_heads):
        raise _other_structure(
            network,
            f'the probabilities of {name} have shape {tuple(probs.shape)}, but ({leading}, N_h, N, N) with '
            f'N_h = {num_heads} and {tokens} are needed',
        )
    if not probs.isfinite().all():
        raise ValueError(f'the probabilities of {name} are not finite: the parameters of model must be finite')
    tolerance = max(1e-3, 4 * torch.finfo(probs.dtype).eps)  # bfloat16 rounds each of them by up to 2⁻⁹ of it
    if (probs < 0).any() or (probs.float().sum(-1) - 1).abs().gt(tolerance).any():
        raise _other_structure(network, f'the probabilities of {name} do not add up to 1')


def _other_structure(network: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f'model is a {type(network).__name__}, whose attention cannot be reported: {reason}. Give a vision transformer '
        'of timm or mmpretrain (ViT, DeiT, BEiT, EVA, ConViT, Swin), with attention of all patches, or of all of a '
        'window, to each other'
    )
