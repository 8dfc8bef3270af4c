"""How near attention comes to the convolution that it was made from.

Attention over pixels is that of Cordonnier et al. 2020 (C20), Theorem 1, attention over patches that of Li et al. 2021
(L21), Theorem 1.
"""

import copy
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Optional, Tuple

import torch
from torch import Tensor

from ..attention.window import Window
from .fewer_heads import reduce_columns, truncation_errors
from .kernels import Convolution, flat_kernel, spectral_norms

NEGLIGIBLE = 40.0  # e^−40 is below the rounding error of float64


@dataclass(frozen=True)
class ConversionReport:
    """How near attention over pixels comes to its convolution.

    Relative errors are ‖M − M'‖/‖M‖ in the Frobenius norm, and 0 for a kernel of zeros. M is the kernel of the
    convolution, a row for each of its K positions. M' is that of the attention, with a row for each pixel that a head
    sees in an image without end.

    Attributes:
        num_heads (int): Number of heads N.
        relative_error (float): The error of the layer, as its parameters are stored.
        bound (float): The error of the best matrix of rank N (Eckart-Young): no layer with N heads that look at
            positions alone has less.
        guarantee (float): The error of the best matrix of rank N − 1: fewer heads than positions never have more, but
            for rounding. With a head for each position the error is that of ``alpha`` alone.
        alpha (float | None): Width α of heads that each see one position, as stored; None for heads that see several.
        deviation (float): With an ``alpha``, the largest share of a head that goes to other pixels than its own, which
            is the largest difference of a probability from that of the hard shift: at no pixel of any image is it
            exceeded.
        conv (nn.Module | None): The convolution as it was, where ``deviation`` is not 0: for :attr:`output_bound`.
        drift (float | None): ‖Y − Y'‖/‖Y‖ of the outputs Y and Y' before and after for the example input, of all calls
            of the layer together; None without an example, or where the model does not use the layer.
    """

    num_heads: int
    relative_error: float
    bound: float
    guarantee: float
    alpha: Optional[float] = None
    deviation: float = 0.0
    conv: Optional[Convolution] = field(default=None, repr=False, compare=False)
    drift: Optional[float] = None

    @cached_property
    def output_bound(self) -> float:
        """With an ``alpha``, the largest error of an output for an image of pixels of norm 1.

        At no pixel of any image it is exceeded, but for rounding. It takes as long as the rest of the conversion, so it
        is computed when it is first asked for.
        """
        if self.conv is None:
            return 0.0
        # ‖error_q‖ ≤ Σ_h ‖P_h[q, :] − e_h‖₁ ‖W^(h)‖₂, and what other pixels get the own one lacks: ‖·‖₁ ≤ 2·deviation.
        return 2 * self.deviation * spectral_norms(self.conv).sum().item()

    def __str__(self) -> str:
        text = f'error {self.relative_error:.3g}'
        if self.alpha is None:
            text += f', at least {self.bound:.3g} with as many heads'
        return text if self.drift is None else f'{text}, drift {self.drift:.3g}'


def report_of_alpha(
    conv: Convolution, window: Window, alpha: float, pixels: Tensor, share: float = 1.0
) -> ConversionReport:
    """Returns how near heads −α‖δ − Δ‖², one at each shift of a window, come to the convolution (C20, Lemma 2).

    Such a head gives e^(−α‖δ − Δ‖²)/Z to the pixel at δ. Its own pixel gets 1/Z, and nearly all of it for a large α. In
    an image that ends somewhere Z has fewer terms, so the own pixel gets more: an image without end is the worst case.

    Args:
        conv (Convolution): The convolution.
        window (Window): Its window.
        alpha (float): α.
        pixels (Tensor): δ of the pixels that a head can see, ``(S, ndim)``.
        share (float): Share of the probabilities that is by position; the rest counts as lost. Defaults to 1.
    """
    flat = flat_kernel(conv)
    differences, deviation = differences_from_shifts(window.shifts(), pixels, alpha, share)
    return ConversionReport(
        len(flat),
        relative_difference(flat, differences),
        0.0,
        truncation_errors(flat)[len(flat) - 1].item(),
        alpha=alpha,
        deviation=deviation,
        conv=copy.deepcopy(conv) if deviation > 0 else None,
    )


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


@dataclass(frozen=True)
class PatchConversionReport:
    """The size of attention over patches that is its convolution (L21, Theorem 1).

    Attributes:
        num_heads (int): Number of heads, one for each shift.
        shifts (tuple[tuple[int, int], ...]): The shift δ from a patch to the one that each head reads, (row, column)
            in patches.
        head_dims (tuple[int, ...]): Channels D_h of each head's values.
        parameters_before (int): Parameters of the convolution.
        parameters_after (int): Parameters of the attention.
    """

    num_heads: int
    shifts: Tuple[Tuple[int, int], ...]
    head_dims: Tuple[int, ...]
    parameters_before: int
    parameters_after: int

    def __str__(self) -> str:
        least, most = min(self.head_dims), max(self.head_dims)
        widths = f'{least}' if least == most else f'{least} to {most}'
        return (
            f'num_heads={self.num_heads} of {widths} channels: exact, a head for each shift from '
            f'{self.shifts[0]} to {self.shifts[-1]}; '
            f'{self.parameters_before:,} parameters became {self.parameters_after:,}'
        )
