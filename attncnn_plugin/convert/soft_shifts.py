"""How far heads −α‖δ − Δ‖² at the shifts of a window are from shifts (Cordonnier et al. 2020 (C20), Lemma 2).

Such a head gives e^(−α‖δ − Δ‖²)/Z to the pixel at δ. Its own pixel gets 1/Z, and nearly all of it for a large α. In an
image that ends somewhere Z has fewer terms, so the own pixel gets more: an image without end is the worst case.
"""

import math
from typing import Tuple

import torch
from torch import Tensor

from ..attention.window import Window
from .fewer_heads import reduce_columns

NEGLIGIBLE = 40.0  # e^−40 is below the rounding error of float64


def pixels_around(window: Window, alpha: float) -> Tensor:
    """Returns δ of all pixels, ``(S, ndim)``, that heads of width α at the shifts of a window see in an endless image.

    Args:
        window (Window): The window; its shifts are the centres Δ of the heads.
        alpha (float): α, at least 0.1: there are √(40/α) pixels around the window.
    """
    shifts = window.shifts()
    reach = math.ceil(math.sqrt(NEGLIGIBLE / alpha))
    axes = [torch.arange(low - reach, high + reach + 1) for low, high in zip(shifts[0].tolist(), shifts[-1].tolist())]
    return torch.cartesian_prod(*axes).reshape(-1, window.ndim)


def differences_from_shifts(shifts: Tensor, pixels: Tensor, alpha: float, share: float = 1.0) -> Tuple[Tensor, float]:
    """Returns the difference between what a head at each shift gives to the pixels and the shift itself.

    Args:
        shifts (Tensor): The centres Δ of the heads, ``(K, ndim)``.
        pixels (Tensor): δ of the pixels, ``(S, ndim)``.
        alpha (float): α.
        share (float): The heads' share of the probabilities; the rest is lost. Defaults to 1.

    Returns:
        tuple[Tensor, float]: P_h − e_Δ, a row for each head, ``(K, S)``, and the largest part of a head that goes to
        other pixels than its own, or is lost. Both in float64, each entry to its own relative precision.

    Examples:
        >>> window = Window.of(torch.nn.Conv1d(1, 1, 1))
        >>> pixels = pixels_around(window, alpha=46)
        >>> differences, deviation = differences_from_shifts(window.shifts(), pixels, alpha=46)
        >>> f'{deviation:.2e}'  # both neighbours together; C20: the largest deviation is about 1e-20
        '2.11e-20'
    """
    distance = (pixels - shifts[:, None]).square().sum(-1)  # ‖δ − Δ‖², (K, S)
    probs = (-alpha * distance.double()).softmax(-1)
    others = share * probs.masked_fill(distance == 0, 0)
    deviation = others.sum(-1, keepdim=True) + (1 - share)
    return torch.where(distance == 0, -deviation, others), deviation.max().item()  # not 1/Z − 1, which would cancel


def relative_difference(matrix: Tensor, differences: Tensor) -> float:
    """Returns ‖Σ_h (P_h − e_h) ⊗ W_h‖/‖Σ_h e_h ⊗ W_h‖ in the Frobenius norm, 0 if all W_h are 0.

    Args:
        matrix (Tensor): The W_h as rows, ``(K, F)``.
        differences (Tensor): P_h − e_h, ``(K, pixels)``.

    Examples:
        >>> relative_difference(torch.ones(1, 7), torch.tensor([[-0.75, 1.0]], dtype=torch.float64))
        1.25
    """
    matrix = reduce_columns(matrix)
    total = matrix.norm()
    return ((differences.T @ matrix).norm() / total).item() if total > 0 else 0.0
