"""A convolution as attention over pixels (Cordonnier et al. 2020 (C20), Theorem 1)."""

import math
from numbers import Integral
from typing import Any, Dict, Optional, Tuple

import torch

from ..layers.image_attention import ImageAttention, QuadraticImageAttention, WindowImageAttention
from ..layers.window import Window
from .fewer_heads import best_probs, best_weight, log_scores, relative_error, truncation_errors
from .kernels import Convolution, block_diagonal, flat_kernel, kernel_matrix
from .report import ConversionReport

# α = 800: e^−800 is 0 in float64 and float32 alike, so that a head sees one pixel and nothing of its neighbours.
HARD_SQRT_PRECISION = 40.0


@torch.no_grad()
def conv_to_mhsa(conv: Convolution, num_heads: Optional[int] = None) -> Tuple[ImageAttention, ConversionReport]:
    """Turns a convolution into multi-head self-attention with its inputs, its outputs and its values.

    With one head for each kernel position the attention is the convolution, exactly (C20, Theorem 1): head h is a
    hard quadratic head with its centre at the h-th shift, and its slice of the value matrix is the kernel's h-th slice.
    With fewer heads each one has a distribution over the shifts, and the attention is the nearest convolution that was
    found, see :func:`~attncnn_plugin.convert.fewer_heads.best_probs`. The image is padded first, as by the convolution.

    Args:
        conv (nn.Module): ``nn.Conv1d``, ``nn.Conv2d`` or ``nn.Conv3d`` with any options. Its device, dtype and mode are
            those of the result; float16 and bfloat16 layers compute their scores in float32.
        num_heads (int, optional): Number of heads. Defaults to one for each kernel position.

    Returns:
        tuple[ImageAttention, ConversionReport]: The attention, and how near it comes to the convolution.

    Raises:
        TypeError: ``conv`` is not one of the three, has no weights yet, or not real ones; ``num_heads`` is no integer.
        ValueError: ``num_heads`` is not from 1 to the number of kernel positions, or a weight is not finite.

    Examples:
        >>> from torch import nn
        >>> conv = nn.Conv2d(3, 8, kernel_size=3, padding=1)
        >>> attention, report = conv_to_mhsa(conv)
        >>> report.num_heads, report.relative_error
        (9, 0.0)
        >>> images = torch.randn(2, 3, 10, 12)
        >>> torch.allclose(attention(images), conv(images), atol=1e-5)
        True

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
    make = hard_attention if num_heads == positions else soft_attention
    attention, report = make(conv, window, int(num_heads))
    if conv.bias is not None:
        attention.value.bias.copy_(conv.bias)
    return attention.train(conv.training), report


def hard_attention(conv: Convolution, window: Window, num_heads: int) -> Tuple[ImageAttention, ConversionReport]:
    """A head for each kernel position, exact; the bias is yet to be set."""
    attention = QuadraticImageAttention(conv.in_channels, conv.out_channels, num_heads, window, **options(conv))
    attention.encoding.center.copy_(window.shifts())  # Δ of head h: f(h) of the theorem
    attention.encoding.sqrt_precision.fill_(HARD_SQRT_PRECISION)
    attention.value.weight.copy_(kernel_matrix(conv).transpose(0, 1).flatten(1))  # W^(h): the kernel's slice at f(h)
    errors = truncation_errors(flat_kernel(conv))
    return attention, ConversionReport(num_heads, 0.0, 0.0, errors[num_heads - 1].item())


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
