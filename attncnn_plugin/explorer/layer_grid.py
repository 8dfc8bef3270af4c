"""Where the queries and the keys of a layer are: on one grid, or around the pixels of an image that is padded."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Dict, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from ..layers import AttentionLayer


@dataclass(frozen=True, eq=False)
class LayerGrid:
    """The grid of a layer. Attention over tokens has each of them as a query and as a key.

    In the place of a convolution the queries are the pixels that the stride keeps, and the keys those of the padded
    image, of a neighbourhood or of all of it.

    Attributes:
        size (tuple[int, int]): Height H and width W in tokens or pixels.
        start (tuple[int, int]): Row and column of the first key, 0 or less: padding is outside of the grid.
        queries (tuple[Tensor, Tensor]): The rows and the columns of the queries.
        source (Tensor): The number of the pixel that each key is or repeats, row-major, H·W for a zero, ``(P1, P2)``.
        reach (tuple[int, int]): The largest shift to a key that a query sees, along rows and along columns.
    """

    size: Tuple[int, int]
    start: Tuple[int, int]
    queries: Tuple[Tensor, Tensor]
    source: Tensor
    reach: Tuple[int, int]

    @classmethod
    def of(cls, layer: AttentionLayer, size: Sequence[int]) -> 'LayerGrid':
        """The grid of a layer for tokens or an image of ``size``."""
        window, (height, width) = layer.window, size
        if window is None:
            return cls.of_tokens(size)
        number = torch.arange(1, height * width + 1, dtype=torch.float64)
        padded = window.pad(number.reshape(1, 1, height, width))[0, 0].long()
        source = torch.where(padded == 0, height * width, padded - 1)
        (above, _), (left, _) = (window.padding_of(axis, n) for axis, n in enumerate(size))
        rows, columns = (window.queries(axis, n) for axis, n in enumerate(size))
        down, right = layer.reach or source.shape
        return cls((height, width), (-above, -left), (rows, columns), source, (down, right))

    @classmethod
    def of_tokens(cls, size: Sequence[int]) -> 'LayerGrid':
        """The grid of attention over tokens."""
        height, width = size
        rows, columns = torch.arange(height), torch.arange(width)
        number = torch.arange(height * width).reshape(height, width)
        return cls((height, width), (0, 0), (rows, columns), number, (height, width))

    def header(self) -> Dict[str, Any]:
        """The grid in the header of :mod:`.stream`."""
        rows, columns = (places.tolist() for places in self.queries)
        source = self.source.numpy().astype(np.int16)
        return {
            'grid': self.size,
            'queries': {'rows': rows, 'columns': columns},
            'keys': {'start': self.start, 'reach': self.reach, 'source': source},
        }

    @property
    def has_zeros(self) -> bool:
        """Whether zeros are keys."""
        return int(self.source.max()) == math.prod(self.size)

    @cached_property
    def shifts(self) -> Tuple[Tensor, Tensor]:
        """δ from every query to every key along rows and along columns, ``(Q, P)``."""
        keys = (torch.arange(n) + start for n, start in zip(self.source.shape, self.start))
        query, key = torch.cartesian_prod(*self.queries), torch.cartesian_prod(*keys)
        down, right = (key - query[:, None]).unbind(-1)
        return down, right

    @cached_property
    def hidden(self) -> Tensor:
        """Whether a query does not see a key, ``(Q, P)``."""
        down, right = self.shifts
        return (down.abs() > self.reach[0]) | (right.abs() > self.reach[1])

    @property
    def query_tokens(self) -> Tensor:
        """The number of the pixel that each query is at, as of :attr:`source`, ``(Q,)``."""
        rows, columns = (places - start for places, start in zip(self.queries, self.start))
        return self.source[rows][:, columns].flatten()

    def on_pixels(self, probs: Tensor) -> Tensor:
        """Probabilities of the keys, ``(…, P)``, as those of the pixels, ``(…, H·W)``: what zeros have is lost."""
        sums = probs.new_zeros(*probs.shape[:-1], math.prod(self.size) + 1)
        return sums.scatter_add(-1, self.source.flatten().expand_as(probs), probs)[..., :-1]
