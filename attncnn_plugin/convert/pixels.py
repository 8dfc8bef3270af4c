"""A convolution as attention over pixels (Cordonnier et al. 2020 (C20), Theorem 1)."""

import math
from numbers import Integral, Real
from typing import Any, Dict, Optional, Tuple

import torch

from ..layers.image_attention import ImageAttention, QuadraticImageAttention, WindowImageAttention
from ..layers.window import Window
from .fewer_heads import best_probs, best_weight, log_scores, relative_error, truncation_errors
from .kernels import Convolution, block_diagonal, flat_kernel, kernel_matrix
from .report import ConversionReport
from .soft_shifts import differences_from_shifts, relative_difference

# e^−800 is 0 in float64 and float32 alike, so that a head sees one pixel and nothing of its neighbours.
HARD_ALPHA = 800.0
# A wider head sees more of every other pixel than a shift can, and a larger α than HARD_ALPHA changes nothing.
ALPHA_RANGE = (0.1, 1e6)


@torch.no_grad()
def conv_to_mhsa(
    conv: Convolution, num_heads: Optional[int] = None, alpha: Optional[float] = None
) -> Tuple[ImageAttention, ConversionReport]:
    """Turns a convolution into multi-head self-attention with its inputs, its outputs and its values.

    With one head for each kernel position the attention is the convolution, exactly (C20, Theorem 1): head h is a
    hard quadratic head with its centre at the h-th shift, and its slice of the value matrix is the kernel's h-th slice.
    With fewer heads each one has a distribution over the shifts, and the attention is the nearest convolution that was
    found, see :func:`~attncnn_plugin.convert.fewer_heads.best_probs`. The image is padded first, as C20 advises, in the
    way of the convolution.

    With the default ``alpha`` the gradients of centres and widths are exactly 0: such heads stay where they are. For
    attention that goes on learning, give a smaller one. Its heads see a little of their neighbours, which the report
    states.

    Args:
        conv (nn.Conv1d | nn.Conv2d | nn.Conv3d): A convolution with any options. Its device, dtype and mode are those
            of the result; float16 and bfloat16 layers compute their scores in float32.
        num_heads (int, optional): Number of heads. Defaults to one for each kernel position.
        alpha (float, optional): Width α of the heads (C20, eq. 9), from 0.1 to 1e6, with one for each kernel position.
            Defaults to 800, no error at all; 46 is below the rounding error of float64 (C20's remark on Lemma 2).

    Returns:
        tuple[ImageAttention, ConversionReport]: The attention, and how near it comes to the convolution.

    Raises:
        TypeError: ``conv`` is not one of the three, has no weights yet, or not real ones; ``num_heads`` is no integer,
            or ``alpha`` no number.
        ValueError: ``num_heads`` is not from 1 to the number of kernel positions; ``alpha`` is not from 0.1 to 1e6, or
            given for fewer heads than kernel positions; a weight is not finite.

    Examples:
        >>> conv = torch.nn.Conv2d(3, 8, kernel_size=3, padding=1)
        >>> attention, report = conv_to_mhsa(conv)
        >>> report.num_heads, report.relative_error
        (9, 0.0)
        >>> images = torch.randn(2, 3, 10, 12)
        >>> torch.allclose(attention(images), conv(images), atol=1e-5)
        True

        Heads that can learn:

        >>> attention, report = conv_to_mhsa(conv, alpha=6)
        >>> round(report.deviation, 4), bool(report.relative_error < 0.02)
        (0.0098, True)

        With 6 heads the error is between that of 6 and that of 5 singular values of the kernel:

        >>> attention, report = conv_to_mhsa(conv, num_heads=6)
        >>> report.bound - 1e-6 <= report.relative_error <= report.guarantee + 1e-6
        True
    """
    window = Window.of(conv)
    positions = math.prod(window.kernel_size)
    if num_heads is None:
        num_heads = positions
    if isinstance(num_heads, bool) or not isinstance(num_heads, Integral):
        raise TypeError(f'num_heads is {num_heads!r}, but an integer from 1 to {positions} or None is expected')
    if not 1 <= num_heads <= positions:
        raise ValueError(
            f'num_heads is {num_heads}, but a kernel with {positions} positions can have from 1 to {positions} heads'
        )
    if num_heads < positions:
        if alpha is not None:
            raise ValueError(
                f'alpha={alpha} is the width of heads that each see one of {positions} positions, but with '
                f'num_heads={num_heads} heads see several: leave out alpha or num_heads'
            )
        attention, report = soft_attention(conv, window, int(num_heads))
    else:
        attention, report = hard_attention(conv, window, HARD_ALPHA if alpha is None else _checked_alpha(alpha))
    if conv.bias is not None:
        attention.value.bias.copy_(conv.bias)
    return attention.train(conv.training), report


