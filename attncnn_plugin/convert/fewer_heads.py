"""A kernel with fewer heads than positions: its best approximation by heads that are distributions over the shifts.

A convolution is a matrix M with a row for each of its K kernel positions. Heads that look at positions alone make of it
M' = Σ_h a_h ⊗ W^(h), with a_h a distribution over the K shifts and W^(h) free. Without distributions the best M' is
the truncated singular value decomposition (Eckart-Young). N distributions span a subspace if and only if some vector of
it is positive wherever the subspace is not zero. So the N best left singular vectors will do if they span such a
vector; if not, a positive p and the N − 1 best directions beside it leave at most the error of N − 1 terms.

Everything is computed in float64 on the CPU: after a QR decomposition the matrices are K×K.
"""

import math
from dataclasses import dataclass
from typing import Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

# exp(−800) is 0 in float64 and float32 alike: the score of a shift that a head does not see.
LOWEST_SCORE = -800.0
# Rows of an orthonormal basis under this are rounding errors of rows of zeros.
ZERO_ROW = 1e-12
# A cone that holds no ball of this radius around a unit vector is taken for one without inside.
SMALLEST_MARGIN = 1e-6
# Rounding errors that are accepted without a look for heads that amplify them less.
ROUNDING_ERROR = 1e-4
FLOAT32_EPS = torch.finfo(torch.float32).eps
# Parts of the uniform distribution in p. The best p has zeros, and there the heads are almost linearly dependent.
UNIFORM_PARTS = (0.01, 0.1, 1.0)
# Number of starting points of the search for p, and of iterations from each.
STARTS = 6
ITERATIONS = 60


@dataclass(frozen=True)
class HeadReport:
    """How near an attention layer comes to the convolution that it was made from.

    All errors are ‖M − M'‖/‖M‖ in the Frobenius norm, M being the kernel with a row for each of its K positions, and
    0 for a kernel of zeros.

    Attributes:
        num_heads (int): Number of heads N.
        relative_error (float): The error of the layer, as its parameters are stored.
        bound (float): The error of the best N terms without any constraint (Eckart-Young): no layer with N heads that
            look at positions alone has less.
        guarantee (float): The error of the best N − 1 terms: more than that is never needed, but for rounding.
    """

    num_heads: int
    relative_error: float
    bound: float
    guarantee: float

    def __str__(self) -> str:
        return (
            f'num_heads={self.num_heads}: relative error {self.relative_error:.3g}, where at least '
            f'{self.bound:.3g} is necessary and at most {self.guarantee:.3g} guaranteed'
        )


def truncation_errors(matrix: Tensor) -> Tensor:
    """Relative errors of the truncated singular value decompositions with 0 … K terms (Eckart-Young).

    Args:
        matrix (Tensor): M, ``(K, F)``.

    Returns:
        Tensor: ``(K + 1,)`` in float64, on the CPU; all 0 for a matrix of zeros.

    Raises:
        ValueError: ``matrix`` holds values that are not finite.
    """
    values = torch.linalg.svdvals(reduce_columns(matrix))
    squares = values.new_zeros(len(matrix))
    squares[: len(values)] = values.square()
    rest = torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)])  # Σ_{i > n} σ_i² for n = 0 … K
    return (rest / rest[0]).sqrt() if rest[0] > 0 else rest


def relative_error(matrix: Tensor, probs: Tensor, weight: Tensor) -> float:
    """‖M − Σ_h a_h ⊗ W^(h)‖/‖M‖ in the Frobenius norm, 0 if M is 0.

    Args:
        matrix (Tensor): M, ``(K, F)``.
        probs (Tensor): a, ``(N, K)``.
        weight (Tensor): W, ``(N, F)``.
    """
    matrix, probs, weight = (tensor.detach().cpu().double() for tensor in (matrix, probs, weight))
    scale = matrix.abs().max()
    if scale == 0:
        return 0.0
    return (((matrix - probs.T @ weight) / scale).norm() / (matrix / scale).norm()).item()


