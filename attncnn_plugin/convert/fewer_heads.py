"""The best approximation of a kernel by fewer heads than it has positions, in float64 on the CPU.

A convolution is a matrix M with a row for each of its K kernel positions. N heads have the kernel M' = Σ_h a_h ⊗ W^(h):
a_h is the distribution of head h over the K shifts, W^(h) its slice of the value matrix. Were the a_h any vectors, the
best M' would be M's truncated singular value decomposition (Eckart-Young). It still is where the N best left singular
vectors span a positive vector. Otherwise a positive p and the N − 1 best directions beside it leave at most the error
of N − 1 singular values.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

LOWEST_SCORE = -800.0  # of a shift that a head does not see: exp(−800) is 0 in float64 and float32 alike
ROUNDING_ERROR = 1e-4  # of M' in float32, up to which the singular vectors are taken without a search
UNIFORM_PARTS = (0.01, 0.1, 1.0)  # of the uniform distribution in p: heads around a p with zeros are nearly dependent
STARTS, ITERATIONS, PROJECTIONS = 3, 300, 1000  # of the searches for p and for a positive vector
ZERO_ROW = 1e-12  # rows of an orthonormal basis under this are rounding errors of rows of zeros


def truncation_errors(matrix: Tensor) -> Tensor:
    """Returns the relative errors of M's singular value decompositions with 0 … K terms, ``(K + 1,)``; 0 for M = 0."""
    rest = torch.linalg.svdvals(reduce_columns(matrix)).square().flip(0).cumsum(0).flip(0)  # Σ_{i > n} σ_i², n = 0 …
    rest = F.pad(rest, (0, len(matrix) + 1 - len(rest)))
    return (rest / rest[0]).sqrt() if rest[0] > 0 else rest


def relative_error(matrix: Tensor, probs: Tensor, weight: Tensor) -> float:
    """Returns ‖M − Σ_h a_h ⊗ W^(h)‖/‖M‖ in the Frobenius norm for a ``(N, K)`` and W ``(N, F)``; 0 for M = 0."""
    matrix, probs, weight = (tensor.detach().cpu().double() for tensor in (matrix, probs, weight))
    scale = matrix.abs().max()
    return (((matrix - probs.T @ weight) / scale).norm() / (matrix / scale).norm()).item() if scale > 0 else 0.0


def best_weight(matrix: Tensor, probs: Tensor) -> Tensor:
    """Returns the W of least squares for linearly independent heads, ``(N, F)``."""
    return torch.linalg.pinv(probs.cpu().double().T) @ matrix.cpu().double()


def amplification(matrix: Tensor, probs: Tensor) -> float:
    """Returns Σ_h ‖a_h‖·‖W^(h)‖/‖M‖: how many times the relative rounding error of the heads M' can have."""
    total = (probs.norm(dim=1) * best_weight(matrix, probs).norm(dim=1)).sum()
    return (total / matrix.norm()).item() if matrix.any() else 0.0


def log_scores(probs: Tensor) -> Tensor:
    """Returns finite scores whose softmax is ``probs``, ``(N, K)``; the largest score of a head is 0."""
    return (probs / probs.amax(dim=1, keepdim=True)).log().clamp(min=LOWEST_SCORE)


def best_probs(matrix: Tensor, num_heads: int) -> Tensor:
    """Returns linearly independent distributions over the shifts that approximate a kernel best, a, ``(N, K)``.

    The error is never larger than that of N − 1 singular values. It is the least possible, that of N, where a positive
    vector is found in the span of their left vectors, and the heads do not amplify the rounding errors of the matrix's
    dtype, that of the layer, too much. Between the two a local search decides, from several starts.
    """
    rounding, matrix = torch.finfo(matrix.dtype).eps, reduce_columns(matrix)
    singular = torch.linalg.svd(matrix).U
    best, candidates = singular[:, :num_heads], []
    inside = positive_vector(best)
    if inside is not None:
        candidates.append(distributions(inside, best @ complement(best.T @ inside)))
        if max(rounding, torch.finfo(torch.float32).eps) * amplification(matrix, candidates[0]) <= ROUNDING_ERROR:
            return candidates[0]
    positive, uniform = positive_direction(matrix, singular, num_heads), torch.full_like(matrix[:, 0], 1 / len(matrix))
    for part in UNIFORM_PARTS if num_heads > 1 else (0.0,):  # a single head depends on no other
        p = torch.lerp(positive, uniform, part)
        candidates.append(distributions(p, best_beside(matrix, p, num_heads - 1)))
    errors = [relative_error(matrix, probs, best_weight(matrix, probs)) for probs in candidates]
    costs = [error + rounding * amplification(matrix, probs) for error, probs in zip(errors, candidates)]
    return candidates[costs.index(min(costs))]


