"""Heads of attention over pixels that depend on position alone (Cordonnier et al. 2020 (C20), Theorem 1)."""

import copy
import math
from typing import Any, Dict, Tuple

import torch
from torch import Tensor

from ..attention.image_attention import ImageAttention, QuadraticImageAttention, WindowImageAttention
from ..attention.window import Window
from .fewer_heads import LOWEST_SCORE, best_probs, best_weight, log_scores, relative_error, truncation_errors
from .kernels import Convolution, flat_kernel
from .report import ConversionReport
from .soft_shifts import differences_from_shifts, pixels_around, relative_difference


def gaussian_heads(conv: Convolution, window: Window, alpha: float) -> Tuple[ImageAttention, ConversionReport]:
    """Builds a quadratic head of width α for each kernel position; the bias is yet to be set."""
    attention = QuadraticImageAttention(
        conv.in_channels, conv.out_channels, math.prod(window.kernel_size), window, **options(conv)
    )
    alpha = set_gaussians(attention.encoding, window, alpha)
    set_slices(attention, conv)
    return attention, report_of_alpha(conv, window, alpha, pixels_around(window, alpha))


def table_heads(
    conv: Convolution, window: Window, num_heads: int, alpha: float
) -> Tuple[ImageAttention, ConversionReport]:
    """Heads with a distribution over the kernel positions; the bias is yet to be set.

    With one for each position these are those of heads of width α, otherwise the nearest to the convolution.
    """
    attention = WindowImageAttention(conv.in_channels, conv.out_channels, num_heads, window, **options(conv))
    return attention, set_table(attention, conv, window, alpha, window.shifts())


def set_gaussians(encoding: Any, window: Window, alpha: float) -> float:
    """Puts heads of width α at the shifts of a window.

    Returns:
        float: α as stored.
    """
    encoding.center.copy_(window.shifts())  # Δ of head h: f(h) of the theorem
    encoding.sqrt_precision.fill_(math.sqrt(2 * alpha))
    return encoding.sqrt_precision[0].double().square().item() / 2


def set_slices(attention: ImageAttention, conv: Convolution) -> None:
    """Sets W^(h) to the kernel's slice at the h-th position, head after head of an output."""
    attention.value.weight.copy_(conv.weight.flatten(2).transpose(1, 2).flatten(1))


def set_table(
    attention: Any, conv: Convolution, window: Window, alpha: float, shifts: Tensor, share: float = 1.0
) -> ConversionReport:
    """Sets the scores of heads over a table of shifts, and their values.

    Args:
        attention (ImageAttention): With a ``WindowEncoding``.
        conv (Convolution): The convolution.
        window (Window): Its window.
        alpha (float): Width α of heads that each look at one position.
        shifts (Tensor): δ of the table's entries, ``(S, ndim)``.
        share (float): Share of the probabilities that is by position. Defaults to 1.

    Returns:
        ConversionReport: How near the attention comes to the convolution.
    """
    table, num_heads = attention.encoding.weight, attention.num_heads
    distance = (shifts - window.shifts()[:, None]).square().sum(-1)  # ‖δ − Δ‖², (K, S)
    if num_heads == len(distance):
        table.copy_((-alpha * distance).reshape(table.shape))
        set_slices(attention, conv)
        return report_of_alpha(conv, window, alpha, shifts, share)
    matrix = flat_kernel(conv)
    entry = (distance == 0).nonzero()[:, 1].to(table.device)  # of each kernel position in the table
    scores = torch.full((num_heads, len(shifts)), LOWEST_SCORE, dtype=torch.float64, device=table.device)
    scores[:, entry] = log_scores(best_probs(matrix, num_heads)).to(table.device)
    table.copy_(scores.reshape(table.shape))
    probs = share * attention.encoding().flatten(1)[:, entry]  # as stored, so that W makes up for their rounding
    weight = best_weight(matrix, probs).to(matrix)
    slices = weight.T.unflatten(0, (conv.out_channels, -1))  # (C_out, C_in/groups, N), as of a kernel with N positions
    attention.value.weight.copy_(slices.transpose(1, 2).flatten(1))
    errors = truncation_errors(matrix)
    return ConversionReport(
        num_heads, relative_error(matrix, probs, weight), errors[num_heads].item(), errors[num_heads - 1].item()
    )


def report_of_alpha(
    conv: Convolution, window: Window, alpha: float, pixels: Tensor, share: float = 1.0
) -> ConversionReport:
    """Returns how near heads of width α, one for each kernel position, come to the convolution.

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


def options(conv: Convolution) -> Dict[str, Any]:
    """Returns the bias, groups, device and dtype of a convolution, as arguments of an attention layer."""
    own = {'device': conv.weight.device, 'dtype': conv.weight.dtype}
    return {'bias': conv.bias is not None, 'groups': conv.groups, **own}
