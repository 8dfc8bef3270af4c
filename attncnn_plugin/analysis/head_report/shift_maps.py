"""Attention maps as distributions over the shift δ = k − q: what each shift gets, moments and masses."""

from dataclasses import dataclass
from functools import cached_property
from typing import List, Optional, Tuple

import torch
from torch import Tensor, nn

from ...layers.window import Window

INTERIOR = 5  # pixels; the window that an interior query of a grid has inside
LEAST_QUERIES = 0.25  # part of the queries from which a shift must stay in the grid to have a share by these
EQUAL = 1e-6  # difference of probabilities up to which two shifts are equally near

Shift = Tuple[int, int]
Axes = Tuple[Tensor, Tensor]  # a tensor for rows, and one for columns


@dataclass(frozen=True, eq=False)
class ShiftMaps:
    """The probabilities of a layer's heads, and where their queries are.

    Attributes:
        probs (Tensor): P, ``(N_h, Q, height*width)``, float64. Rows add up to 1 or, with a null key or zero padding, to
            less.
        size (tuple[int, int]): Height and width of the grid.
        window (Window | None): The window of an ``ImageAttention``; None for a grid, whose queries are its pixels.
        queries (tuple[Tensor, Tensor]): Pixels of the queries along rows and along columns.
        interior (tuple[Tensor, Tensor]): Whether each of these is in the interior: the whole 5x5 window around it is in
            the grid (on a smaller grid as large a window as fits), or the whole window of an ``ImageAttention``.
        judged (tuple[Tensor, Tensor]): Whether each counts where interior ones are not enough: all those of a grid,
            the interior ones of an ``ImageAttention``, whose others see padding.
    """

    probs: Tensor
    size: Tuple[int, int]
    window: Optional[Window]
    queries: Axes
    interior: Axes
    judged: Axes

    @classmethod
    def of(cls, probs: Tensor, size: Tuple[int, int], window: Optional[Window] = None) -> 'ShiftMaps':
        """The maps of a grid, or of an ``ImageAttention`` with this window.

        Raises:
            ValueError: Probabilities that are not finite; no query has its window in an image of ``size``.
        """
        probs = probs.detach().cpu().double()
        if not probs.sum().isfinite():  # rows add up to 1
            raise ValueError('the probabilities of the heads are not finite: the parameters of layer must be finite')
        inner = same_window([min(INTERIOR, n - 1 + n % 2) for n in size]) if window is None else window  # odd
        first, last = inner.shifts()[[0, -1]].tolist()
        queries = tuple(inner.queries(axis, n) for axis, n in enumerate(size))
        interior = tuple((q + a >= 0) & (q + b < n) for q, a, b, n in zip(queries, first, last, size))
        if not all(some.any() for some in interior):
            raise ValueError(
                f'the image of {size[0]}x{size[1]} pixels is too small for the window of layer, '
                f'{window}: no query has the whole of it inside'
            )
        judged = tuple(map(torch.ones_like, interior)) if window is None else interior
        return cls(probs, size, window, queries, interior, judged)

    @cached_property
    def interior_sums(self) -> Tensor:
        """Σ_q P[q, q + δ] over the interior queries, see :meth:`sums`."""
        return self.sums(self.interior)

    def sums(self, chosen: Axes, replicate: bool = False) -> Tensor:
        """Σ_q P[q, q + δ] over the chosen queries from which δ stays in the grid.

        Args:
            chosen (tuple[Tensor, Tensor]): Whether each query of an axis is chosen.
            replicate (bool): Take the nearest pixel of the grid in the place of one outside. Defaults to False.

        Returns:
            Tensor: ``(N_h, 2·height − 1, 2·width − 1)``, shift 0 in the middle.
        """
        sums = self.probs.unflatten(1, [len(axis) for axis in self.queries]).unflatten(-1, self.size)
        sums = sums.transpose(2, 3)  # (N_h, q1, k1, q2, k2)
        for size, pixels, some in zip(self.size, self.queries, chosen):
            by_shift = sums.new_zeros(len(sums), 2 * size - 1, *sums.shape[3:])
            for query in some.nonzero()[:, 0].tolist():
                keys, first = sums[:, query], size - 1 - pixels[query].item()  # the place of key 0 by its shift
                by_shift[:, first : first + size] += keys
                if replicate:
                    by_shift[:, :first] += keys[:, :1]
                    by_shift[:, first + size :] += keys[:, -1:]
            sums = by_shift.movedim(1, -1)  # (N_h, q2, k2, δ1), then (N_h, δ1, δ2)
        return sums

    def counts(self, chosen: Axes) -> Tensor:
        """Number of the chosen queries from which each shift stays in the grid, as :meth:`sums`, without heads."""
        axes = []
        for size, pixels, some in zip(self.size, self.queries, chosen):
            keys = pixels[some] + torch.arange(1 - size, size)[:, None]
            axes.append(((keys >= 0) & (keys < size)).sum(1))
        return axes[0][:, None] * axes[1]