def positive_vector(basis: Tensor) -> Optional[Tensor]:
    """Returns a vector of a subspace that is positive wherever the subspace is not 0; None if none is found.

    Alternates between the nearest vector of the subspace and the nearest one whose entries are at least 1, relative to
    the rows of the orthonormal ``basis``, ``(K, N)``: so a small entry can be far from 0 too.
    """
    norms = basis.norm(dim=1).masked_fill(basis.norm(dim=1) <= ZERO_ROW, 0)
    rows = basis[norms > 0] / norms[norms > 0, None]
    project = rows @ torch.linalg.pinv(rows)
    x = project.sum(1)
    for _ in range(PROJECTIONS):
        if x.min() >= 0.5:
            return torch.zeros_like(norms).masked_scatter(norms > 0, x) * norms
        x = project @ x.clamp(min=1)
    return None


def positive_direction(matrix: Tensor, singular: Tensor, num_heads: int) -> Tensor:
    """Returns the distribution p, ``(K,)``, beside which the N − 1 best directions leave the least error.

    Least squares in turns: the directions for a p, then p ≥ 0 for these and for its row of W. It starts from the
    uniform vector, its projection to the best subspace, and both signs of the best singular vectors, cut at 0.
    """
    uniform = torch.full_like(matrix[:, 0], 1 / len(matrix))
    best, near = singular[:, :num_heads], singular[:, : num_heads + 1].T
    points = torch.cat([uniform[None], (best @ (best.T @ uniform))[None], near, -near]).clamp(min=0)
    points = 0.9 * F.normalize(points, p=1, dim=1) + 0.1 * uniform

    def error(p: Tensor) -> float:
        return torch.linalg.svdvals(complement(p).T @ matrix)[num_heads - 1 :].norm().item()

    found = []
    for p in sorted(points, key=error)[:STARTS]:
        for _ in range(ITERATIONS):
            directions = best_beside(matrix, p, num_heads - 1)
            step = ((matrix - directions @ (directions.T @ matrix)) @ (matrix.T @ p)).clamp(min=0)
            last, p = p, F.normalize(step, p=1, dim=0) if step.any() else p
            if torch.dist(last, p) < 1e-8:
                break
        found.append(p)
    return min(found, key=error)


def best_beside(matrix: Tensor, p: Tensor, number: int) -> Tensor:
    """Returns the orthonormal directions, orthogonal to p, that leave the least error of M, ``(K, number)``."""
    beside = complement(p)
    return beside @ torch.linalg.svd(beside.T @ matrix).U[:, :number]


def distributions(p: Tensor, directions: Tensor) -> Tensor:
    """Returns N distributions that span p and N − 1 directions, ``(K, N − 1)``: a simplex around p, ``(N, K)``.

    p has to be positive where the directions, which are orthonormal, are not 0.
    """
    simplex = F.normalize(complement(p.new_ones(directions.shape[1] + 1)), dim=1)  # (N, N − 1)
    # Entries relative to those of p, which are then all 1: p + t·d ≥ 0 as long as t·d ≥ −1.
    relative = torch.where(p > 0, simplex @ directions.T / p, 0.0)
    reach = 1 / (-relative).amax(dim=1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    return F.normalize((1 + reach * relative).clamp(min=0) * p, p=1, dim=1)


def complement(vector: Tensor) -> Tensor:
    """Returns an orthonormal basis of what is orthogonal to a vector that is not 0: ``(n,)`` to ``(n, n − 1)``."""
    return torch.linalg.qr(vector[:, None], mode='complete').Q[:, 1:]


def reduce_columns(matrix: Tensor) -> Tensor:
    """Returns a K×K matrix at most, with the same left singular vectors and, but for a factor, singular values."""
    matrix = matrix.detach().cpu().double()
    if not matrix.isfinite().all():
        raise ValueError('the weights of conv hold values that are not finite, but a kernel needs finite ones')
    scale = matrix.abs().max()
    matrix = matrix / scale if scale > 0 else matrix
    return torch.linalg.qr(matrix.T, mode='r').R.T / matrix.shape[1] ** 0.5  # M = RᵀQᵀ
