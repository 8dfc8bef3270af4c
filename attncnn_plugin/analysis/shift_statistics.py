"""Attention maps as distributions over the shift δ = k − q from a query q to its key k (Cordonnier et al. 2020, 3.1).

A head that is a convolution's gives all of its attention to one shift. Here is how much each shift gets, which one gets
most, the mean and the covariance of the shift, and the centres of C20's Figures 3, 4 and 12.
"""

from functools import cached_property
from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..attention.window import same_window
from .layer_maps import MeanAttention

INTERIOR = 5  # pixels; the window that an interior query of a grid has inside
LEAST_QUERIES = 0.25  # part of the queries from which a shift must stay in the grid to have a share by these
MAX_WIDTH = 1e3  # tokens: the width of a head that attends to all keys alike
EQUAL = 1e-6  # difference of probabilities up to which two shifts get equally much

Shift = Tuple[int, int]
Axes = Sequence[Tensor]  # a tensor for rows, and one for columns


class ShiftMaps:
    """The attention maps of a layer, and their sums by shift.

    Args:
        maps (MeanAttention): The probabilities.

    Attributes:
        probs (Tensor): P, ``(N_h, Q, height*width)``, float64.
        size (tuple[int, int]): Height and width of the grid.
        window (Window | None): The window of an ``ImageAttention``; None for a grid, whose queries are its pixels.
        queries (tuple[Tensor, Tensor]): Pixels of the queries along rows and along columns.
        interior (list[Tensor]): Whether each of these is in the interior: the whole 5x5 window around it is in
            the grid (on a smaller grid as large a window as fits), or the whole window of an ``ImageAttention``.
        valid (list[Tensor]): Whether each of these sees no padding: every query of a grid, the interior ones
            of an ``ImageAttention``.

    Raises:
        ValueError: Probabilities that are not finite; no query has its window in an image of this size.

    Examples:
        >>> maps = ShiftMaps(MeanAttention(torch.eye(36).roll(1, dims=1)[None], (6, 6)))  # each query to the next key
        >>> maps.interior_sums.nonzero().tolist(), maps.interior_sums.sum().item()  # shift (0, 0) has the index (5, 5)
        ([[0, 5, 6]], 4.0)
    """

    def __init__(self, maps: MeanAttention) -> None:
        self.probs = maps.probs.double()
        self.size = size = maps.grid
        self.window = maps.window
        self.queries = maps.queries
        if not self.probs.sum().isfinite():  # rows add up to 1
            raise ValueError('the probabilities of the heads are not finite: the parameters of layer must be finite')
        # The window that a query in the interior of a grid has inside reaches as far on both sides of it.
        odd = tuple(min(INTERIOR, n - 1 + n % 2) for n in size)
        window = maps.window or same_window(odd)
        self.interior = [window.interior(axis, n) for axis, n in enumerate(size)]
        if not all(some.any() for some in self.interior):
            raise ValueError(
                f'the image of {size[0]}x{size[1]} pixels is too small for the window of layer, '
                f'{maps.window}: no query has the whole of it inside'
            )
        self.valid = [some | (maps.window is None) for some in self.interior]

    @cached_property
    def interior_sums(self) -> Tensor:
        """Σ_q P[q, q + δ] over the interior queries, see :meth:`sums`."""
        return self.sums(self.interior)

    def sums(self, chosen: Axes, replicate: bool = False) -> Tensor:
        """Returns Σ_q P[q, q + δ] over the chosen queries of each axis from which δ stays in the grid.

        With ``replicate`` it takes the nearest pixel of the grid for one outside. The sums are
        ``(N_h, 2·height − 1, 2·width − 1)``, shift 0 in the middle.
        """
        sums = self.probs.unflatten(1, [len(own) for own in self.queries]).unflatten(-1, self.size)
        sums = sums.transpose(2, 3)  # (N_h, q1, k1, q2, k2)
        for size, pixels, some in zip(self.size, self.queries, chosen):
            by_shift = sums.new_zeros(len(sums), 2 * size - 1, *sums.shape[3:])
            for query in some.nonzero()[:, 0].tolist():
                keys, first = sums[:, query], size - 1 - int(pixels[query])  # the place of key 0 by its shift
                by_shift[:, first : first + size] += keys
                if replicate:
                    by_shift[:, :first] += keys[:, :1]
                    by_shift[:, first + size :] += keys[:, -1:]
            sums = by_shift.movedim(1, -1)  # (N_h, q2, k2, δ1), then (N_h, δ1, δ2)
        return sums

    def counts(self, chosen: Axes) -> Tensor:
        """Counts the chosen queries from which each shift stays in the grid: as :meth:`sums`, without heads."""
        sizes, pixels = self.size, [own[some] for own, some in zip(self.queries, chosen)]
        keys = [own + torch.arange(1 - n, n, device='cpu')[:, None] for n, own in zip(sizes, pixels)]
        rows, columns = (((own >= 0) & (own < n)).sum(1) for n, own in zip(sizes, keys))
        return rows[:, None] * columns


