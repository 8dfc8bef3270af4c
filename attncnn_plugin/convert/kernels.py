"""The kernel of a convolution as matrices, with and without the zeros between its groups."""

from typing import Union

import torch
from torch import Tensor, nn

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
