"""Where a head looks, and how widely (Cordonnier et al. 2020 (C20), Figures 3, 4 and 12)."""

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from .layer_maps import AttentionMaps
from .shift_statistics import ShiftMaps

MAX_WIDTH = 1e3  # tokens: the width of a head that attends to all keys alike


def head_centers(maps: AttentionMaps, query: Optional[Sequence[int]] = None) -> Tuple[Tensor, Tensor]:
    """Returns the centre of each head of a layer and its width, the standard deviation along an axis, √(tr Σ/2).

    For Gaussian heads (C20, eq. 9 and 19) these are their parameters: the centre Δ, and for quadratic heads the width
    1/√(2α). For others they are the mean and the standard deviation of the shifts that a query attends to.

    Args:
        maps (AttentionMaps): The layer's, from :func:`~attncnn_plugin.analysis.attention_maps`.
        query (Sequence[int], optional): Row and column of the query. Defaults to the middle of the grid; in windows,
            where a single query would show its place in its window, to the mean over queries.

    Returns:
        tuple[Tensor, Tensor]: Centres ``(N_h, 2)`` in tokens, (row, column), and widths ``(N_h,)``, 1000 at most,
        float64; not a number for a query that gives nothing to the grid.

    Raises:
        ValueError: The query is outside of the grid.

    Examples:
        >>> from attncnn_plugin.analysis import attention_maps
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=1)
        >>> layer.encoding.center.data = torch.tensor([[1.0, -2.0]])
        >>> layer.encoding.sqrt_precision.data = torch.tensor([0.5])
        >>> head_centers(attention_maps(layer, size=(8, 8))[''])
        (tensor([[ 1., -2.]], dtype=torch.float64), tensor([2.], dtype=torch.float64))
    """
    if maps.gaussian is not None:
        center, factor = maps.gaussian
        variance = 1 / torch.linalg.svdvals(factor).square().clamp(min=MAX_WIDTH**-2)  # Σ⁻¹ = MMᵀ
        return center, variance.mean(-1).sqrt()
    keys, origin = keys_of_query(maps, query)
    rows, columns = (torch.arange(n, dtype=torch.float64) - place for n, place in zip(keys.shape[1:], origin))
    keys = keys / keys.sum((1, 2), keepdim=True)
    center = torch.stack([keys.sum(2) @ rows, keys.sum(1) @ columns], dim=-1)
    second = keys.sum(2) @ rows.square() + keys.sum(1) @ columns.square()
    return center, ((second - center.square().sum(-1)).clamp(min=0) / 2).sqrt()


def keys_of_query(maps: AttentionMaps, query: Optional[Sequence[int]] = None) -> Tuple[Tensor, Tuple[int, int]]:
    """Returns the probabilities around a query, and its place among them.

    Args:
        maps (AttentionMaps): The layer's.
        query (Sequence[int], optional): As for :func:`head_centers`.

    Returns:
        tuple[Tensor, tuple[int, int]]: ``(N_h, height, width)``, float64: the grid of keys, or for the mean over the
        interior queries in windows, as in head reports, the grid of all shifts.
    """
    if not maps.in_windows or query is not None:
        return maps.of_query(query), maps.place(query)
    shifts = ShiftMaps(maps)
    height, width = maps.grid
    return shifts.interior_sums / shifts.counts(shifts.interior).max(), (height - 1, width - 1)
