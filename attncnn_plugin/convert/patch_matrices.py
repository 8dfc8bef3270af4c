"""The matrices between patches that a convolution is made of, and their factors W^V and W^O (Li et al. 2021, A.2)."""

from typing import List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.precision import Device, widest_float
from ..layers.window import Window
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


def token_to_token(
    conv: nn.Conv2d, patch_size: Tuple[int, int], shift: Tuple[int, int], embedding: Optional[Tensor] = None
) -> Tensor:
    """Returns E M Eᵀ: :func:`patch_to_patch` between tokens E x, where patches are embedded by E ``(D_e, D)``."""
    return _decoded(_encoded(patch_to_patch(conv, patch_size, shift), embedding), embedding)


class Factors(NamedTuple):
    """W^V and W^O of a head, as weights of linear layers.

    Attributes:
        value (Tensor): W^V, ``(D_h, D)``.
        out (Tensor): W^O, ``(D_out, D_h)``.
        squared_error (Tensor | None): ‖M − W^O W^V‖² in the Frobenius norm; None for a head that is wide enough.
    """

    value: Tensor
    out: Tensor
    squared_error: Optional[Tensor]


def factorize(
    conv: nn.Conv2d,
    patch_size: Tuple[int, int],
    shift: Tuple[int, int],
    width: int,
    embedding: Optional[Tensor] = None,
) -> Factors:
    """Factors of the matrix M of a head (:func:`patch_to_patch`).

    W^V picks the pixels that are read, and W^O has their weights: for a head as wide as the token W^V is the identity
    and W^O is M (L21, A.2). Where fewer pixels are written than read, W^V has the weights and W^O puts the outputs in
    their places. A head that is too narrow for both gets the best matrix of its rank (Eckart-Young), W^V with
    orthonormal rows.

    Args:
        conv (nn.Conv2d): The convolution.
        patch_size (tuple[int, int]): Patch size P.
        shift (tuple[int, int]): δ.
        width (int): D_h.
        embedding (Tensor, optional): E from patches to tokens, ``(D_e, D)``; the head then has E M Eᵀ from token to
            token. Defaults to none: tokens are the patches.
    """
    matrix = patch_to_patch(conv, patch_size, shift)
    read, written = read_and_written(conv, patch_size, shift)
    error = None
    if width >= (matrix.shape[1] if embedding is None else len(embedding)):
        out = token_to_token(conv, patch_size, shift, embedding)
        value = torch.eye(out.shape[1], dtype=matrix.dtype, device=matrix.device)
    elif width >= len(read.used):
        # Other pixels, after those that are read, have no weights to begin with, but can learn them.
        pixels = (read.used + read.others)[:width]
        value, out = (
            _decoded(unit_rows(pixels, matrix.shape[1], matrix), embedding),
            _encoded(matrix[:, pixels], embedding),
        )
    elif width >= len(written.used):
        pixels = (written.used + written.others)[:width]
        value, out = _decoded(matrix[pixels], embedding), _encoded(unit_rows(pixels, len(matrix), matrix).T, embedding)
    else:
        whole = token_to_token(conv, patch_size, shift, embedding)
        left, singular, right = torch.linalg.svd(whole.to(widest_float(matrix)), full_matrices=False)
        value, out = right[:width].to(matrix.dtype), (left[:, :width] * singular[:width]).to(matrix.dtype)
        error = singular[width:].square().sum()
    missing = width - len(value)  # a head can be wider than the patch or the token
    return Factors(F.pad(value, (0, 0, 0, missing)), F.pad(out, (0, missing)), error)


def _encoded(columns: Tensor, embedding: Optional[Tensor]) -> Tensor:
    return columns if embedding is None else embedding @ columns


def _decoded(rows: Tensor, embedding: Optional[Tensor]) -> Tensor:
    return rows if embedding is None else rows @ embedding.T


def unit_rows(entries: List[int], dim: int, like: Tensor) -> Tensor:
    """Rows of the identity, ``(n, dim)``, of the dtype and on the device of another tensor."""
    return F.one_hot(torch.tensor(entries, dtype=torch.long), dim).to(like)