def moments(weight: Tensor, origin: Sequence[int]) -> Tuple[Tensor, Tensor]:
    """Returns mean ``(N_h, 2)`` and covariance ``(N_h, 2, 2)`` of the shift from a place of a grid, float64.

    Shifts are weighted by ``weight``, ``(N_h, height, width)``, float64. The moments are not a number for a head
    that gives nothing to the grid.

    Examples:
        >>> center, covariance = moments(torch.eye(6, dtype=torch.float64)[None, :2], origin=(0, 1))
        >>> center.tolist(), covariance.tolist()
        ([[0.5, -0.5]], [[[0.25, 0.25], [0.25, 0.25]]])
    """
    shifts = torch.cartesian_prod(*(weight.new_tensor(range(n)) - at for n, at in zip(weight.shape[1:], origin)))
    weight = weight.flatten(1) / weight.sum((1, 2))[:, None]
    center = weight @ shifts
    apart = shifts - center[:, None]  # not E[δδᵀ] − E[δ]E[δ]ᵀ, which cancels for hard heads
    return center, torch.einsum('hs,hsi,hsj->hij', weight, apart, apart)


def window_mass(maps: ShiftMaps, kernel_size: int) -> Tensor:
    """Returns the probability of the K×K keys around an interior query, mean over these, ``(N_h,)``; K is odd.

    Examples:
        >>> round(window_mass(ShiftMaps(MeanAttention(torch.full((1, 36, 36), 1 / 36), (6, 6))), 3).item(), 6)
        0.25
    """
    reach = kernel_size // 2
    rows, columns = (slice(max(0, n - 1 - reach), n + reach) for n in maps.size)
    return maps.interior_sums[:, rows, columns].sum((1, 2)) / maps.counts(maps.interior).max()


def mean_distance(maps: ShiftMaps) -> Tensor:
    """Returns the distance from a query to its keys in tokens, weighted by P, mean over queries, ``(N_h,)``.

    Examples:
        >>> maps = MeanAttention(torch.eye(36)[:, torch.arange(36) ^ 1][None], (6, 6))
        >>> round(mean_distance(ShiftMaps(maps)).item(), 6)
        1.0
    """
    weight = maps.sums(maps.valid).flatten(1)
    return weight @ _all_shifts(maps.size).double().norm(dim=1) / weight.sum(1)


