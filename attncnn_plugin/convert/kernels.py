"""The kernel of a convolution as matrices, with and without the zeros between its groups, and the heads it needs."""

import math
from typing import Sequence, Union

import torch
from torch import Tensor, nn

from ..attention.window import per_axis

Convolution = Union[nn.Conv1d, nn.Conv2d, nn.Conv3d]


def flat_kernel(conv: Convolution) -> Tensor:
    """Returns the kernel as a matrix M, ``(K, C_out·C_in/groups)``, a row for each position: no zeros between groups.

    Examples:
        >>> flat_kernel(nn.Conv2d(4, 2, 3, groups=2)).shape
        torch.Size([9, 4])
    """
    return conv.weight.detach().flatten(2).flatten(0, 1).T


def kernel_matrix(conv: Convolution) -> Tensor:
    """Returns the matrix of each kernel position, ``(K, C_out, C_in)``: groups as blocks, with zeros between them.

    Examples:
        >>> kernel_matrix(nn.Conv2d(4, 2, 3, groups=2)).shape
        torch.Size([9, 2, 4])
    """
    return block_diagonal(conv.weight.detach().flatten(2), conv.groups)


def spectral_norms(conv: Convolution) -> Tensor:
    """Returns ‖W_δ‖₂ of each kernel position, ``(K,)``, float64.

    Examples:
        >>> conv = nn.Conv2d(2, 2, 1, groups=2)
        >>> torch.allclose(spectral_norms(conv), conv.weight.abs().max().double())
        True
    """
    return block_norms(conv.weight.detach().double().flatten(2), conv.groups)


def block_norms(slices: Tensor, groups: int) -> Tensor:
    """Returns the spectral norm of each of N slices, ``(C_out, C_in/groups, N)``: the largest of its groups.

    ‖W‖₂² is the largest eigenvalue of WWᵀ and of WᵀW, which take less time than the singular values of W.
    """
    scale = slices.abs().amax().clamp(min=torch.finfo(slices.dtype).tiny)  # squares neither overflow nor vanish
    blocks = (slices / scale).unflatten(0, (groups, -1)).movedim(-1, 0)  # (N, group, out, in)
    if blocks.shape[-2] > blocks.shape[-1]:
        blocks = blocks.mT
    return scale * torch.linalg.eigvalsh(blocks @ blocks.mT)[..., -1].clamp(min=0).sqrt().amax(1)


def group_blocks(matrices: Tensor, groups: int) -> Tensor:
    """Returns the blocks of a convolution's groups, without zeros between them: the inverse of :func:`block_diagonal`.

    Args:
        matrices (Tensor): ``(N, C_out, C_in)``.
        groups (int): Number of groups.

    Returns:
        Tensor: ``(C_out, C_in/groups, N)``.

    Examples:
        >>> group_blocks(torch.eye(2)[None], groups=2).flatten()
        tensor([1., 1.])
    """
    blocks = matrices.unflatten(1, (groups, -1)).unflatten(3, (groups, -1))  # (N, group, out, group, in)
    return blocks.diagonal(dim1=1, dim2=3).permute(3, 1, 2, 0).flatten(0, 1)


def block_diagonal(slices: Tensor, groups: int) -> Tensor:
    """Slices of a kernel with groups, ``(C_out, C_in/groups, N)``, as slices of one without, ``(N, C_out, C_in)``.

    Examples:
        >>> block_diagonal(torch.ones(2, 1, 1), groups=2)
        tensor([[[1., 0.],
                 [0., 1.]]])
    """
    out_channels, per_group, number = slices.shape
    dense = slices.new_zeros(groups, out_channels // groups, groups, per_group, number)
    group = torch.arange(groups, device=slices.device)
    dense[group, :, group] = slices.unflatten(0, (groups, -1))
    return dense.reshape(out_channels, groups * per_group, number).permute(2, 0, 1)


def min_heads(kernel_size: Union[int, Sequence[int]], patch_size: Union[int, Sequence[int]] = 1) -> int:
    """Returns how many heads a generic convolution with stride 1 and ``padding='same'`` needs; they are enough.

    It is the number of shifts between tokens that the kernel covers. From a pixel the kernel reaches ⌊(K − 1)/2⌋ pixels
    before and the others after. The pixels of a patch together reach ⌈before/P⌉ patches before, ⌈after/P⌉ after and
    their own. Pixels, P = 1, take one head for each kernel position (L21, Theorem 5). For an odd K an axis has
    2⌈(K − 1)/2P⌉ + 1 shifts (L21, Theorem 1). That is 3 if P ≥ K > 1, thus 9 heads (Theorem 6). For an even K, which
    L21 does not treat, it is the same number or one less.

    One head for each shift is enough, with nothing attended to outside the image. N_h heads give a sum of N_h terms,
    attention map times matrix. So fewer heads are enough only where the matrices that the shifts have from token to
    token are linearly dependent. Those of a random kernel are independent if it has at least as many pairs of channels
    as shifts.

    Args:
        kernel_size (int | Sequence[int]): Size K of the kernel, along each of one to three axes; an integer is a square
            kernel, with two axes.
        patch_size (int | Sequence[int]): Size P of the patch that makes a token, an integer or one for each axis.
            Defaults to 1, tokens that are pixels.

    Returns:
        int: The number of heads.

    Raises:
        ValueError: A size that is not a positive integer, or not one for each axis.

    Examples:
        >>> min_heads(kernel_size=3), min_heads(kernel_size=5, patch_size=16), min_heads((1, 7), patch_size=(1, 2))
        (9, 9, 5)
    """
    ndim = len(kernel_size) if isinstance(kernel_size, (tuple, list)) else 2
    if not 1 <= ndim <= 3:
        raise ValueError(f'kernel_size={kernel_size!r} must be an integer, or one for each of one to three axes')
    heads = 1
    for kernel, patch in zip(per_axis('kernel_size', kernel_size, ndim), per_axis('patch_size', patch_size, ndim)):
        before = (kernel - 1) // 2
        after = kernel - 1 - before
        heads *= math.ceil(before / patch) + math.ceil(after / patch) + 1
    return heads
