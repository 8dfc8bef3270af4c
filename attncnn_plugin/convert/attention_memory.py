"""How much memory the probabilities of attention in the place of a convolution take."""

import math

import torch
from torch import Tensor

from ..layers.content_image_attention import ContentImageAttention
from ..layers.image_attention import DENSE_PAIRS, ImageAttention, WindowImageAttention


def attention_memory(layer: ImageAttention, x: Tensor) -> int:
    """Bytes of the probabilities of a layer for an input.

    Heads that see positions alone have the same probabilities for all images: tables have one for each pixel of the
    window, Gaussian heads (queries × pixels), or on large grids as many along each axis. With content each image has
    its own, (queries × pixels), of which neighbourhoods that are smaller than the image leave a part that does not grow
    with it.

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
        axes = layer.tiles(size)
        if axes is None:
            number = math.prod(queries) * math.prod(keys)
        else:
            number = math.prod(tiles.scores for tiles in axes)
        number *= math.prod(x.shape[: -window.ndim - 1])
    return layer.num_heads * number * torch.promote_types(x.dtype, torch.float32).itemsize


def advice_on_memory(layer: ImageAttention) -> str:
    """What makes the probabilities of a layer fewer."""
    if not isinstance(layer, ContentImageAttention):
        return "position='table' has one for each pixel of the window, whatever the image is"
    if layer.window_size is None:
        return 'with window_size it grows linearly with the number of pixels'
    least = 2 * layer.window.shifts().abs().amax(0) + 1
    if any(n > m for n, m in zip(layer.window_size, least.tolist())):
        return 'a smaller window_size needs less'
    return 'fewer or smaller images need less'