def best_weight(matrix: Tensor, probs: Tensor) -> Tensor:
    """The W of least squares for given heads.

    Args:
        matrix (Tensor): M, ``(K, F)``.
        probs (Tensor): a, ``(N, K)``, linearly independent.

    Returns:
        Tensor: ``(N, F)`` in float64, on the CPU.
    """
    return torch.linalg.pinv(probs.cpu().double().T) @ matrix.cpu().double()


def best_probs(matrix: Tensor, num_heads: int) -> Tensor:
    """Distributions over the shifts for the best approximation of a kernel by a few heads.

    The error is the least possible, that of ``num_heads`` terms of the singular value decomposition, if the
    space of these terms has a basis of distributions that does not amplify the rounding errors of the matrix's dtype
    too much. It never exceeds that of ``num_heads − 1`` terms. Between the two a local search decides, from several
    starting points.

    Args:
        matrix (Tensor): M, ``(K, F)``. Its dtype is that of the layer.
        num_heads (int): Number of heads N, from 1 to K.

    Returns:
        Tensor: a, ``(N, K)``, linearly independent, in float64 on the CPU.

    Raises:
        ValueError: ``matrix`` holds values that are not finite.
    """
    rounding = torch.finfo(matrix.dtype).eps
    matrix = reduce_columns(matrix)
    singular = torch.linalg.svd(matrix).U
    probs = distributions(singular[:, :num_heads])
    # At least float32's rounding: a float64 layer is likely to become one. And if the kernel has a lower rank, the last
    # singular vectors are noise, and others may do better.
    if probs is not None and max(rounding, FLOAT32_EPS) * amplification(matrix, probs) <= ROUNDING_ERROR:
        return probs

    candidates = [probs]
    positive = positive_direction(matrix, singular, num_heads)
    uniform = torch.full_like(positive, 1 / len(positive))
    for part in UNIFORM_PARTS if num_heads > 1 else (0.0,):  # a single head depends on no other
        p = torch.lerp(positive, uniform, part)
        beside = complement(p)
        directions = beside @ torch.linalg.svd(beside.T @ matrix).U[:, : num_heads - 1]
        candidates.append(distributions(torch.cat([p[:, None] / p.norm(), directions], dim=1)))
    return min(
        (probs for probs in candidates if probs is not None),
        key=lambda probs: (
            relative_error(matrix, probs, best_weight(matrix, probs)) + rounding * amplification(matrix, probs)
        ),
    )


def log_scores(probs: Tensor) -> Tensor:
    """Finite scores whose softmax is ``probs``, ``(N, K)``; the largest score of a head is 0."""
    return (probs / probs.amax(dim=1, keepdim=True)).log().clamp(min=LOWEST_SCORE)


def amplification(matrix: Tensor, probs: Tensor) -> float:
    """Σ_h ‖a_h‖·‖W^(h)‖/‖M‖: how many times the relative rounding error of the heads M' can have."""
    weight = best_weight(matrix, probs)
    total = matrix.norm().item()
    return (probs.norm(dim=1) * weight.norm(dim=1)).sum().item() / total if total > 0 else 0.0


def reduce_columns(matrix: Tensor) -> Tensor:
    """A matrix with the same left singular vectors and, but for a common factor, singular values.

    Args:
        matrix (Tensor): ``(K, F)``.

    Returns:
        Tensor: ``(K, min(K, F))`` in float64, on the CPU, with entries of the order of 1 at most.

    Raises:
        ValueError: ``matrix`` holds values that are not finite.
    """
    matrix = matrix.detach().cpu().double()
    if not matrix.isfinite().all():
        raise ValueError('the weights of conv hold values that are not finite, but a kernel needs finite ones')
    scale = matrix.abs().max()
    matrix = matrix / scale if scale > 0 else matrix
    triangle = torch.linalg.qr(matrix.T, mode='r').R.T  # M = RᵀQᵀ
    return triangle / math.sqrt(matrix.shape[1])


def complement(vector: Tensor) -> Tensor:
    """An orthonormal basis of what is orthogonal to a vector that is not 0: ``(n,)`` to ``(n, n − 1)``."""
    return torch.linalg.qr(vector[:, None], mode='complete').Q[:, 1:]


