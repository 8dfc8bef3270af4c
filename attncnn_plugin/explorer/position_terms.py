"""The terms of scores that depend on position alone, exact: by row and column, or by shift.

Both kinds of position encoding of Cordonnier et al. 2020 (C20), section 4, and the position bias of Li et al. 2021
(L21), section 3.
"""

from typing import Dict, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..layers import AttentionLayer, GaussianHeads
from .layer_grid import LayerGrid

EXACT = 1e-6  # error of a probability


class PositionTerm(NamedTuple):
    """A term of the scores.

    Attributes:
        name (str): ``'axes'`` or ``'shifts'``, see :mod:`.stream`.
        arrays (dict[str, Tensor]): Its arrays.
    """

    name: str
    arrays: Dict[str, Tensor]

    def scores(self, head: int, grid: LayerGrid) -> Tensor:
        """The scores of a head, ``(Q, P)``; any for keys that the query does not see."""
        if self.name == 'shifts':
            table = self.arrays['shifts'][head]
            row, column = ((n // 2 + shift).clamp(0, n - 1) for n, shift in zip(table.shape, grid.shifts))
            return table[row, column]
        rows, columns = self.arrays['rows'][head], self.arrays['columns'][head]
        scores = rows[:, None, :, None] + columns[:, None, :]  # (q1, q2, k1, k2)
        return scores.flatten(2).flatten(0, 1)


def position_term(scores: Tensor, size: Sequence[int], heads: Optional[GaussianHeads] = None) -> PositionTerm:
    """The term that gives scores by position of attention over tokens, up to a constant for each query.

    Args:
        scores (Tensor): The scores, or the logarithms of the probabilities, ``(N_h, H·W, H·W)``.
        size (Sequence[int]): Height H and width W of the grid in tokens.
        heads (GaussianHeads, optional): Where the heads are Gaussian. Probabilities of 0 do not say what their scores
            are. Defaults to None, scores that are finite.

    Returns:
        PositionTerm: ``'axes'`` if the probabilities err by no more than 1e-6, otherwise the better one of both kinds.
    """
    grid = scores.unflatten(2, size).unflatten(1, size)  # (N_h, q1, q2, k1, k2)
    # With scores f[q1, k1] + g[q2, k2], the sum over all k2 is f up to a constant for the query.
    axes = {'rows': grid[:, :, 0].logsumexp(-1), 'columns': grid[:, 0].logsumexp(-2)}
    shifts = scores_by_shift(grid) if heads is None else gaussian_shift_scores(heads, size)
    terms = [PositionTerm('axes', axes), PositionTerm('shifts', {'shifts': shifts})]
    errors = [_largest_error(term, scores, LayerGrid.of_tokens(size)) for term in terms]
    return terms[0] if errors[0] <= max(EXACT, errors[1]) else terms[1]


def padded_position_term(layer: AttentionLayer, grid: LayerGrid) -> PositionTerm:
    """The term that gives scores by position in the place of a convolution, up to a constant for each query.

    Args:
        layer (AttentionLayer): The layer; it has a table of scores, or round Gaussian heads.
        grid (LayerGrid): Its grid.
    """
    table = layer.table_scores()
    if table is not None:
        return PositionTerm('shifts', {'shifts': table.detach().cpu()})
    heads = layer.gaussian_heads()
    assert heads is not None
    return PositionTerm('axes', dict(zip(('rows', 'columns'), gaussian_axis_scores(heads, grid))))


def gaussian_axis_scores(heads: GaussianHeads, grid: LayerGrid) -> Tuple[Tensor, ...]:
    """−½((δ − Δ)/σ)² of round heads along each axis (C20, eq. 9), the best key that a query sees at 0.

    Returns:
        tuple[Tensor, Tensor]: ``(N_h, Q1, P1)`` and ``(N_h, Q2, P2)``, float32.
    """
    center, factor = (tensor.detach().cpu().double() for tensor in heads)
    scores = []
    for axis, (queries, start, reach) in enumerate(zip(grid.queries, grid.start, grid.reach)):
        shift = torch.arange(grid.source.shape[axis]) + start - queries[:, None]
        low, high = shift[:, :1].clamp(min=-reach), shift[:, -1:].clamp(max=reach)
        own = center[:, axis, None, None]
        best = own.round().clamp(low, high)
        # (δ − Δ)² − (δ0 − Δ)² = (δ − δ0)(δ + δ0 − 2Δ), without a difference of large numbers.
        scale = factor[:, axis, axis].square()[:, None, None] / 2
        scores.append((-scale * (shift - best) * (shift + best - 2 * own)).float())
    return tuple(scores)


def gaussian_shift_scores(heads: GaussianHeads, size: Sequence[int]) -> Tensor:
    """−½(δ − Δ)ᵀΣ⁻¹(δ − Δ) of all shifts (C20, eq. 19), the best of them at 0.

    Returns:
        Tensor: ``(N_h, 2·H − 1, 2·W − 1)``, float64: scores of heads that are far away are large.
    """
    center, factor = (tensor.detach().cpu().double() for tensor in heads)
    axes = (torch.arange(1 - n, n, dtype=torch.float64) for n in size)
    shifts = torch.cartesian_prod(*axes)
    center = center[:, None]
    best = shifts[((shifts - center) @ factor).square().sum(-1).argmin(-1)][:, None]
    # ‖Mᵀ(δ − Δ)‖² − ‖Mᵀ(δ0 − Δ)‖² = Mᵀ(δ − δ0) · Mᵀ(δ + δ0 − 2Δ), without a difference of large numbers.
    scores = -(((shifts - best) @ factor) * ((shifts + best - 2 * center) @ factor)).sum(-1) / 2
    return scores.unflatten(1, [2 * n - 1 for n in size])


def scores_by_shift(grid: Tensor) -> Tensor:
    """Scores ``(N_h, q1, q2, k1, k2)`` that depend on the shift alone as a table of shifts.

    A query in a corner of the grid sees a quarter of all shifts.

    Returns:
        Tensor: ``(N_h, 2·H − 1, 2·W − 1)``.
    """
    rows = [torch.cat([grid[:, row, -1], grid[:, row, 0, :, 1:]], dim=-1) for row in (-1, 0)]
    return torch.cat([rows[0], rows[1][:, 1:]], dim=1)


def _largest_error(term: PositionTerm, scores: Tensor, grid: LayerGrid) -> float:
    errors = [
        (term.scores(head, grid).softmax(-1) - own.softmax(-1)).abs().max().item() for head, own in enumerate(scores)
    ]
    return max((float('inf') if error != error else error for error in errors), default=0.0)
