"""Heads of attention over pixels by content and position that begin as a convolution.

Li et al. 2021 begin with W^Q = 0; the gate is that of d'Ascoli et al. 2021 ("Transformed CNNs").
"""

import math
from typing import Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from ..attention.content_image_attention import ContentImageAttention
from ..attention.window import Window, per_axis
from .kernels import Convolution
from .position_heads import options, report_of_alpha, set_gaussians, set_slices, set_table
from .report import ConversionReport
from .soft_shifts import pixels_around

LEAST_QK_DIM = 8
HARD_GATE = 40.0  # λ; σ(40) is 1 in float64


def content_heads(
    conv: Convolution,
    window: Window,
    num_heads: int,
    alpha: float,
    gated: bool,
    hard: bool,
    position: str,
    window_size: Union[int, Sequence[int], None],
    qk_dim: Optional[int],
    generator: Optional[torch.Generator],
) -> Tuple[ContentImageAttention, ConversionReport]:
    """Heads by content and position; the bias is yet to be set.

    Args:
        conv (Convolution): The convolution.
        window (Window): Its window.
        num_heads (int): Number of heads.
        alpha (float): Width α of heads that each look at one kernel position.
        gated (bool): Whether content and position have a softmax each, and a gate.
        hard (bool): Whether the gate leaves nothing to content.
        position (str): ``'gaussian'`` or ``'table'``.
        window_size, qk_dim, generator: See :func:`~attncnn_plugin.convert.conv_to_mhsa`.

    Raises:
        ValueError: A ``window_size`` that is no odd number, or does not hold the kernel; a ``qk_dim`` below 1.
    """
    if qk_dim is not None and qk_dim < 1:
        raise ValueError(f'qk_dim={qk_dim} must be at least 1')
    size = _checked_window_size(window, position, window_size)
    attention = ContentImageAttention(
        conv.in_channels,
        conv.out_channels,
        num_heads,
        window,
        max(LEAST_QK_DIM, math.ceil(conv.in_channels / num_heads)) if qk_dim is None else qk_dim,
        position,
        gated,
        size,
        **options(conv),
    )
    limit = conv.in_channels**-0.5
    key = attention.key.weight
    key.copy_(torch.empty(key.shape, dtype=torch.float32).uniform_(-limit, limit, generator=generator))
    share = 1.0
    if attention.gate is not None:
        if hard:
            attention.gate.fill_(HARD_GATE)
        share = attention.gate[0].double().sigmoid().item()
    pixels = pixels_around(window, alpha) if size is None else _neighbourhood(size)
    if position == 'table':
        return attention, set_table(attention, conv, window, alpha, pixels, share)
    alpha = set_gaussians(attention.encoding, window, alpha)
    set_slices(attention, conv)
    return attention, report_of_alpha(conv, window, alpha, pixels, share)


def _neighbourhood(size: Sequence[int]) -> Tensor:
    """Returns δ of all pixels of a neighbourhood, row-major, ``(S, ndim)``."""
    return torch.cartesian_prod(*(torch.arange(n) - n // 2 for n in size)).reshape(-1, len(size))


def _checked_window_size(
    window: Window, position: str, window_size: Union[int, Sequence[int], None]
) -> Optional[Tuple[int, ...]]:
    """Returns the neighbourhood along each axis; the least that holds the kernel for a table without one."""
    least = tuple((2 * window.shifts().abs().amax(0) + 1).tolist())
    if window_size is None:
        return least if position == 'table' else None
    size = per_axis('window_size', window_size, window.ndim)
    if any(n % 2 == 0 or n < m for n, m in zip(size, least)):
        raise ValueError(
            f'window_size={window_size} must be odd, and at least {least} for the shifts of a kernel of '
            f'{window.kernel_size} with dilation {window.dilation}'
        )
    return size
