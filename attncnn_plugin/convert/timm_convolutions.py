"""Convolutions of timm that compute their padding or their weights in every pass."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Conv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d
from timm.layers.std_conv import StdConv2dSame
from torch import nn

from ..attention.window import CONVOLUTIONS, SameWindow, Window

STANDARDIZED = (StdConv2d, StdConv2dSame, ScaledStdConv2d, ScaledStdConv2dSame)


def has_hooks(module: nn.Module) -> bool:
    """Whether something happens when a module is called that its class does not say."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or 'forward' in module.__dict__  # torch 2.6 cannot trace vars()
    )


def window_of(conv: nn.Module) -> Window:
    """Returns the window of a convolution of PyTorch, or of timm's ``Conv2dSame``, whose padding depends on the image.

    Raises:
        TypeError: ``conv`` is something else.

    Examples:
        >>> window_of(Conv2dSame(1, 1, 3, stride=2)).padding_of(axis=0, size=8)
        (0, 1)
    """
    window = Window.of(conv, kinds=(Conv2dSame, *CONVOLUTIONS))
    if not isinstance(conv, Conv2dSame):
        return window
    return SameWindow(window.kernel_size, window.stride, window.dilation, (), window.padding_mode)


@torch.no_grad()
def plain_convolution(conv: Any) -> Any:
    """Returns a convolution with weight standardization as one with the weights that it computes; any other as it is.

    Examples:
        >>> conv = StdConv2d(3, 4, 3)
        >>> plain, x = plain_convolution(conv), torch.randn(1, 3, 8, 8)
        >>> type(plain) is nn.Conv2d, torch.allclose(plain(x), conv(x), atol=1e-6)
        (True, True)
    """
    if type(conv) not in STANDARDIZED or has_hooks(conv):
        return conv
    kind = Conv2dSame if getattr(conv, 'same_pad', False) else nn.Conv2d
    plain = kind(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
        conv.bias is not None,
        device=conv.weight.device,
        dtype=conv.weight.dtype,
    ).requires_grad_(conv.weight.requires_grad)
    # (W − mean)/√(variance + ε) of each output channel, times its gain, as timm computes it
    gain = (conv.gain * conv.scale).view(-1) if hasattr(conv, 'gain') else None
    flat = conv.weight.reshape(1, conv.out_channels, -1)
    weight = F.batch_norm(flat, None, None, weight=gain, training=True, momentum=0.0, eps=conv.eps)
    plain.weight.copy_(weight.view_as(conv.weight))
    if plain.bias is not None:
        plain.bias.copy_(conv.bias)
    return plain.train(conv.training)
