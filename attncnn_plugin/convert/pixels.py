"""A convolution as attention over pixels (Cordonnier et al. 2020 (C20), Theorem 1)."""

import math
from numbers import Integral, Real
from typing import Any, Optional, Sequence, Tuple, Union

import torch

from ..attention.content_image_attention import POSITIONS
from ..attention.image_attention import ImageAttention
from ..attention.window import shown
from .content_heads import content_heads
from .kernels import Convolution
from .position_heads import gaussian_heads, table_heads
from .report import ConversionReport
from .timm_convolutions import plain_convolution, window_of

CONTENTS = (None, 'additive', 'gated')
# e^−800 is 0 in float64 and float32 alike, so that a head sees one pixel and nothing of its neighbours.
HARD_ALPHA = 800.0
# A wider head sees more of every other pixel than a shift can, and a larger α than HARD_ALPHA changes nothing.
ALPHA_RANGE = (0.1, 1e6)


@torch.no_grad()
def conv_to_mhsa(
    conv: Convolution,
    num_heads: Optional[int] = None,
    alpha: Optional[float] = None,
    content: Optional[str] = None,
    position: Optional[str] = None,
    window_size: Union[int, Sequence[int], None] = None,
    qk_dim: Optional[int] = None,
    generator: Optional[torch.Generator] = None,
) -> Tuple[ImageAttention, ConversionReport]:
    """Turns a convolution into multi-head self-attention with its inputs, its outputs and its values.

    With one head for each kernel position the attention is the convolution, exactly (C20, Theorem 1): head h is a
    hard quadratic head with its centre at the h-th shift, and its slice of the value matrix is the kernel's h-th slice.
    With fewer heads each one has a distribution over the shifts, and the attention is the nearest convolution that was
    found, see :func:`~attncnn_plugin.convert.fewer_heads.best_probs`. The image is padded first, as C20 advises, in the
    way of the convolution.

    With ``content`` the probabilities depend on the image too, see
    :class:`~attncnn_plugin.attention.ContentImageAttention`; W^Q starts at 0, so that the attention begins as the
    convolution all the same (Li et al. 2021).

    With the default ``alpha`` the gradients of centres, widths and scores by content are exactly 0: such heads stay
    where they are. For attention that goes on learning, give a smaller one, about 6. Its heads see a little of their
    neighbours, which the report states.

    Args:
        conv (nn.Conv1d | nn.Conv2d | nn.Conv3d): A convolution with any options, or one of timm's with ``'SAME'``
            padding or weight standardization. Its device, dtype, mode and ``requires_grad`` are those of the result;
            float16 and bfloat16 layers compute their scores in float32.
        num_heads (int, optional): Number of heads. Defaults to one for each kernel position.
        alpha (float, optional): Width α of the heads (C20, eq. 9), from 0.1 to 1e6, with one for each kernel position.
            Defaults to 800, no error at all; 46 is below the rounding error of float64 (C20's remark on Lemma 2).
        content (str, optional): How scores by content come in: ``'additive'``, softmax(q·k/√D_k + b_δ), or ``'gated'``,
            (1 − σ(λ))·softmax(q·k/√D_k) + σ(λ)·softmax(b_δ) as in ConViT. λ starts at 40, no content at all, with the
            default ``alpha``, and at 4, 2% of the probabilities, with another. Defaults to None, positions alone.
        position (str, optional): ``'gaussian'``, heads −α‖δ − Δ‖², or ``'table'``, a score for each shift of the
            kernel, with content of the neighbourhood. Defaults to ``'gaussian'`` with a head for each kernel position,
            and to ``'table'`` with fewer.
        window_size (int | Sequence[int], optional): With content, the size of the neighbourhood of a query that its
            keys are in, odd, for all axes or for each: time and memory then grow linearly with the number of pixels.
            Defaults to None, the whole image, and for a table to the least that holds the kernel.
        qk_dim (int, optional): With content, channels D_k of a head's queries and keys. Defaults to the channels
            divided by the heads, at least 8.
        generator (torch.Generator, optional): With content, for the random W^K, on the CPU. Defaults to PyTorch's own.

    Returns:
        tuple[ImageAttention, ConversionReport]: The attention, and how near it comes to the convolution.

    Raises:
        TypeError: ``conv`` is not one of these, has no weights yet, or not real ones; ``num_heads`` is no integer, or
            ``alpha`` no number.
        ValueError: ``num_heads`` is not from 1 to the number of kernel positions; ``alpha`` is not from 0.1 to 1e6, or
            given for fewer heads than kernel positions; a weight is not finite; an unknown ``content`` or ``position``;
            Gaussian heads, but fewer than kernel positions; a ``window_size`` that is not odd or does not hold the
            kernel; an argument of content without it.

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

        >>> attention, report = conv_to_mhsa(conv, alpha=6, content='additive')
        >>> type(attention).__name__, attention.query.weight.abs().max().item()
        ('ContentImageAttention', 0.0)

        With 6 heads the error is between that of 6 and that of 5 singular values of the kernel:

        >>> attention, report = conv_to_mhsa(conv, num_heads=6)
        >>> report.bound - 1e-6 <= report.relative_error <= report.guarantee + 1e-6
        True
    """
    conv = plain_convolution(conv)
    window = window_of(conv)
    positions = math.prod(window.kernel_size)
    if num_heads is None:
        num_heads = positions
    if isinstance(num_heads, bool) or not isinstance(num_heads, Integral):
        raise TypeError(f'num_heads is {shown(num_heads)}, but an integer from 1 to {positions} or None is expected')
    if not 1 <= num_heads <= positions:
        raise ValueError(
            f'num_heads is {num_heads}, but a kernel with {positions} positions can have from 1 to {positions} heads'
        )
    heads = int(num_heads)
    if heads < positions and alpha is not None:
        raise ValueError(
            f'alpha={alpha} is the width of heads that each see one of {positions} positions, but with '
            f'num_heads={heads} heads see several: leave out alpha or num_heads'
        )
    position = _checked_position(position, heads, positions)
    width = HARD_ALPHA if alpha is None else _checked_alpha(alpha)
    attention: ImageAttention
    if content not in CONTENTS:
        raise ValueError(f'content={shown(content)} is unknown: choose one of {CONTENTS}')
    if content is not None:
        gated, hard = content == 'gated', alpha is None
        attention, report = content_heads(
            conv, window, heads, width, gated, hard, position, window_size, qk_dim, generator
        )
    else:
        _refuse_without_content(window_size=window_size, qk_dim=qk_dim, generator=generator)
        if position == 'gaussian':
            attention, report = gaussian_heads(conv, window, width)
        else:
            attention, report = table_heads(conv, window, heads, width)
    if conv.bias is not None:
        attention.value.bias.copy_(conv.bias)
    return attention.requires_grad_(conv.weight.requires_grad).train(conv.training), report


def _checked_position(position: Optional[str], num_heads: int, positions: int) -> str:
    if position is None:
        return 'gaussian' if num_heads == positions else 'table'
    if position not in POSITIONS:
        raise ValueError(f'position={shown(position)} is unknown: choose one of {POSITIONS}')
    if position == 'gaussian' and num_heads < positions:
        raise ValueError(
            f"position='gaussian' has a head for each of {positions} kernel positions, but num_heads={num_heads}: use "
            "position='table'"
        )
    return position


def _refuse_without_content(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"{name}={shown(value)} is for attention by content: add content='additive' or 'gated', or leave it out"
            )


def _checked_alpha(alpha: float) -> float:
    if isinstance(alpha, bool) or not isinstance(alpha, Real):
        raise TypeError(f'alpha is {shown(alpha)}, but a number or None is expected')
    least, largest = ALPHA_RANGE
    if not least <= alpha <= largest:
        raise ValueError(
            f'alpha={alpha} must be from {least} to {largest:g}: 46 or more for an exact convolution, about 6 for '
            'heads that learn'
        )
    return float(alpha)