def same_window(kernel_size, padding_mode: str = 'zeros') -> Window:
    """The window of a convolution with ``padding='same'``."""
    return Window.of(nn.Conv2d(1, 1, kernel_size, padding='same', padding_mode=padding_mode, device='meta'))


def moments(maps: ShiftMaps) -> Tuple[Tensor, Tensor]:
    """Mean and covariance of the shift at interior queries, each of which counts by its probability in the grid.

    Returns:
        tuple[Tensor, Tensor]: ``(N_h, 2)``, (row, column) in tokens, and ``(N_h, 2, 2)``; not a number for a head that
        gives nothing to the grid.
    """
    weight = maps.interior_sums.flatten(1)
    weight = weight / weight.sum(1, keepdim=True)
    shifts = torch.cartesian_prod(*(torch.arange(1.0 - n, n, dtype=torch.float64) for n in maps.size))
    center = weight @ shifts
    apart = shifts - center[:, None]  # not E[δδᵀ] − E[δ]E[δ]ᵀ, which cancels for hard heads
    return center, torch.einsum('hs,hsi,hsj->hij', weight, apart, apart)


def window_mass(maps: ShiftMaps, kernel_size: int) -> Tensor:
    """Probability of the K×K keys around an interior query, mean over these, ``(N_h,)``; K is odd."""
    reach = kernel_size // 2
    rows, columns = (slice(max(0, n - 1 - reach), n + reach) for n in maps.size)
    return maps.interior_sums[:, rows, columns].sum((1, 2)) / maps.counts(maps.interior).max()


def shift_shares(maps: ShiftMaps) -> Tensor:
    """P[q, q + δ] of each shift, mean over the interior queries.

    For a shift that leaves the grid from one of these it is the mean over all queries from which it stays.

    Returns:
        Tensor: ``(N_h, 2·height − 1, 2·width − 1)``, shift 0 in the middle; not a number for shifts that stay in the
        grid from less than a quarter of the queries.
    """
    inner, count = maps.counts(maps.interior), maps.counts(maps.judged)
    shares = torch.where(inner == inner.max(), maps.interior_sums / inner, maps.sums(maps.judged) / count)
    return shares.masked_fill(count < LEAST_QUERIES * count.max(), float('nan'))


def nearest_shifts(maps: ShiftMaps, shares: Tensor) -> List[Tuple[Shift, float]]:
    """The shift δ of each head whose keys get most, mean over interior queries, and its share.

    All shifts are compared over the same queries, with the key of the grid that is nearest to q + δ: at the border the
    probabilities are renormalized, and means over the queries from which each shift stays in the grid would favour
    short ones. Of shifts that are equal, to 1e-6, as far ones can be, it is the one whose keys get most from all
    queries, then the shortest.

    Args:
        maps (ShiftMaps): The maps.
        shares (Tensor): See :func:`shift_shares`. Where it is not a number, the share is what the keys of the nearest
            shift get from all queries.
    """
    share = maps.sums(maps.interior, replicate=True)
    nearest = share >= share.amax((1, 2), keepdim=True) - EQUAL * maps.counts(maps.interior).max()
    if (nearest & shares.isnan()).any() or nearest.sum() > len(nearest):
        whole = maps.sums(maps.judged, replicate=True) / maps.counts(maps.judged).max()
        nearest &= whole >= whole.where(nearest, -1.0).amax((1, 2), keepdim=True) - EQUAL
        shares = shares.where(~shares.isnan(), whole)
    middle, found = torch.tensor(maps.size) - 1, []
    for places, own in zip(nearest, shares):
        place = min(places.nonzero(), key=lambda place: ((place - middle).square().sum().item(), place.tolist()))
        found.append((tuple((place - middle).tolist()), own[tuple(place)].item()))
    return found
