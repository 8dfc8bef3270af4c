"""Convolutions of PyTorch and timm: their windows, and their kernels as matrices, without groups' zeros."""

from typing import Any, Dict, Sequence, Union

import torch
import torch.nn.functional as F
from timm.layers import Conv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d
from timm.layers.std_conv import StdConv2dSame
from torch import Tensor, nn

from ..attention.window import CONVOLUTIONS, SameWindow, Window

Convolution = Union[nn.Conv1d, nn.Conv2d, nn.Conv3d]
STANDARDIZED = (StdConv2d, StdConv2dSame, ScaledStdConv2d, ScaledStdConv2dSame)


def window_of(conv: nn.Module, kinds: Sequence[Any] = (Conv2dSame, *CONVOLUTIONS)) -> Window:
    """Returns the window of a convolution of PyTorch, or of timm's ``Conv2dSame``, whose padding depends on the image.

    Raises:
        TypeError: ``conv`` is something else.
    """
    window = Window.of(conv, kinds)
    if not isinstance(conv, Conv2dSame) and not getattr(conv, 'same_pad', False):
        return window
    return SameWindow(window.kernel_size, window.stride, window.dilation, (), window.padding_mode)


def convolution_with(window: Window, in_channels: int, groups: int, like: Any) -> Convolution:
    """Returns a convolution with a window, and the outputs and kind of parameters of a linear map or a convolution.

    Raises:
        ValueError: No convolution has such a window.
    """
    options: Dict[str, Any] = {
        'dilation': window.dilation,
        'groups': groups,
        'bias': like.bias is not None,
        'device': like.weight.device,
        'dtype': like.weight.dtype,
    }
    arguments = in_channels, len(like.weight), window.kernel_size
    kind: Any = Conv2dSame
    if isinstance(window, SameWindow):
        return kind(*arguments, window.stride, **options)
    kind = CONVOLUTIONS[window.ndim - 1]
    # As numbers where both sides are padded alike, as nn.Conv2d has it; its 'same' puts the odd pixel after.
    alike = all(before == after for before, after in window.padding)
    padding = tuple(before for before, _ in window.padding) if alike else 'same'
    stride = window.stride if alike else 1
    conv = kind(*arguments, stride, padding, padding_mode=window.padding_mode, **options)
    if window_of(conv) != window:
        raise ValueError(
            f'the window of layer is padded by {window.padding} with stride {window.stride}, which no convolution has: '
            "it pads both sides alike, or with stride 1 as padding='same'"
        )
    return conv


@torch.no_grad()
def plain_convolution(conv: Any) -> Any:
    """Returns a convolution with weight standardization as one with the weights that it computes; others as is."""
    if type(conv) not in STANDARDIZED:
        return conv
    plain: Any = convolution_with(window_of(conv, [type(conv)]), conv.in_channels, conv.groups, conv)
    plain.requires_grad_(conv.weight.requires_grad)
    # (W − mean)/√(variance + ε) of each output channel, times its gain, as timm computes it
    gain = (conv.gain * conv.scale).view(-1) if hasattr(conv, 'gain') else None
    flat = conv.weight.reshape(1, conv.out_channels, -1)
    weight = F.batch_norm(flat, None, None, weight=gain, training=True, momentum=0.0, eps=conv.eps)
    plain.weight.copy_(weight.view_as(conv.weight))
    if plain.bias is not None:
        plain.bias.copy_(conv.bias)
    return plain.train(conv.training)


def flat_kernel(conv: Convolution) -> Tensor:
    """Returns the kernel as a matrix M, ``(K, C_out·C_in/groups)``, a row for each position, without groups' zeros."""
    return conv.weight.detach().flatten(2).flatten(0, 1).T


def block_norms(slices: Tensor, groups: int) -> Tensor:
    """Returns the spectral norm of each of N slices, ``(C_out, C_in/groups, N)``: the largest of its groups.

    ‖W‖₂² is the largest eigenvalue of WWᵀ and of WᵀW, which take less time than the singular values of W.
    """
    scale = slices.abs().amax().clamp(min=torch.finfo(slices.dtype).tiny)  # squares neither overflow nor vanish
    blocks = (slices / scale).unflatten(0, (groups, -1)).movedim(-1, 0)  # (N, group, out, in)
    if blocks.shape[-2] > blocks.shape[-1]:
        blocks = blocks.mT
    return scale * torch.linalg.eigvalsh(blocks @ blocks.mT)[..., -1].clamp(min=0).sqrt().amax(1)