def nearest_shifts(maps: ShiftMaps) -> List[Tuple[Shift, float]]:
    """Returns the shift δ that gets most attention of each head, and its share.

    A shift gets P[q, q + δ], mean over the interior queries, with the nearest key of the grid for a q + δ outside. So
    all shifts are compared over the same queries. (A mean over the queries from which a shift stays in the grid would
    favour short shifts: near the border the probabilities of the keys left are larger.)

    Far shifts can get equally much, to 1e-6. Of these it is the one that gets most over all queries, then the shortest.
    The share of a shift that leaves the grid from an interior query is the mean over all queries from which it stays;
    if these are less than a quarter of the queries, it is what the shift gets over all of them.

    Examples:
        >>> nearest_shifts(ShiftMaps(MeanAttention(torch.eye(36).roll(1, dims=1)[None], (6, 6))))
        [((0, 1), 1.0)]
    """
    own, count = maps.counts(maps.interior), maps.counts(maps.valid)
    shares = torch.where(own == own.max(), maps.interior_sums / own, maps.sums(maps.valid) / count)
    few = count < LEAST_QUERIES * count.max()
    inner = maps.sums(maps.interior, replicate=True)
    nearest = inner >= inner.amax((1, 2), keepdim=True) - EQUAL * own.max()
    if (nearest & few).any() or nearest.sum() > len(nearest):
        whole = maps.sums(maps.valid, replicate=True) / count.max()
        nearest &= whole >= whole.where(nearest, -1.0).amax((1, 2), keepdim=True) - EQUAL
        shares = whole.where(few, shares)
    shifts = _all_shifts(maps.size)
    length = shifts.square().sum(1).where(nearest.flatten(1), torch.iinfo(torch.int64).max)
    places = length.argmin(1)  # the first of the shortest ones
    share = shares.flatten(1).gather(1, places[:, None])[:, 0]
    return [((row, column), value) for (row, column), value in zip(shifts[places].tolist(), share.tolist())]


def head_centers(maps: MeanAttention) -> Tuple[Tensor, Tensor]:
    """Returns the centre of each head of a layer and its width, the standard deviation along an axis, √(tr Σ/2).

    For Gaussian heads (C20, eq. 9 and 19) these are their parameters: the centre Δ, and for quadratic heads the width
    1/√(2α). For others they are the mean and the standard deviation of the shifts that a query in the middle of the
    grid attends to; in windows, where a single query would show its place in its window, the mean over queries.

    Args:
        maps (MeanAttention): The layer's, from :func:`~attncnn_plugin.analysis.mean_attention`.

    Returns:
        tuple[Tensor, Tensor]: Centres ``(N_h, 2)`` in tokens, (row, column), and widths ``(N_h,)``, 1000 at most,
        float64; not a number for a head that gives nothing to the grid.

    Examples:
        >>> from attncnn_plugin.analysis import mean_attention
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=1)
        >>> layer.encoding.center.data = torch.tensor([[1.0, -2.0]])
        >>> layer.encoding.sqrt_precision.data = torch.tensor([0.5])
        >>> head_centers(mean_attention(layer, size=(8, 8))[''])
        (tensor([[ 1., -2.]], dtype=torch.float64), tensor([2.], dtype=torch.float64))
    """
    if maps.gaussian is not None:
        center, factor = maps.gaussian
        variance = 1 / torch.linalg.svdvals(factor).square().clamp(min=MAX_WIDTH**-2)  # Σ⁻¹ = MMᵀ
        return center, variance.mean(-1).sqrt()
    center, covariance = moments(*keys_of_query(maps))
    return center, covariance.diagonal(dim1=1, dim2=2).mean(1).sqrt()


def keys_of_query(maps: MeanAttention, query: Optional[Sequence[int]] = None) -> Tuple[Tensor, Tuple[int, int]]:
    """Returns the probabilities around a query, and its place among them.

    Returns:
        tuple[Tensor, tuple[int, int]]: ``(N_h, height, width)``, float64: the grid of keys or, for the mean over the
        interior queries in windows, the grid of all shifts.
    """
    if not maps.in_windows or query is not None:
        return maps.of_query(query)
    shifts = ShiftMaps(maps)
    height, width = maps.grid
    return shifts.interior_sums / shifts.counts(shifts.interior).max(), (height - 1, width - 1)


def _all_shifts(size: Tuple[int, int]) -> Tensor:
    """Returns all (row, column) shifts between two tokens of a grid, row by row, int64."""
    return torch.cartesian_prod(*(torch.arange(1 - n, n, device='cpu') for n in size))
