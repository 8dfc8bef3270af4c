"""The attention of vision transformers of other libraries, as they compute it on images in evaluation mode.

Hooks see what each module is called with; its probabilities are computed from that by the entry of its class in
:data:`~attncnn_plugin.transformers.adapters.ADAPTERS`.
"""

import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch
from torch import Tensor, nn

from ..attention.evaluation_mode import evaluating
from ..attention.precision import at_least_float32
from .adapters import Attention, Call, find_attention, numbers_in_windows
from .vision_transformer import find_transformer, images_for

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
            kept = self.by_window(probs) * self._of_patches
        total = kept.sum(-1, keepdim=True)
        left_out = 1 - total.flatten(2).sum(-1) / (self.grid[0] * self.grid[1])
        return kept / total.clamp(min=torch.finfo(kept.dtype).tiny), left_out

    def by_window(self, probs: Tensor) -> Tensor:
        """Returns probabilities ``(B·windows, N_h, M, M)`` as ``(B, N_h, windows, M, M)``."""
        assert self.windows is not None
        return probs.unflatten(0, (-1, len(self.windows))).transpose(1, 2)

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


@torch.no_grad()
def visit_vit_attention(model: nn.Module, images: Tensor, visit: Visit) -> None:
    """Calls ``visit(name, probs, places)`` for each attention in one pass of the images, in evaluation mode.

    Args:
        model (nn.Module): A vision transformer whose attention is of a class in
            :data:`~attncnn_plugin.transformers.adapters.ADAPTERS`, or a model with one.
        images (Tensor): ``(B, C, H, W)``, normalized as for the model.
        visit (Callable): Takes the name of an attention, its probabilities as the model computes them, at least
            float32, and the :class:`TokenPlaces` of their queries and keys.

    Raises:
        ValueError: The attention is of another class, runs not once, or gives what is not finite.
    """
    network = find_transformer(model)
    network.check_images(images)
    images = images_for(model, images)
    grid = 0, 0
    seen: List[str] = []

    def see_patches(convolution: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal grid
        grid = network.grid_of_patches(output)

    def visit_probs(name: str, probs: Tensor, places: Optional[TokenPlaces]) -> None:
        places = places or TokenPlaces(grid, probs.shape[-1] - grid[0] * grid[1])
        # A layer may come before the class token is added, as in ConViT.
        if places.windows is None and places.prefix not in (0, network.num_prefix_tokens):
            raise ValueError(
                f'{name} of a {network.kind} has {probs.shape[-1]} tokens, but the {grid[0] * grid[1]} patches of its '
                f'image and up to {network.num_prefix_tokens} other tokens were expected'
            )
        seen.append(name)
        visit(name, probs, places)

    layers = find_attention(model)
    with evaluating(network.module), ExitStack() as stack:
        stack.enter_context(network.patch_convolutions[-1].register_forward_hook(see_patches))
        for attention in layers:
            stack.enter_context(visited_attention(attention, partial(visit_probs, attention.name)))
        network.module(images)
    wrong = [attention.name for attention in layers if seen.count(attention.name) != 1]
    if wrong:
        raise ValueError(f'{wrong[0]} of a {network.kind} runs {seen.count(wrong[0])} times, but once was needed')


@contextmanager
def visited_attention(attention: Attention, visit: Callable[[Tensor, Optional[TokenPlaces]], None]) -> Iterator[None]:
    """Calls ``visit(probs, places)`` whenever attention of another library has run.

    ``probs`` are ``(B, N_h, N, N)``, of windows ``(B·windows, N_h, M, M)``, at least float32; ``places`` are those of
    windows, None without windows.

    Raises:
        ValueError: The probabilities are not finite.
    """

    @torch.no_grad()
    def see(module: nn.Module, args: Any, kwargs: Call, output: Any) -> None:
        x, call = attention.tokens(args, kwargs)
        probs, mask, places = at_least_float32(attention.probs(x, call)), attention.mask(call), None
        if not probs.isfinite().all():
            raise ValueError(
                f'the probabilities of {attention.name or "attention"} are not finite: the parameters of model and the '
                'images must be finite'
            )
        of_grid = call.get('windows') or windows()
        if of_grid is not None:
            numbers, masked = numbers_in_windows(*of_grid), None if mask is None else (mask < 0).to(x.device)
            places = TokenPlaces(of_grid[0], windows=numbers.to(x.device), masked=masked)
        visit(probs, places)

    with attention.windows_seen() as windows, attention.called.register_forward_hook(see, with_kwargs=True):
        yield
