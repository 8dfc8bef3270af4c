"""Means over images, a few images at a time, so that the attention maps of all of them need not fit into memory."""

import math
from typing import Any, Dict, Hashable, List, Tuple

from torch import Tensor

from ..attention import AttentionLayer

CHUNK_ELEMENTS = 2**24  # scores that a layer computes at once, 64 MiB of float32


class ImageMeans:
    """Means over images of tensors that come a few images at a time.

    Examples:
        >>> import torch
        >>> means = ImageMeans()
        >>> for batch in torch.arange(6.0).reshape(3, 2).split(2):
        ...     means.add('pixels', batch)
        >>> means.items()
        [('pixels', (tensor([2., 3.]),))]
    """

    def __init__(self) -> None:
        self._sums: Dict[Hashable, Tuple[Tensor, ...]] = {}
        self._counts: Dict[Hashable, int] = {}

    def add(self, key: Hashable, *values: Tensor) -> None:
        """Adds some images.

        Args:
            key (Hashable): Names the values.
            values (Tensor): Tensors ``(B, …)``, of the same shapes but for B at every call with this key.
        """
        sums = tuple(value.sum(0) for value in values)
        if key in self._sums:
            sums = tuple(a + b for a, b in zip(self._sums[key], sums))
        self._sums[key] = sums
        self._counts[key] = self._counts.get(key, 0) + len(values[0])

    def items(self) -> List[Tuple[Any, Tuple[Tensor, ...]]]:
        """The means of the values by key, in the order of the first images."""
        return [(key, tuple(value / self._counts[key] for value in sums)) for key, sums in self._sums.items()]


def few_images(layer: AttentionLayer, x: Tensor) -> Tuple[Tensor, ...]:
    """Inputs of a layer in parts of a few images, whose scores take 64 MiB at most, or of one image.

    Args:
        layer (AttentionLayer): The layer.
        x (Tensor): Inputs of the layer, for instance tokens ``(B, H, W, D)``.

    Returns:
        tuple[Tensor, ...]: Parts of ``x``, in order.
    """
    keys = math.prod(layer.grid_of(x))
    return x.split(max(1, CHUNK_ELEMENTS // (max(layer.num_heads, 1) * keys**2)))
