"""Distributions that span a given subspace, where there are any.

Heads that look at positions alone are distributions over the shifts of a window. N distributions span a subspace of
dimension N if and only if some vector of it is positive at every shift at which the subspace is not zero. The theorem
of Cordonnier et al. 2020 (section 3) has a head for each shift; this is what fewer heads can do.
"""

import math
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows of an orthonormal basis under this are rounding errors of rows of zeros.
ZERO_ROW = 1e-12
# A cone that holds no ball of this radius around a unit vector is taken for one without inside.
SMALLEST_MARGIN = 1e-6


def distributions(basis: Tensor) -> Optional[Tensor]:
    """Distributions that span a subspace, far from each other.

    They lie in the directions of a regular simplex around a positive vector of the subspace, on the border of the
    non-negative vectors.

    Args:
        basis (Tensor): An orthonormal basis in float64, ``(K, N)``.

    Returns:
        Tensor | None: a, ``(N, K)``; None if no vector of the subspace is positive wherever the subspace is not 0.

    Examples:
        The plane of all (x, y, y), and one without a positive vector:

        >>> probs = distributions(torch.tensor([[1.0, 0.0], [0.0, 0.5**0.5], [0.0, 0.5**0.5]], dtype=torch.float64))
        >>> [[round(p, 3) for p in row] for row in sorted(probs.tolist())]
        [[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]
        >>> distributions(torch.tensor([[0.6], [-0.8]], dtype=torch.float64)) is None
        True
    """
    size, num_heads = basis.shape
    norms = basis.norm(dim=1, keepdim=True)
    seen = norms[:, 0] > ZERO_ROW
    # Rows of length 1: where all of the subspace is small, a small entry is far from the border too.
    rows = basis[seen] / norms[seen]
    inner = inner_direction(rows)
    if (rows @ inner).min() <= SMALLEST_MARGIN:
        return None
    simplex = F.normalize(complement(basis.new_ones(num_heads)), dim=1)  # (N, N − 1)
    # Entries relative to those of p, which are then all 1: p + t·d ≥ 0 as long as t·d ≥ −1.
    relative = (rows @ complement(inner) @ simplex.T) / (rows @ inner)[:, None]
    reach = 1 / (-relative).amax(dim=0).clamp(min=torch.finfo(basis.dtype).tiny)
    probs = basis.new_zeros(num_heads, size)
    probs[:, seen] = ((1 + reach * relative).clamp(min=0) * (basis[seen] @ inner)[:, None]).T
    return probs / probs.sum(dim=1, keepdim=True)


def inner_direction(rows: Tensor) -> Tensor:
    """The unit vector c that is farthest inside of the cone of all c with ``rows @ c ≥ 0``.

    Of all y ≥ 0 take that with the least ‖c‖² + (1 − Σy)², c = Σ_i y_i·row_i. Its gradient says that row_i·c ≥ 1 − Σy
    for every i: positive, unless there is y ≠ 0 with c = 0, and then no vector is inside (Gordan). No unit vector has a
    larger min_i row_i·c than c/‖c‖.

    Args:
        rows (Tensor): Unit vectors in float64, ``(n, N)``.

    Returns:
        Tensor: ``(N,)``. If the cone has no inside, any unit vector or 0.

    Examples:
        >>> inner_direction(torch.eye(2, dtype=torch.float64))
        tensor([0.7071, 0.7071], dtype=torch.float64)
    """
    system = torch.cat([rows.T, rows.new_ones(1, len(rows))])
    target = torch.zeros_like(system[:, 0])
    target[-1] = 1
    direction = rows.T @ nonnegative_least_squares(system, target)
    return direction / direction.norm().clamp(min=torch.finfo(rows.dtype).tiny)


def nonnegative_least_squares(matrix: Tensor, target: Tensor) -> Tensor:
    """The y ≥ 0 with the least ‖Ay − b‖, by the active-set method of Lawson and Hanson (1974, algorithm NNLS).

    SciPy has the same, but neither torch nor timm brings it along, and its releases 1.12 and 1.13, the newest for
    Python 3.9, solve normal equations and end in an error for some matrices.

    Args:
        matrix (Tensor): A in float64, ``(m, n)``, with columns of the order of 1.
        target (Tensor): b, ``(m,)``.

    Returns:
        Tensor: y, ``(n,)``.

    Examples:
        >>> nonnegative_least_squares(torch.eye(2, dtype=torch.float64), torch.tensor([2.0, -1.0]).double())
        tensor([2., 0.], dtype=torch.float64)
    """
    size = matrix.shape[1]
    y = matrix.new_zeros(size)
    free = matrix.new_zeros(size, dtype=torch.bool)  # the entries of y that may differ from 0
    for _ in range(3 * size):  # Lawson and Hanson's own limit; a step each is usual
        gradient = (matrix.T @ (target - matrix @ y)).masked_fill(free, -math.inf)
        if gradient.max() <= 1e-14:
            break
        free[gradient.argmax()] = True
        while True:
            solution = torch.zeros_like(y)
            solution[free] = torch.linalg.lstsq(matrix[:, free], target[:, None]).solution[:, 0]
            negative = free & (solution <= 0)
            if not negative.any():
                break
            # As far towards the solution as y stays non-negative; the entries that stop it leave.
            ratio = torch.where(negative, y / (y - solution), math.inf)
            y = y + ratio.min() * (solution - y)
            free &= ~(ratio <= ratio.min()) & (y > 0)
        y = solution
    return y


def complement(vector: Tensor) -> Tensor:
    """An orthonormal basis of what is orthogonal to a vector that is not 0: ``(n,)`` to ``(n, n − 1)``.

    Examples:
        >>> complement(torch.tensor([0.0, 2.0])).abs()
        tensor([[1.],
                [0.]])
    """
    return torch.linalg.qr(vector[:, None], mode='complete').Q[:, 1:]
