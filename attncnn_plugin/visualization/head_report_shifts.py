"""Attention maps as distributions over the shift δ = k − q: moments, masses, and what each shift gets."""
from dataclasses import dataclass
from typing import Tuple

import torch
from torch import Tensor, nn

from ..convert.to_conv import interior_queries
from ..layers.image_attention import ImageAttention
from ..layers.window import Window

INTERIOR = 5  # pixels; the window that an interior query of a grid has inside
LEAST_QUERIES = 0.25  # part of the queries from which a shift must stay in the grid to be judged


@dataclass(frozen=True, eq=False)
class ShiftMaps:
    """The probabilities of a layer's heads, and where their queries are.

    Attributes:
        probs (Tensor): P, ``(N_h, Q, height*width)``, float64. Rows add up to 1 or, with a null key or zero padding, to
            less.
        size (tuple[int, int]): Height and width of the grid.
        queries (Tensor): Pixel of each query, (row, column), ``(Q, 2)``.
        interior (Tensor): Whether each query is an interior one, ``(Q,)``: the whole 5x5 window around it is in the
            grid (on a smaller grid as large a window as fits), or the whole window of an ``ImageAttention``.
        judged (Tensor): Whether a query counts for the shares of shifts, ``(Q,)``: all those of a grid, the interior
            ones of an ``ImageAttention``, whose others see padding.
    """

    probs: Tensor
    size: Tuple[int, int]
    queries: Tensor
    interior: Tensor
    judged: Tensor

    @classmethod
    def of(cls, layer: nn.Module, probs: Tensor, size: Tuple[int, int]) -> 'ShiftMaps':
        """The maps of a layer.

        Raises:
            ValueError: No query of an ``ImageAttention`` has its window in an image of ``size``.
        """
        if not isinstance(layer, ImageAttention):
            kernel_size = [min(INTERIOR, n - 1 + n % 2) for n in size]  # odd
            window = Window.of(nn.Conv2d(1, 1, kernel_size, padding='same', device='meta'))
            queries = torch.cartesian_prod(*(torch.arange(n) for n in size))
            interior = interior_queries(window, size)
            return cls(probs, size, queries, interior, torch.ones_like(interior))
        queries = torch.cartesian_prod(*(layer.window.queries(axis, n) for axis, n in enumerate(size)))
        interior = interior_queries(layer.window, size)
        if not interior.any():
            raise ValueError(f'the image of {size[0]}x{size[1]} pixels is too small for the window of layer, '
                             f'{layer.window}: no query has the whole of it inside')
        return cls(probs, size, queries, interior, interior)

    def shifts(self, chosen: Tensor) -> Tensor:
        """δ = k − q of the chosen queries and all keys, ``(Q', K, 2)``."""
        keys = torch.cartesian_prod(*(torch.arange(n) for n in self.size))
        return keys[None] - self.queries[chosen][:, None]


def moments(maps: ShiftMaps) -> Tuple[Tensor, Tensor]:
    """Mean and covariance of the shift at interior queries, each of which counts by its probability in the grid.

    Returns:
        tuple[Tensor, Tensor]: ``(N_h, 2)``, (row, column) in tokens, and ``(N_h, 2, 2)``; not a number for a head that
        gives nothing to the grid.
    """
    probs, shifts = maps.probs[:, maps.interior], maps.shifts(maps.interior).double()
    probs = probs / probs.sum((1, 2), keepdim=True)
    center = torch.einsum('hqk,qki->hi', probs, shifts)
    outer = torch.einsum('hqk,qki,qkj->hij', probs, shifts, shifts)
    return center, outer - center[:, :, None] * center[:, None, :]


def window_mass(maps: ShiftMaps, kernel_size: int) -> Tensor:
    """Probability of the K×K keys around an interior query, mean over these, ``(N_h,)``; K is odd."""
    inside = (maps.shifts(maps.interior).abs() <= kernel_size // 2).all(-1)
    return (maps.probs[:, maps.interior] * inside).sum(-1).mean(-1)


def shift_shares(maps: ShiftMaps) -> Tensor:
    """P[q, q + δ] of each shift, mean over the queries from which it stays in the grid.

    Returns:
        Tensor: ``(N_h, 2·height − 1, 2·width − 1)``, shift 0 in the middle; not a number for shifts that stay in the
        grid from less than a quarter of the queries.
    """
    height, width = maps.size
    shifts = maps.shifts(maps.judged)
    index = ((shifts[..., 0] + height - 1) * (2 * width - 1) + shifts[..., 1] + width - 1).flatten()
    probs = maps.probs[:, maps.judged].flatten(1)
    table = probs.new_zeros(len(probs), (2 * height - 1) * (2 * width - 1))
    total = table.index_add(1, index, probs)
    count = table.new_zeros(table.shape[1]).index_add(0, index, torch.ones_like(index, dtype=table.dtype))
    share = (total / count).masked_fill(count < LEAST_QUERIES * maps.judged.sum(), float('nan'))
    return share.unflatten(1, (2 * height - 1, 2 * width - 1))


def nearest_shift(share: Tensor) -> Tuple[Tuple[int, int], float]:
    """The shift with the largest share, and the share: no S_δ is nearer to the head in total variation, 1 − share.

    Of equal ones, to 1e-6, the shortest.

    Args:
        share (Tensor): That of one head, see :func:`shift_shares`.
    """
    middle = [n // 2 for n in share.shape]
    largest = share.nan_to_num(-1.).max()
    equal = (share >= largest - 1e-6).nonzero().tolist()
    shift = min(((row - middle[0], column - middle[1]) for row, column in equal),
                key=lambda shift: (shift[0] ** 2 + shift[1] ** 2, shift))
    return shift, share[shift[0] + middle[0], shift[1] + middle[1]].item()