def _checked_alpha(alpha: float) -> float:
    if isinstance(alpha, bool) or not isinstance(alpha, Real):
        raise TypeError(f'alpha is {alpha!r}, but a number or None is expected')
    least, largest = ALPHA_RANGE
    if not least <= alpha <= largest:
        raise ValueError(
            f'alpha={alpha} must be from {least} to {largest:g}: 46 or more for an exact convolution, about 6 for '
            'heads that learn'
        )
    return float(alpha)


def hard_attention(conv: Convolution, window: Window, alpha: float) -> Tuple[ImageAttention, ConversionReport]:
    """A head of width α for each kernel position; the bias is yet to be set."""
    matrix = kernel_matrix(conv)  # (K, C_out, C_in)
    num_heads = len(matrix)
    attention = QuadraticImageAttention(conv.in_channels, conv.out_channels, num_heads, window, **options(conv))
    attention.encoding.center.copy_(window.shifts())  # Δ of head h: f(h) of the theorem
    attention.encoding.sqrt_precision.fill_(math.sqrt(2 * alpha))
    attention.value.weight.copy_(matrix.transpose(0, 1).flatten(1))  # W^(h): the kernel's slice at f(h)

    flat = flat_kernel(conv)
    guarantee = truncation_errors(flat)[num_heads - 1].item()
    stored = attention.encoding.sqrt_precision[0].double().square().item() / 2
    differences, deviation = differences_from_shifts(window, stored)
    # ‖error_q‖ ≤ Σ_h ‖P_h[q, :] − e_h‖₁ ‖W^(h)‖₂, and what other pixels get the own one lacks: ‖·‖₁ ≤ 2·deviation.
    norms = torch.linalg.matrix_norm(matrix.double(), ord=2)
    return attention, ConversionReport(
        num_heads,
        relative_difference(flat, differences),
        0.0,
        guarantee,
        alpha=stored,
        deviation=deviation,
        output_bound=2 * deviation * norms.sum().item(),
    )


def soft_attention(conv: Convolution, window: Window, num_heads: int) -> Tuple[ImageAttention, ConversionReport]:
    """Fewer heads than kernel positions, each with a distribution over them; the bias is yet to be set."""
    matrix = flat_kernel(conv)
    attention = WindowImageAttention(conv.in_channels, conv.out_channels, num_heads, window, **options(conv))
    scores = log_scores(best_probs(matrix, num_heads))
    attention.encoding.weight.copy_(scores.reshape(attention.encoding.weight.shape))
    probs = attention.encoding().flatten(1)  # as stored, so that W makes up for their rounding
    weight = best_weight(matrix, probs).to(matrix)
    slices = weight.T.unflatten(0, (conv.out_channels, -1))  # (C_out, C_in/groups, N), as of a kernel with N positions
    attention.value.weight.copy_(block_diagonal(slices, conv.groups).transpose(0, 1).flatten(1))
    errors = truncation_errors(matrix)
    return attention, ConversionReport(
        num_heads, relative_error(matrix, probs, weight), errors[num_heads].item(), errors[num_heads - 1].item()
    )


def options(conv: Convolution) -> Dict[str, Any]:
    """The bias, device and dtype of a convolution, as arguments of an attention layer."""
    return {'bias': conv.bias is not None, 'device': conv.weight.device, 'dtype': conv.weight.dtype}
