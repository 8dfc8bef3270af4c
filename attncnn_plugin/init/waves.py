"""Gaussian attention by a sum of few waves.

Σ_f a_f cos(ω_f (k − q − Δ)) with ω_f = πf/r for f = 1 … F, where r is the largest distance |k − q − Δ| in a grid: there
all waves have an extreme. A softmax needs no more of −α(k − q − Δ)² than its values near 0, and that all others are
low. So the coefficients are those whose softmax is nearest to the Gaussian's, and they are small. With the parabola
itself scores of far keys would be hundreds, and so would be the queries and keys that multiply to them.
"""

import math

import torch
from torch import Tensor

SHORTEST = 8  # patches: the period of the shortest wave, at most
RIDGE = 1e-5
STEPS = 100


def number_of_waves(reach: int) -> int:
    """How many waves reach so that the shortest has a period of 8 patches at most; two at least."""
    return max(2, math.ceil(2 * reach / SHORTEST))


def frequencies(reach: int, number: int) -> Tensor:
    """ω_f = πf/reach, ``(number,)``, float64."""
    return math.pi * torch.arange(1, number + 1, dtype=torch.float64) / reach


def nearest_waves(alpha: float, shift: float, length: int, omega: Tensor) -> Tensor:
    """Coefficients a whose softmax is nearest to a Gaussian's, on one axis.

    They have the smallest divergence KL(P ‖ softmax_k Σ_f a_f cos(ω_f (k − q − Δ))) to P[q, k] = softmax_k(−α(k − q −
    Δ)²), mean over the queries, plus ``RIDGE``·‖a‖². The problem is convex: Newton's method, with steps that are halved
    while they lead up.

    Args:
        alpha (float): α.
        shift (float): Δ, in patches.
        length (int): Of the axis, in patches.
        omega (Tensor): ω, ``(F,)``; an axis of one patch needs none.

    Returns:
        Tensor: a, ``(F,)``, float64.

    Examples:
        >>> omega = frequencies(reach=8, number=2)
        >>> a = nearest_waves(2.0, 1.0, 8, omega)
        >>> k = torch.arange(8.0).double()
        >>> (torch.cos((k[:, None] - 3 - 1) * omega) @ a).softmax(0)[3:6]  # of the query 3
        tensor([0.1048, 0.7891, 0.1048], dtype=torch.float64)
        >>> (-2 * (k - 3 - 1) ** 2).softmax(0)[3:6]
        tensor([0.1065, 0.7866, 0.1065], dtype=torch.float64)
    """
    if len(omega) == 0:
        return omega
    keys = torch.arange(length, dtype=torch.float64)
    distances = keys - keys[:, None] - shift  # k − q − Δ, (q, k)
    waves = torch.cos(distances[..., None] * omega.cpu())  # (q, k, F)
    wanted = (-alpha * distances.square()).softmax(1)
    of_wanted = (wanted[..., None] * waves).sum(1).mean(0)  # E_P[cos]

    def loss(a: Tensor) -> Tensor:
        return -(wanted * (waves @ a).log_softmax(1)).sum(1).mean() + RIDGE * a.square().sum()

    a = torch.zeros(len(omega), dtype=torch.float64)
    ridge = 2 * RIDGE * torch.eye(len(omega), dtype=torch.float64)
    for _ in range(STEPS):
        probs = (waves @ a).softmax(1)
        mean = (probs[..., None] * waves).sum(1)
        gradient = mean.mean(0) - of_wanted + ridge @ a
        centred = waves - mean[:, None]
        hessian = torch.einsum('qk,qkf,qkg->fg', probs, centred, centred) / length + ridge
        step = torch.linalg.solve(hessian, gradient)
        while loss(a - step) > loss(a) and step.abs().max() > 1e-9:
            step = step / 2
        a = a - step
        if step.abs().max() < 1e-9:
            break
    return a.to(omega)


def wave_matrix(coefficients: Tensor, omega: Tensor, shift: float) -> Tensor:
    """M of [cos ω₁q, sin ω₁q, …] M [cos ω₁k, sin ω₁k, …]ᵀ = Σ_f a_f cos(ω_f (k − q − Δ)), ``(2F, 2F)``.

    Examples:
        >>> a, omega = torch.tensor([3.0, 1.0]), torch.tensor([0.5, 1.0])
        >>> query, key = (torch.stack([(omega * x).cos(), (omega * x).sin()], -1).flatten() for x in (2, 5))
        >>> (query @ wave_matrix(a, omega, 1.0) @ key - (a * (2 * omega).cos()).sum()).abs() < 1e-5
        tensor(True)
    """
    cosines, sines = coefficients * (omega * shift).cos(), coefficients * (omega * shift).sin()
    blocks = torch.stack([torch.stack([cosines, sines], -1), torch.stack([-sines, cosines], -1)], -2)  # (F, 2, 2)
    return torch.block_diag(*blocks) if len(blocks) else blocks.new_zeros(0, 0)
