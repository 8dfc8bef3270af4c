"""Neighbourhoods of queries in an image, in tiles of queries that share their keys.

A neighbourhood has w keys along an axis, at shifts −(w − 1)/2 … (w − 1)/2 from its query. A tile is t queries in a row
along each axis, and the (t − 1)·stride + w pixels that their neighbourhoods cover: time and memory grow linearly with
the number of queries.
"""

from typing import Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .precision import Device


class AxisTiles:
    """The tiles along one axis of a padded image.

    Args:
        pixels (int): Pixels of the padded image.
        queries (int): Number of queries; query o is at pixel o·stride + first.
        stride (int): Pixels from a query to the next.
        first (int): Pixel of the first query.
        window_size (int): Keys w of a neighbourhood, an odd number.

    Attributes:
        length (int): Queries t of a tile: as many pixels as a neighbourhood.
        number (int): Number of tiles; the last one can be longer than the image.
        keys (int): Keys of a tile.
        step (int): Pixels from a tile to the next.
        start (int): First key of the first tile, a pixel of the padded image or one before it.
        margins (tuple[int, int]): Pixels to add before and after the padded image, so that all tiles lie in it; fewer
            than 0 are cut off.
    """

    def __init__(self, pixels: int, queries: int, stride: int, first: int, window_size: int) -> None:
        self.pixels, self.queries, self.stride, self.window_size = pixels, queries, stride, window_size
        self.length = min(queries, max(1, window_size // stride))
        self.number = -(-queries // self.length)
        self.keys = (self.length - 1) * stride + window_size
        self.step = self.length * stride
        self.start = first - window_size // 2
        self.margins = -self.start, self.start + (self.number - 1) * self.step + self.keys - pixels

    @property
    def scores(self) -> int:
        """Number of scores: of all queries, and those that fill up the last tile, with the keys of their tiles."""
        return self.number * self.length * self.keys

    def shifts(self, device: Device = None) -> Tensor:
        """δ from each query of a tile to each of its keys, ``(t, keys)``."""
        query = torch.arange(self.length, device=device) * self.stride
        return torch.arange(self.keys, device=device) - self.window_size // 2 - query[:, None]

    def seen(self, device: Device = None) -> Tensor:
        """Returns whether a key is a pixel of the padded image and in the neighbourhood, ``(tiles, t, keys)``."""
        near = self.shifts(device).abs() <= self.window_size // 2
        tile = torch.arange(self.number, device=device) * self.step
        place = self.start + tile[:, None] + torch.arange(self.keys, device=device)
        return near & ((place >= 0) & (place < self.pixels))[:, None]


def tile_keys(x: Tensor, axes: Sequence[AxisTiles]) -> Tensor:
    """Cuts a padded image, ``(B, C, *padded)``, into the keys of tiles, ``(B, tiles, keys, C)``, 0 beyond it."""
    return _cut(x, [(*tiles.margins, tiles.keys, tiles.step) for tiles in axes])


def tile_queries(x: Tensor, axes: Sequence[AxisTiles]) -> Tensor:
    """Cuts queries, ``(B, C, *queries)``, into tiles, ``(B, tiles, t, C)``; zeros fill up the last one."""
    return _cut(x, [(0, tiles.number * tiles.length - tiles.queries, tiles.length, tiles.length) for tiles in axes])


def _cut(x: Tensor, parts: Sequence[Tuple[int, int, int, int]]) -> Tensor:
    """Cuts ``(B, C, *size)``, given the zeros before and after, the entries and the step of parts, for each axis."""
    ndim = len(parts)
    x = F.pad(x, [n for before, after, *_ in reversed(parts) for n in (before, after)])
    for axis, (*_, entries, step) in enumerate(parts, start=2):
        x = x.unfold(axis, entries, step)  # parts stay in the axis, their entries come last
    return x.permute(0, *range(2, 2 + 2 * ndim), 1).flatten(1 + ndim, 2 * ndim).flatten(1, ndim)


def join_tiles(x: Tensor, axes: Sequence[AxisTiles]) -> Tensor:
    """Inverts :func:`tile_queries`, ``(B, tiles, t, C)`` to ``(B, C, *queries)``."""
    ndim = len(axes)
    x = x.unflatten(2, [tiles.length for tiles in axes]).unflatten(1, [tiles.number for tiles in axes])
    x = x.permute(0, -1, *(1 + axis + part for axis in range(ndim) for part in (0, ndim)))
    for axis, tiles in enumerate(axes, start=2):
        x = x.flatten(axis, axis + 1).narrow(axis, 0, tiles.queries)
    return x
