"""The best approximation of a kernel by fewer heads than it has positions.

A convolution is a matrix M with a row for each of its K kernel positions. With N heads that look at positions alone,
attention has the kernel M' = Σ_h a_h ⊗ W^(h): a_h is the distribution of head h over the K shifts, W^(h) its slice of
the value matrix (Cordonnier et al. 2020, section 3). If the a_h could be any vectors, the best M' would be the
truncated singular value decomposition of M (Eckart-Young). It is still the best M' if the N best left singular vectors
span N distributions, see :mod:`~attncnn_plugin.convert.positive_subspace`. Otherwise a distribution p and the N − 1
best directions beside it leave at most the error of N − 1 singular values, and a search finds a good p.

All of it is computed in float64 on the CPU. After a QR decomposition the matrices are K×K.
"""

import math
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .positive_subspace import complement, distributions

# exp(−800) is 0 in float64 and float32 alike: the score of a shift that a head does not see.
LOWEST_SCORE = -800.0
# A rounding error of M' up to which the singular vectors are taken without a search.
ROUNDING_ERROR = 1e-4
FLOAT32_EPS = torch.finfo(torch.float32).eps
# Parts of the uniform distribution in p. The best p has zeros, and there the heads are almost linearly dependent.
UNIFORM_PARTS = (0.01, 0.1, 1.0)
# Number of starting points of the search for p, and of iterations from each.
STARTS = 6
ITERATIONS = 60


def truncation_errors(matrix: Tensor) -> Tensor:
    """Relative errors of the truncated singular value decompositions with 0 … K terms (Eckart-Young).

    Args:
        matrix (Tensor): M, ``(K, F)``.

    Returns:
        Tensor: ``(K + 1,)`` in float64, on the CPU; all 0 for a matrix of zeros.

    Raises:
        ValueError: ``matrix`` holds values that are not finite.

    Examples:
        >>> truncation_errors(torch.diag(torch.tensor([4.0, 3.0])))
        tensor([1.0000, 0.6000, 0.0000], dtype=torch.float64)
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

    Examples:
        >>> relative_error(torch.diag(torch.tensor([4.0, 3.0])), torch.tensor([[1.0, 0.0]]), torch.tensor([[4.0, 0.0]]))
        0.6
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

    Examples:
        >>> round(best_weight(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.5, 0.5]])).item(), 6)
        4.0
    """
    return torch.linalg.pinv(probs.cpu().double().T) @ matrix.cpu().double()


def best_probs(matrix: Tensor, num_heads: int) -> Tensor:
    """Distributions over the shifts for the best approximation of a kernel by a few heads.

    The error is never larger than that of ``num_heads − 1`` singular values. It is the least possible, that of
    ``num_heads`` singular values, if their left vectors span distributions, and if these do not amplify the rounding
    errors of the matrix's dtype too much. Between the two a local search decides, from several starting points.

    Args:
        matrix (Tensor): M, ``(K, F)``. Its dtype is that of the layer.
        num_heads (int): Number of heads N, from 1 to K.

    Returns:
        Tensor: a, ``(N, K)``, linearly independent, in float64 on the CPU.

    Raises:
        ValueError: ``matrix`` holds values that are not finite.

    Examples:
        A kernel of three equal slices takes a single head, which attends to all three alike:

        >>> best_probs(torch.ones(3, 2), num_heads=1)
        tensor([[0.3333, 0.3333, 0.3333]], dtype=torch.float64)
    """
    rounding = torch.finfo(matrix.dtype).eps
    matrix = reduce_columns(matrix)
    singular = torch.linalg.svd(matrix).U
    probs = distributions(singular[:, :num_heads])
    # At least float32's rounding: a float64 layer is likely to become one. And if the kernel has a lower rank, the last
    # singular vectors are noise, and others may do better.
    if probs is not None and max(rounding, FLOAT32_EPS) * amplification(matrix, probs) <= ROUNDING_ERROR:
        return probs

    candidates = [] if probs is None else [probs]
    positive = positive_direction(matrix, singular, num_heads)
    uniform = torch.full_like(positive, 1 / len(positive))
    for part in UNIFORM_PARTS if num_heads > 1 else (0.0,):  # a single head depends on no other
        p = torch.lerp(positive, uniform, part)
        beside = complement(p)
        directions = beside @ torch.linalg.svd(beside.T @ matrix).U[:, : num_heads - 1]
        probs = distributions(torch.cat([p[:, None] / p.norm(), directions], dim=1))
        if probs is not None:
            candidates.append(probs)
    return min(
        candidates,
        key=lambda probs: (
            relative_error(matrix, probs, best_weight(matrix, probs)) + rounding * amplification(matrix, probs)
        ),
    )


def log_scores(probs: Tensor) -> Tensor:
    """Finite scores whose softmax is ``probs``, ``(N, K)``; the largest score of a head is 0.

    Examples:
        >>> log_scores(torch.tensor([[0.5, 0.5, 0.0]]))
        tensor([[   0.,    0., -800.]])
    """
    return (probs / probs.amax(dim=1, keepdim=True)).log().clamp(min=LOWEST_SCORE)


def amplification(matrix: Tensor, probs: Tensor) -> float:
    """Σ_h ‖a_h‖·‖W^(h)‖/‖M‖: how many times the relative rounding error of the heads M' can have.

    Args:
        matrix (Tensor): M in float64, ``(K, F)``.
        probs (Tensor): a in float64, ``(N, K)``, linearly independent.

    Examples:
        >>> round(amplification(torch.eye(2).double(), torch.eye(2).double()), 4)
        1.4142
    """
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

    Examples:
        >>> reduce_columns(torch.rand(9, 100)).shape
        torch.Size([9, 9])
    """
    matrix = matrix.detach().cpu().double()
    if not matrix.isfinite().all():
        raise ValueError('the weights of conv hold values that are not finite, but a kernel needs finite ones')
    scale = matrix.abs().max()
    matrix = matrix / scale if scale > 0 else matrix
    triangle = torch.linalg.qr(matrix.T, mode='r').R.T  # M = RᵀQᵀ
    return triangle / math.sqrt(matrix.shape[1])


def positive_direction(matrix: Tensor, singular: Tensor, num_heads: int) -> Tensor:
    """The distribution p beside which the N − 1 best directions leave the least error, by a local search.

    Args:
        matrix (Tensor): M in float64, ``(K, F)``.
        singular (Tensor): Its left singular vectors, best first, ``(K, K)``.
        num_heads (int): N.

    Returns:
        Tensor: p, ``(K,)``.

    Examples:
        The best non-negative vector for a diagonal matrix is that of its largest entry:

        >>> p = positive_direction(torch.diag(torch.tensor([1.0, 2.0])).double(), torch.eye(2).double().flip(1), 1)
        >>> [round(entry, 4) for entry in p.tolist()]
        [0.0, 1.0]
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
    """A local minimum of a function near a point, by L-BFGS.

    Examples:
        >>> descend(lambda x: (x - 3).square().sum(), torch.zeros(2))
        tensor([3., 3.])
    """
    point.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [point], max_iter=ITERATIONS, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn='strong_wolfe'
    )

    def closure() -> float:
        optimizer.zero_grad()
        value = function(point)
        value.backward()
        return value.item()

    optimizer.step(closure)
    return point.detach()
