"""The patches that a convolution on the image connects (Li et al. 2021 (L21), Theorem 1)."""

import itertools
from dataclasses import dataclass
from typing import List, Tuple

from torch import nn

from ..attention.window import Window


@dataclass(frozen=True)
class PatchWindow:
    """The shifts between the patches that a convolution on the image connects.

    Attributes:
        first (tuple[int, int]): The first shift δ from a patch to one that it reads, (row, column).
        size (tuple[int, int]): Number of such shifts, along rows and along columns.
    """

    first: Tuple[int, int]
    size: Tuple[int, int]

    @classmethod
    def of(cls, conv: nn.Conv2d, patch_size: Tuple[int, int]) -> 'PatchWindow':
        """Returns the shifts of the patches that ``conv`` connects.

        Raises:
            TypeError: ``conv`` is not an ``nn.Conv2d``.
            ValueError: Its output is not one patch for each patch (L21, A.2, Remark), or its padding is not of zeros.
        """
        if not isinstance(conv, nn.Conv2d):
            raise TypeError(
                f'conv is a {type(conv).__name__}, but only nn.Conv2d can become attention over patches of an image'
            )
        window = Window.of(conv)
        if window.padding_mode != 'zeros' and any(n for pair in window.padding for n in pair):
            raise ValueError(
                f"padding_mode={window.padding_mode!r} of conv: at the image's border attention over patches can only "
                "stand for padding_mode='zeros' (the null key); pad the image yourself and use padding=0"
            )
        first, size = [], []
        for axis, patch in enumerate(patch_size):
            kernel, stride, dilation = window.kernel_size[axis], window.stride[axis], window.dilation[axis]
            before, after = window.padding[axis]
            extent = dilation * (kernel - 1) + 1
            if patch % stride:
                raise ValueError(
                    f'stride={stride} of conv does not divide patch_size={patch}: then an output patch is not a whole '
                    f'number of pixels; choose a patch size that is a multiple of {stride}'
                )
            # n pixels to n/stride: 0 <= before + after − extent + stride < stride
            if not extent - stride <= before + after < extent or before > extent - 1:
                raise ValueError(
                    f'padding of {before} and {after} pixels around a window of {extent} with stride {stride} does '
                    'not give one output patch for each patch: choose the padding so that n pixels become '
                    f'n/{stride} ({(extent - 1) // 2} on both sides of an odd window)'
                )
            # Pixel offsets of a patch's outputs, from its first pixel: −before … patch − stride − before + extent − 1
            first.append(-before // patch)
            size.append((patch - stride - before + extent - 1) // patch - first[-1] + 1)
        return cls((first[0], first[1]), (size[0], size[1]))

    @property
    def shifts(self) -> List[Tuple[int, int]]:
        """Every shift δ in tokens, row by row: one head each."""
        rows, columns = (range(first, first + size) for first, size in zip(self.first, self.size))
        return list(itertools.product(rows, columns))
