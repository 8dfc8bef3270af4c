"""How much memory the probabilities of attention in the place of a convolution take."""

import math

import torch
from torch import Tensor

from ..layers.image_attention import ImageAttention, WindowImageAttention


def attention_memory(layer: ImageAttention, x: Tensor) -> int:
    """Bytes of the probabilities of a layer for an input.

    Heads that see positions alone have the same probabilities for all images: Gaussian ones a factor for each axis,
    (queries × pixels), others a window.

    Args:
        layer (ImageAttention): The layer.
        x (Tensor): Its input, ``(B, C, *size)`` or ``(C, *size)``; only its shape and its dtype matter.
    """
    ndim = layer.window.ndim
    size = x.shape[-ndim:]
    if isinstance(layer, WindowImageAttention):
        number = math.prod(layer.window.kernel_size)
    else:
        number = sum(
            len(layer.window.queries(axis, n)) * (n + sum(layer.window.padding[axis])) for axis, n in enumerate(size)
        )
    return layer.num_heads * number * torch.promote_types(x.dtype, torch.float32).itemsize
