"""The terms of scores that depend on position alone, exact: by row and column, or by shift.

Both kinds of position encoding of Cordonnier et al. 2020 (C20), section 4, and the position bias of Li et al. 2021
(L21), section 3.
"""

from typing import Dict, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..layers import GaussianHeads
from ..layers.shifts import at_grid_shifts

EXACT = 1e-6  # error of a probability


class PositionTerm(NamedTuple):
    """A term of the scores.

    Attributes:
        name (str): ``'axes'`` or ``'shifts'``, see :mod:`.stream`.
        arrays (dict[str, Tensor]): Its arrays.
    """

    name: str
    arrays: Dict[str, Tensor]

    def scores(self, head: int, size: Sequence[int]) -> Tensor:
        """The scores of a head, ``(H·W, H·W)``."""
        if self.name == 'shifts':
            return at_grid_shifts(self.arrays['shifts'][head : head + 1], size)[0]
        rows, columns = self.arrays['rows'][head], self.arrays['columns'][head]
        scores = rows[:, None, :, None] + columns[:, None, :]  # (q1, q2, k1, k2)
        return scores.flatten(2).flatten(0, 1)


def position_term(scores: Tensor, size: Sequence[int], heads: Optional[GaussianHeads] = None) -> PositionTerm:
    """The term that gives scores by position, up to a constant for each query.

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
    errors = [_largest_error(term, scores, size) for term in terms]
    return terms[0] if errors[0] <= max(EXACT, errors[1]) else terms[1]


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


def _largest_error(term: PositionTerm, scores: Tensor, size: Sequence[int]) -> float:
    errors = [
        (term.scores(head, size).softmax(-1) - own.softmax(-1)).abs().max().item() for head, own in enumerate(scores)
    ]
    return max((float('inf') if error != error else error for error in errors), default=0.0)
