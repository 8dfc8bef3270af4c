"""How much memory the probabilities of attention in the place of a convolution take."""

import math

import torch
from torch import Tensor

from ..layers.content_image_attention import ContentImageAttention
from ..layers.image_attention import DENSE_PAIRS, ImageAttention, WindowImageAttention
from ..layers.neighbourhoods import AxisTiles


def attention_memory(layer: ImageAttention, x: Tensor) -> int:
    """Bytes of the probabilities of a layer for an input.

    Heads that see positions alone have the same probabilities for all images: tables have one for each pixel of the
    window, Gaussian heads (queries × pixels), or on large grids as many along each axis. With content each image has
    its own, (queries × pixels), of which a neighbourhood leaves a part that does not grow with the image.

    Args:
        layer (ImageAttention): The layer.
        x (Tensor): Its input, ``(B, C, *size)`` or ``(C, *size)``; only its shape and its dtype matter.
    """
    window = layer.window
    size = x.shape[-window.ndim :]
    queries = [window.num_queries(axis, n) for axis, n in enumerate(size)]
    padded = [n + sum(window.padding_of(axis, n)) for axis, n in enumerate(size)]
    keys = list(size) if window.padding_mode == 'zeros' else padded  # zeros have no value
    if isinstance(layer, WindowImageAttention):
        number = math.prod(window.kernel_size)
    elif not isinstance(layer, ContentImageAttention):
        number = math.prod(queries) * math.prod(keys)
        if number > DENSE_PAIRS:
            number = sum(q * k for q, k in zip(queries, keys))
    else:
        number = math.prod(queries) * math.prod(keys)
        if layer.window_size is not None:
            sizes = zip(padded, queries, window.stride, window.anchor, layer.window_size)
            number = math.prod(tiles.number * tiles.length * tiles.keys for tiles in (AxisTiles(*own) for own in sizes))
        number *= math.prod(x.shape[: -window.ndim - 1])
    return layer.num_heads * number * torch.promote_types(x.dtype, torch.float32).itemsize