def nonnegative_least_squares(matrix: Tensor, target: Tensor) -> Tensor:
    """The y ≥ 0 with the least ‖Ay − b‖, by the active-set method of Lawson and Hanson (1974, algorithm NNLS).

    Args:
        matrix (Tensor): A in float64, ``(m, n)``, with columns of the order of 1.
        target (Tensor): b, ``(m,)``.

    Returns:
        Tensor: y, ``(n,)``.
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


def inner_direction(rows: Tensor) -> Tensor:
    """The unit vector c that is farthest inside of the cone of all c with ``rows @ c ≥ 0``.

    Of all y ≥ 0 take that with the least ‖c‖² + (1 − Σy)², c = Σ_i y_i·row_i. Its gradient says that row_i·c ≥ 1 − Σy
    for every i: positive, unless there is y ≠ 0 with c = 0, and then no vector is inside (Gordan). No unit vector has a
    larger min_i row_i·c than c/‖c‖.

    Args:
        rows (Tensor): Unit vectors in float64, ``(n, N)``.

    Returns:
        Tensor: ``(N,)``. If the cone has no inside, any unit vector or 0.
    """
    system = torch.cat([rows.T, rows.new_ones(1, len(rows))])
    target = torch.zeros_like(system[:, 0])
    target[-1] = 1
    direction = rows.T @ nonnegative_least_squares(system, target)
    return direction / direction.norm().clamp(min=torch.finfo(rows.dtype).tiny)


def distributions(basis: Tensor) -> Optional[Tensor]:
    """Distributions that span a subspace, as far from each other as is simple.

    They lie in the directions of a regular simplex around a positive vector of the subspace, on the border of the
    non-negative vectors.

    Args:
        basis (Tensor): An orthonormal basis in float64, ``(K, N)``.

    Returns:
        Tensor | None: a, ``(N, K)``; None if no vector of the subspace is positive wherever the subspace is not 0.
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


def positive_direction(matrix: Tensor, singular: Tensor, num_heads: int) -> Tensor:
    """The distribution p beside which the N − 1 best directions leave the least error, as far as it is found.

    Args:
        matrix (Tensor): M in float64, ``(K, F)``.
        singular (Tensor): Its left singular vectors, best first, ``(K, K)``.
        num_heads (int): N.

    Returns:
        Tensor: p, ``(K,)``.
    """
    size = len(matrix)
    with torch.inference_mode(False), torch.enable_grad():
        gram = (matrix @ matrix.T).clone()
        identity = torch.eye(size, dtype=gram.dtype, device=gram.device)

        def error(root: Tensor) -> Tensor:
            unit = root.square() / root.square().norm()
            project = identity - torch.outer(unit, unit)
            # The squared singular values of (I − ppᵀ/‖p‖²)M without the N − 1 largest; that of p is 0.
            return torch.linalg.eigvalsh(project @ gram @ project)[: size - num_heads + 1].sum()

        # Starting points: the uniform vector, its projection to the best subspace, and the positive and the negative
        # part of each of the best singular vectors; all mixed with a little of the uniform vector.
        uniform = gram.new_full((size,), 1 / size)
        best, near = singular[:, :num_heads], singular[:, : num_heads + 1].T
        points = torch.cat([uniform[None], (best @ (best.T @ uniform))[None], near, -near]).clamp(min=0)
        points = 0.9 * F.normalize(points, p=1, dim=1) + 0.1 * uniform
        roots = sorted((point.sqrt() for point in points), key=lambda root: error(root).item())[:STARTS]
        roots = [descend(error, root.clone()) for root in roots]
        p = min(roots, key=lambda root: error(root).item()).square()
    return p / p.sum()


def descend(function: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """A local minimum of ``function`` near ``point``."""
    point.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [point], max_iter=ITERATIONS, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn='strong_wolfe'
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = function(point)
        value.backward()
        return value

    optimizer.step(closure)
    return point.detach()
