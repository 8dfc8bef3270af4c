"""How much memory the probabilities of attention in the place of a convolution take."""

import math

import torch
from torch import Tensor

from ..layers.content_image_attention import ContentImageAttention
from ..layers.image_attention import ImageAttention, WindowImageAttention
from ..layers.neighbourhoods import AxisTiles


def attention_memory(layer: ImageAttention, x: Tensor) -> int:
    """Bytes of the probabilities of a layer for an input.

    Heads that see positions alone have the same probabilities for all images: Gaussian ones a factor for each axis,
    (queries × pixels), others a window. With content each image has its own, (queries × pixels), of which a
    neighbourhood leaves a part that does not grow with the image.

    Args:
        layer (ImageAttention): The layer.
        x (Tensor): Its input, ``(B, C, *size)`` or ``(C, *size)``; only its shape and its dtype matter.
    """
    window = layer.window
    size = x.shape[-window.ndim :]
    queries = [window.num_queries(axis, n) for axis, n in enumerate(size)]
    keys = [n + sum(window.padding_of(axis, n)) for axis, n in enumerate(size)]
    if isinstance(layer, ContentImageAttention):
        images = math.prod(x.shape[: -window.ndim - 1])
        if layer.window_size is not None:
            tiles = [AxisTiles(*sizes) for sizes in zip(keys, queries, window.stride, window.anchor, layer.window_size)]
            number = images * math.prod(axis.number * axis.length * axis.keys for axis in tiles)
        else:
            number = images * math.prod(queries) * math.prod(keys)
    elif isinstance(layer, WindowImageAttention):
        number = math.prod(window.kernel_size)
    else:
        number = sum(q * k for q, k in zip(queries, keys))
    return layer.num_heads * number * torch.promote_types(x.dtype, torch.float32).itemsize
