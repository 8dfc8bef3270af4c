"""A convolution as attention over pixels (C20, Theorem 1)."""
from typing import Optional

import torch
from torch import nn

from ..layers.image_attention import ImageAttention, QuadraticImageAttention
from ..layers.window import Window

# α = 800: e^−800 is 0 in float64 and float32 alike, so that a head sees one pixel and nothing of its neighbours.
HARD_SQRT_PRECISION = 40.


@torch.no_grad()
def conv_to_mhsa(conv: nn.Module, num_heads: Optional[int] = None) -> ImageAttention:
    """Turns a convolution into multi-head self-attention with its inputs, its outputs and its values.

    With one head for each kernel position the attention is the convolution, exactly (C20, Theorem 1): head h is a
    hard quadratic head with its centre at the h-th shift, and its slice of the value matrix is the kernel's h-th slice.
    The image is padded first, as the convolution does it.

    Args:
        conv (nn.Module): ``nn.Conv1d``, ``nn.Conv2d`` or ``nn.Conv3d`` with any options. Its device, dtype and mode are
            those of the result; float16 and bfloat16 layers compute their scores in float32.
        num_heads (int, optional): Number of heads. Defaults to one for each kernel position.

    Returns:
        ImageAttention: The attention.

    Raises:
        TypeError: ``conv`` is not one of the three, has no weights yet, or not real ones.
        ValueError: ``num_heads`` is not from 1 to the number of kernel positions.
    """
    window = Window.of(conv)
    shifts = window.shifts()
    kernel = kernel_matrix(conv)  # (K, C_out, C_in)
    dd = {'device': conv.weight.device, 'dtype': conv.weight.dtype}
    attention = QuadraticImageAttention(
        conv.in_channels, conv.out_channels, len(shifts), window, bias=conv.bias is not None, **dd)
    attention.encoding.center.copy_(shifts)  # Δ of head h: f(h) of the theorem
    attention.encoding.sqrt_precision.fill_(HARD_SQRT_PRECISION)
    attention.value.weight.copy_(kernel.transpose(0, 1).flatten(1))  # W^(h): the kernel's slice at f(h)
    if conv.bias is not None:
        attention.value.bias.copy_(conv.bias)
    return attention.train(conv.training)


def kernel_matrix(conv: nn.Module) -> torch.Tensor:
    """The kernel of a convolution, groups as blocks, ``(K, C_out, C_in)`` for its K positions."""
    weight = conv.weight.detach().flatten(2)  # (C_out, C_in/groups, K)
    out_channels, per_group, positions = weight.shape
    dense = weight.new_zeros(conv.groups, out_channels // conv.groups, conv.groups, per_group, positions)
    group = torch.arange(conv.groups, device=weight.device)
    dense[group, :, group] = weight.unflatten(0, (conv.groups, -1))
    return dense.reshape(out_channels, conv.in_channels, positions).permute(2, 0, 1)
