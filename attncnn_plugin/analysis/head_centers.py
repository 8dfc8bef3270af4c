"""Where a head looks, and how widely (Cordonnier et al. 2020 (C20), Figures 3, 4 and 12)."""

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ..attention import AttentionLayer
from ..attention.tokens import SeparableAttention
from ..attention.window import per_axis
from .head_reports.shift_maps import ShiftMaps

MAX_WIDTH = 1e3  # tokens: the width of a head that attends to all keys alike


@torch.no_grad()
def head_centers(
    layer: nn.Module,
    size: Sequence[int],
    query: Optional[Tuple[int, int]] = None,
    probs: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """The centre of each head and its width, the standard deviation along an axis, √(tr Σ/2).

    For Gaussian heads (C20, eq. 9 and 19) these are their parameters: the centre Δ, and for quadratic heads the width
    1/√(2α). For others, and for given ``probs``, they are the mean and the standard deviation of the shifts that a
    query attends to.

    Args:
        layer (nn.Module): An attention layer of this package, or with ``probs`` one of another library.
        size (Sequence[int]): Height and width of the grid in tokens.
        query (tuple[int, int], optional): Row and column of the query; see :func:`query_of`. Defaults to the middle of
            the grid.
        probs (Tensor, optional): Probabilities to use in place of those by position, ``(N_h, Q, H*W)``: of a layer
            whose scores depend on content, for instance their mean over images. Defaults to none.

    Returns:
        tuple[Tensor, Tensor]: Centres ``(N_h, 2)`` in tokens, (row, column), and widths ``(N_h,)``, 1000 at most,
        float64 on the CPU; not a number for a query that gives nothing to the grid.

    Raises:
        ValueError: No term of the scores depends on position alone, and there are no ``probs``; a query outside of the
            grid.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=1)
        >>> layer.encoding.center.data = torch.tensor([[1.0, -2.0]])
        >>> layer.encoding.sqrt_precision.data = torch.tensor([0.5])
        >>> head_centers(layer, size=(8, 8))
        (tensor([[ 1., -2.]], dtype=torch.float64), tensor([2.], dtype=torch.float64))
    """
    gaussian = layer.gaussian_heads() if probs is None and isinstance(layer, AttentionLayer) else None
    if gaussian is not None:
        center, factor = (part.detach().cpu().double() for part in gaussian)
        variance = 1 / torch.linalg.svdvals(factor).square().clamp(min=MAX_WIDTH**-2)  # Σ⁻¹ = MMᵀ
        return center, variance.mean(-1).sqrt()
    maps = query_maps(layer, size, query, probs)
    return centers_of_maps(maps, query_of(layer, size, query)[1])


def centers_of_maps(maps: Tensor, origin: Tuple[int, int]) -> Tuple[Tensor, Tensor]:
    """The centres and the widths of :func:`head_centers`, of the maps of one query.

    Args:
        maps (Tensor): ``(N_h, height, width)``, float64.
        origin (tuple[int, int]): Row and column of the query.

    Returns:
        tuple[Tensor, Tensor]: ``(N_h, 2)`` and ``(N_h,)``.
    """
    rows, columns = (torch.arange(n, dtype=torch.float64) - place for n, place in zip(maps.shape[1:], origin))
    maps = maps / maps.sum((1, 2), keepdim=True)
    center = torch.stack([maps.sum(2) @ rows, maps.sum(1) @ columns], dim=-1)
    second = maps.sum(2) @ rows.square() + maps.sum(1) @ columns.square()
    return center, ((second - center.square().sum(-1)).clamp(min=0) / 2).sqrt()


@torch.no_grad()
def mean_shifts(probs: Tensor, size: Sequence[int]) -> Tuple[Tensor, Tuple[int, int]]:
    """The probabilities by shift, mean over the interior queries, as in head reports, on a grid of shifts.

    That of windows: a single query would show its place in its window rather than what the head does.

    Args:
        probs (Tensor): ``(N_h, H*W, H*W)``.
        size (Sequence[int]): Height and width of the grid in tokens.

    Returns:
        tuple[Tensor, tuple[int, int]]: ``(N_h, 2·height − 1, 2·width − 1)``, float64 on the CPU, and the place of the
        shift 0.

    Examples:
        >>> maps, (row, column) = mean_shifts(torch.eye(36).roll(1, dims=1)[None], (6, 6))
        >>> maps[0, row, column + 1].item()
        1.0
    """
    height, width = per_axis('size', size, 2)
    maps = ShiftMaps.of(probs, (height, width))
    return maps.interior_sums / maps.counts(maps.interior).max(), (height - 1, width - 1)


@torch.no_grad()
def query_maps(
    layer: nn.Module,
    size: Sequence[int],
    query: Optional[Tuple[int, int]] = None,
    probs: Optional[Tensor] = None,
) -> Tensor:
    """The probabilities of the keys for one query.

    Args:
        layer (nn.Module): An attention layer of this package, or with ``probs`` one of another library.
        size (Sequence[int]): Height and width of the grid in tokens.
        query (tuple[int, int], optional): Row and column of the query; see :func:`query_of`. Defaults to the middle of
            the grid.
        probs (Tensor, optional): Probabilities to use in place of those by position, ``(N_h, Q, H*W)``.

    Returns:
        Tensor: ``(N_h, height, width)``, float64 on the CPU.

    Raises:
        ValueError: See :func:`head_centers`.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=1)
        >>> layer.encoding.center.data = torch.tensor([[0.0, 1.0]])
        >>> layer.encoding.sqrt_precision.data = torch.tensor([40.0])  # a hard head
        >>> query_maps(layer, size=(2, 3), query=(1, 1))
        tensor([[[0., 0., 0.],
                 [0., 0., 1.]]], dtype=torch.float64)
    """
    height, width = per_axis('size', size, 2)
    index, _ = query_of(layer, size, query)
    if probs is None and isinstance(layer, SeparableAttention):
        # P[q] = P1[q1] ⊗ P2[q2], without the whole of P.
        rows, columns = (scores.detach().cpu().double().softmax(-1) for scores in layer.encoding.axis_scores(size))
        return rows[:, index // width, :, None] * columns[:, index % width, None, :]
    if probs is None and isinstance(layer, AttentionLayer):
        probs = layer.position_probs(size)
    if probs is None:
        raise ValueError(
            f'no term of the scores of layer, {layer.extra_repr() or type(layer).__name__}, depends on position alone: '
            'give probs, for instance mean_attention_probs_of(model, images)[name]'
        )
    return probs[:, index].detach().cpu().double().unflatten(1, (height, width))


def query_of(
    layer: nn.Module, size: Sequence[int], query: Optional[Tuple[int, int]] = None
) -> Tuple[int, Tuple[int, int]]:
    """A query of a layer: its index among the queries, row by row, and its row and column.

    In the place of a convolution with a stride or without padding not every pixel is a query: it is the nearest one.

    Args:
        layer (nn.Module): An attention layer, of this package or another library.
        size (Sequence[int]): Height and width of the grid in tokens.
        query (tuple[int, int], optional): The row and the column. Defaults to the middle of the grid.

    Raises:
        ValueError: The query is outside of the grid.

    Examples:
        >>> from attncnn_plugin.convert import conv_to_mhsa
        >>> attention, _ = conv_to_mhsa(torch.nn.Conv2d(1, 1, 3, stride=4, padding=1))
        >>> query_of(attention, size=(8, 12), query=(5, 11))
        (5, (4, 8))
    """
    index = query_index(query, size)
    pixel = divmod(index, size[1])
    window = layer.window if isinstance(layer, AttentionLayer) else None
    if window is None:
        return index, pixel
    queries = [window.queries(axis, n) for axis, n in enumerate(size)]
    row, column = (int((own - place).abs().argmin()) for own, place in zip(queries, pixel))
    return row * len(queries[1]) + column, (int(queries[0][row]), int(queries[1][column]))


def query_index(query: Optional[Tuple[int, int]], size: Sequence[int]) -> int:
    """The index of a query among the tokens, row by row.

    Args:
        query (tuple[int, int], optional): Its row and column. None is the middle of the grid.
        size (Sequence[int]): Height and width of the grid in tokens.

    Raises:
        ValueError: The query is outside of the grid.

    Examples:
        >>> query_index((1, 2), size=(3, 5)), query_index(None, size=(3, 5))
        (7, 7)
    """
    height, width = size
    row, column = middle(size) if query is None else query
    if not (0 <= row < height and 0 <= column < width):
        raise ValueError(
            f'query={(row, column)} must be a row from 0 to {height - 1} and a column from 0 to {width - 1} of the grid'
        )
    return row * width + column


def middle(size: Sequence[int]) -> Tuple[int, int]:
    """Row and column of the token in the middle of a grid.

    Examples:
        >>> middle((3, 6))
        (1, 3)
    """
    height, width = size
    return height // 2, width // 2
