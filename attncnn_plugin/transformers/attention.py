"""The attention of vision transformers of other libraries, as they compute it on images in evaluation mode.

Hooks see what each module is called with; its probabilities are computed from that by the entry of its class in
:data:`~attncnn_plugin.transformers.adapters.ADAPTERS`.
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..attention.evaluation_mode import evaluating
from .adapters import Attention, by_name, find_attention
from .vision_transformer import find_transformer, num_prefix_tokens, patch_grid

Visit = Callable[[str, Tensor, 'TokenPlaces'], None]


@dataclass(frozen=True, eq=False)
class TokenPlaces:
    """The places of the tokens of an attention in the grid of patches.

    Attributes:
        grid (tuple[int, int]): Height H and width W of the grid of patches.
        prefix (int): Number of tokens beside the patches, which come before them: class tokens, registers.
        windows (Tensor | None): The numbers of the patches in each window, ``(windows, M)``, row-major, H·W for
            padding. None where all tokens attend to all.
        masked (Tensor | None): True where a query does not see a key of its window, ``(windows, M, M)``, as of shifted
            windows. None where it sees all.
    """

    grid: Tuple[int, int]
    prefix: int = 0
    windows: Optional[Tensor] = None
    masked: Optional[Tensor] = None

    def of_patches(self, probs: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns what patches give to patches, renormalized to 1, where it lies, no larger than all.

        Args:
            probs (Tensor): As the model computes them, ``(B, N_h, N, N)``, of windows ``(B·windows, N_h, M, M)``.

        Returns:
            tuple[Tensor, Tensor]: The probabilities, ``(B, N_h, H·W, H·W)``, of windows ``(B, N_h, windows, M, M)``
            with 0 for padding, and what patches give to other tokens and to padding, mean over patches, ``(B, N_h)``.

        Examples:
            >>> places = TokenPlaces((1, 2), windows=torch.tensor([[0, 2], [1, 2]]))  # two windows, half of each padded
            >>> own, left_out = places.of_patches(torch.full((2, 1, 2, 2), 0.5))
            >>> places.on_grid(own), left_out
            (tensor([[[[1., 0.],
                      [0., 1.]]]]), tensor([[0.5000]]))
        """
        if self.windows is None:
            kept = probs[:, :, self.prefix :, self.prefix :]
        else:
            kept = probs.unflatten(0, (-1, len(self.windows))).transpose(1, 2) * self._of_patches
        total = kept.sum(-1, keepdim=True)
        left_out = 1 - total.flatten(2).sum(-1) / (self.grid[0] * self.grid[1])
        return kept / total.clamp(min=torch.finfo(kept.dtype).tiny), left_out

    def on_grid(self, own: Tensor) -> Tensor:
        """Returns the probabilities of :meth:`of_patches` between all patches, ``(…, H·W, H·W)``, 0 between windows."""
        if self.windows is None:
            return own
        windows, among = self.windows.to(own.device), self._of_patches.to(own.device)
        query, key = windows[:, :, None].expand_as(among), windows[:, None].expand_as(among)
        patches = self.grid[0] * self.grid[1]
        whole = own.new_zeros(*own.shape[:-3], patches, patches)
        whole[..., query[among], key[among]] = own[..., among]
        return whole

    def entropies(self, own: Tensor) -> Tuple[Tensor, float]:
        """Computes the entropy of each head, ``(B, N_h)``, and the largest that it can be, in nats, means over patches.

        ``own`` are the probabilities of :meth:`of_patches`.

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
        """Says whether the query and the key of a window are patches, not padding, ``(windows, M, M)``."""
        assert self.windows is not None
        patches = self.windows < self.grid[0] * self.grid[1]
        return patches[:, :, None] & patches[:, None]


def vit_layers(model: nn.Module) -> Dict[str, Any]:
    """Returns the attention in the blocks of a vision transformer by name, see :func:`find_attention`."""
    return {attention.name: attention.module for attention in find_attention(model)}


@torch.no_grad()
def visit_vit_attention(model: nn.Module, images: Tensor, visit: Visit) -> None:
    """Calls ``visit(name, probs, places)`` for each attention in one pass of the images, in evaluation mode.

    Args:
        model (nn.Module): A model of timm or mmpretrain whose attention is of a class in
            :data:`~attncnn_plugin.transformers.adapters.ADAPTERS`, or one with such a backbone.
        images (Tensor): ``(B, C, H, W)``, normalized as for the model.
        visit (Callable): Takes the name of an attention, its probabilities as the model computes them, float32, and the
            :class:`TokenPlaces` of their queries and keys.

    Raises:
        ValueError: The attention is of another class, runs not once, or gives what is not finite.
    """
    _, network = find_transformer(model)
    grid = 0, 0
    windows: Dict[str, TokenPlaces] = {}
    seen: List[str] = []

    def see_patches(embed: nn.Module, args: Any, output: Any) -> None:
        nonlocal grid
        grid = patch_grid(network, args[0], output)

    def cut(attention: Attention, owner: nn.Module, args: Any) -> None:
        assert attention.adapter.windows is not None
        windows[attention.name] = places_in_windows(*attention.adapter.windows(owner, args))

    def visit_probs(name: str, probs: Tensor, masked: Optional[Tensor]) -> None:
        places = windows.get(name) or TokenPlaces(grid, probs.shape[-1] - grid[0] * grid[1])
        if places.windows is not None:
            places = replace(places, windows=places.windows.to(probs.device), masked=masked)
        # A layer may come before the class token is added, as in ConViT.
        elif places.prefix not in (0, num_prefix_tokens(network)):
            raise ValueError(
                f'{name} of a {type(network).__name__} has {probs.shape[-1]} tokens, but the {grid[0] * grid[1]} '
                f'patches of its image and up to {num_prefix_tokens(network)} other tokens were expected'
            )
        if not probs.isfinite().all():
            raise ValueError(f'the probabilities of {name} are not finite: the parameters of model must be finite')
        seen.append(name)
        visit(name, probs.float(), places)

    layers = find_attention(model)
    with evaluating(network), ExitStack() as stack:
        stack.enter_context(network.patch_embed.register_forward_hook(see_patches))
        for attention in layers:
            stack.enter_context(visited_attention(attention.module, partial(visit_probs, attention.name)))
            if attention.adapter.windows is not None:
                stack.enter_context(attention.block.register_forward_pre_hook(partial(cut, attention)))
        network(images)
    wrong = [attention.name for attention in layers if seen.count(attention.name) != 1]
    if wrong:
        raise ValueError(
            f'{wrong[0]} of a {type(network).__name__} runs {seen.count(wrong[0])} times, but once was needed'
        )


def visited_attention(module: nn.Module, visit: Callable[[Tensor, Optional[Tensor]], None]) -> RemovableHandle:
    """Calls ``visit(probs, masked)`` whenever attention of another library has run, until the handle is left.

    ``probs`` are ``(B, N_h, N, N)``, of windows ``(B·windows, N_h, M, M)``; ``masked`` is as in :class:`TokenPlaces`.

    Raises:
        TypeError: Its class is unknown.
    """
    attention = Attention(module)

    def see(module: nn.Module, args: Any, kwargs: Dict[str, Any], output: Any) -> None:
        mask = by_name(module, args[1:], kwargs).get('mask')
        visit(attention.probs(args, kwargs), None if mask is None else mask < 0)

    return module.register_forward_hook(see, with_kwargs=True)


def places_in_windows(
    grid: Tuple[int, int], window: Tuple[int, int], shift: Tuple[int, int], pads_first: bool
) -> TokenPlaces:
    """Returns the places of the tokens of windows, as they are cut from a grid that is shifted and padded.

    The grid is rolled up and left by ``shift``, and padded at the bottom and on the right, before if ``pads_first``.

    Examples:
        >>> places_in_windows((1, 3), (1, 2), (0, 1), pads_first=False).windows  # 3 is padding
        tensor([[1, 2],
                [0, 3]])
    """
    patches = grid[0] * grid[1]
    numbers = torch.arange(patches).view(grid)
    if not pads_first:
        numbers = numbers.roll((-shift[0], -shift[1]), (0, 1))
    numbers = F.pad(numbers, (0, -grid[1] % window[1], 0, -grid[0] % window[0]), value=patches)
    if pads_first:
        numbers = numbers.roll((-shift[0], -shift[1]), (0, 1))
    rows = numbers.unflatten(0, (-1, window[0])).unflatten(2, (-1, window[1]))  # (…, height, …, width)
    return TokenPlaces(grid, windows=rows.transpose(1, 2).flatten(2).flatten(0, 1))
