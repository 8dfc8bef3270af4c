"""The matrices between patches that a convolution is made of, and their factors W^V and W^O (Li et al. 2021, A.2)."""

from typing import List, NamedTuple, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.precision import Device
from ..attention.window import Window
from .kernels import kernel_matrix


class AxisTaps(NamedTuple):
    """What a convolution reads along one axis of patch q + δ for the outputs of patch q.

    Attributes:
        entry (Tensor): The entry of the kernel between an output t and a pixel s, ``(t, s)``.
        seen (Tensor): Whether there is one, ``(t, s)``.
    """

    entry: Tensor
    seen: Tensor


def axis_taps(
    conv: nn.Conv2d, patch_size: Tuple[int, int], shift: Tuple[int, int], device: Device = None
) -> List[AxisTaps]:
    """Returns :class:`AxisTaps` of the rows and of the columns for a shift δ between patches."""
    window, taps = Window.of(conv), []
    for axis, patch in enumerate(patch_size):
        stride, dilation, before = window.stride[axis], window.dilation[axis], window.padding[axis][0]
        source = shift[axis] * patch + torch.arange(patch, device=device)  # s, from the first pixel of patch q
        target = stride * torch.arange(patch // stride, device=device)  # t
        offset = source[None, :] - target[:, None] + before  # of the pixel in the window of the output: (t, s)
        entry = torch.div(offset, dilation, rounding_mode='floor')
        seen = (offset % dilation == 0) & (entry >= 0) & (entry < window.kernel_size[axis])
        taps.append(AxisTaps(entry.clamp(0, window.kernel_size[axis] - 1), seen))
    return taps


def patch_to_patch(conv: nn.Conv2d, patch_size: Tuple[int, int], shift: Tuple[int, int]) -> Tensor:
    """Returns the weights from the pixels of patch q + δ to the outputs of patch q (L21, A.2), ``(D_out, D)``."""
    kernel = kernel_matrix(conv).unflatten(0, conv.kernel_size)  # (K1, K2, C_out, C_in)
    rows, columns = axis_taps(conv, patch_size, shift, kernel.device)
    weight = kernel[rows.entry[:, None, :, None], columns.entry[None, :, None, :]]  # (t1, t2, s1, s2, C_out, C_in)
    weight = weight * (rows.seen[:, None, :, None] & columns.seen[None, :, None, :])[..., None, None]
    return weight.permute(4, 0, 1, 5, 2, 3).flatten(0, 2).flatten(1)


class Entries(NamedTuple):
    """Entries of a patch.

    Attributes:
        used (list[int]): Those that a convolution reads or writes.
        others (list[int]): All others.
    """

    used: List[int]
    others: List[int]


def read_and_written(conv: nn.Conv2d, patch_size: Tuple[int, int], shift: Tuple[int, int]) -> Tuple[Entries, Entries]:
    """Returns the entries of patch q + δ that a convolution reads for patch q, and those of patch q of its output."""
    rows, columns = axis_taps(conv, patch_size, shift, 'cpu')  # they are counted, even for a model without memory
    entries = []
    for outputs_or_pixels, channels in ((0, conv.in_channels), (1, conv.out_channels)):
        used = rows.seen.any(outputs_or_pixels)[:, None] & columns.seen.any(outputs_or_pixels)
        used = used.flatten().repeat(channels)  # (C, rows, columns)
        entries.append(Entries(used.nonzero().flatten().tolist(), (~used).nonzero().flatten().tolist()))
    return entries[0], entries[1]


def exact_head_dim(conv: nn.Conv2d, patch_size: Tuple[int, int], shift: Tuple[int, int]) -> int:
    """Returns a width D_h that is enough for a head to be the convolution between two patches, whatever its weights.

    It is the number of entries of patch q + δ that the convolution reads, or of entries of patch q that it writes if
    these are fewer. From a patch that is one step away it reads border pixels alone: of 3 channels and patches of 16
    pixels the nine heads of a 3×3 kernel are 3, 48, 3, 48, 768, 48, 3, 48, 3 channels wide. A patch that dilation steps
    over takes a head of one channel.
    """
    return max(1, min(len(entries.used) for entries in read_and_written(conv, patch_size, shift)))


class Factors(NamedTuple):
    """W^V and W^O of a head, as weights of linear layers.

    Attributes:
        value (Tensor): W^V, ``(D_h, D)``.
        out (Tensor): W^O, ``(D_out, D_h)``.
    """

    value: Tensor
    out: Tensor


def factorize(conv: nn.Conv2d, patch_size: Tuple[int, int], shift: Tuple[int, int], width: int) -> Factors:
    """Factors the matrix M of a head (:func:`patch_to_patch`).

    W^V picks the pixels that are read, and W^O has their weights: for a head as wide as the token W^V is the identity
    and W^O is M (L21, A.2). Where fewer pixels are written than read, W^V has the weights and W^O puts the outputs in
    their places.

    Args:
        conv (nn.Conv2d): The convolution.
        patch_size (tuple[int, int]): Patch size P.
        shift (tuple[int, int]): δ.
        width (int): D_h.

    Raises:
        ValueError: The head is too narrow for both.
    """
    matrix = patch_to_patch(conv, patch_size, shift)
    read, written = read_and_written(conv, patch_size, shift)
    if width >= len(read.used):
        # Other pixels, after those that are read, have no weights to begin with, but can learn them.
        pixels = (read.used + read.others)[:width] if width < matrix.shape[1] else list(range(matrix.shape[1]))
        value, out = unit_rows(pixels, matrix.shape[1], matrix), matrix[:, pixels]
    elif width >= len(written.used):
        pixels = (written.used + written.others)[:width]
        value, out = matrix[pixels], unit_rows(pixels, len(matrix), matrix).T
    else:
        raise ValueError(f'a head of {width} channels is too narrow for the patch at {shift}: exact_head_dims says')
    missing = width - len(value)  # a head can be wider than the patch
    return Factors(F.pad(value, (0, 0, 0, missing)), F.pad(out, (0, missing)))


def unit_rows(entries: List[int], dim: int, like: Tensor) -> Tensor:
    """Rows of the identity, ``(n, dim)``, of the dtype and on the device of another tensor."""
    return F.one_hot(torch.tensor(entries, dtype=torch.long), dim).to(like)
