"""A convolution on the image as attention over patches (Li et al. 2021 (L21), Theorems 1, 5 and 6, appendix A.2)."""

import itertools
from typing import Optional, Tuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.patches import PatchAttention
from ..attention.window import Sizes, check_choice, per_axis


def patch_shifts(kernel_size: Sizes, patch_size: Sizes) -> Tuple[Tuple[int, ...], ...]:
    """Returns the shifts δ from a patch to those that a convolution on the image reads, row by row: one head each.

    Its stride is 1, and its padding ``'same'``.
    """
    axes = []
    for kernel, patch in zip(per_axis('kernel_size', kernel_size, 2), per_axis('patch_size', patch_size, 2)):
        before, after = (kernel - 1) // 2, kernel // 2  # pixels of the window around an output
        axes.append(range(-before // patch, (patch - 1 + after) // patch + 1))
    return tuple(itertools.product(*axes))


def kernel_positions(kernel_size: Tuple[int, ...], patch_size: int, shift: Tuple[int, ...]) -> Tensor:
    """Returns the kernel position between output t of patch q and pixel s of patch q + δ, ``(t, s)``; −1 for none."""
    pixels, axes = torch.arange(patch_size, device='cpu'), []  # counted there, even for a model without memory
    for kernel, patches in zip(kernel_size, shift):
        entry = patches * patch_size + pixels - pixels[:, None] + (kernel - 1) // 2  # of s in the window of t: (t, s)
        axes.append(entry.masked_fill(entry >= kernel, -1))
    rows, columns = axes[0][:, None, :, None], axes[1][None, :, None, :]  # (t1, t2, s1, s2)
    positions = rows * kernel_size[1] + columns
    return positions.masked_fill((rows < 0) | (columns < 0), -1).flatten(2).flatten(0, 1)


def choose_head_dims(
    conv: nn.Conv2d, patch_size: int, head_dim: Optional[str] = None, min_head_dim: int = 1
) -> Tuple[int, ...]:
    """Returns the channels D_h of each head by the arguments of :class:`~attncnn_plugin.models.CMHSANetwork`.

    From a patch that is one step away a convolution reads only border pixels. An exact head has as many channels as it
    reads pixels, times their channels.

    Raises:
        ValueError: A wrong ``head_dim`` or ``min_head_dim``.

    Examples:
        >>> widths = choose_head_dims(nn.Conv2d(3, 3, 3, padding=1), 16, 'exact')
        >>> widths, sum(widths)
        ((3, 48, 3, 48, 768, 48, 3, 48, 3), 972)
    """
    check_choice('head_dim', head_dim, (None, 'exact'))
    if min_head_dim < 1 or (min_head_dim > 1 and head_dim is None):
        raise ValueError(f"min_head_dim={min_head_dim} must be at least 1, and is only for head_dim='exact'")
    dim, widths = conv.in_channels * patch_size**2, []
    for shift in patch_shifts(conv.kernel_size, patch_size):
        read = int((kernel_positions(conv.kernel_size, patch_size, shift) >= 0).any(0).sum()) * conv.in_channels
        widths.append(dim if head_dim is None else min(dim, max(read, min_head_dim)))
    return tuple(widths)


def min_heads(kernel_size: Sizes, patch_size: Sizes = 1) -> int:
    """Returns how many heads are enough for every convolution with stride 1 and ``padding='same'``.

    It is the number of shifts between patches that the kernel covers: (2⌈(K − 1)/2P⌉ + 1)² for an odd K (L21,
    Theorem 1), thus K² for pixels, P = 1, and 9 if P ≥ K > 1 (Theorem 6); for an even K, which L21 does not treat, as
    many or fewer. A generic convolution cannot have fewer if it has channels enough (Theorem 5 has the condition
    N_h < min{K², d}): for pixels C_in·C_out/groups ≥ K². ``Conv2d(1, 1, 3)`` is two heads, not nine.

    Args:
        kernel_size (int | tuple[int, int]): Size K of the kernel.
        patch_size (int | tuple[int, int]): Size P of the patch that makes a token. Defaults to 1, tokens of one pixel.

    Raises:
        ValueError: A size that is not a positive integer, or not one for each axis.

    Examples:
        >>> min_heads(kernel_size=3), min_heads(kernel_size=5, patch_size=16), min_heads((1, 7), patch_size=(1, 2))
        (9, 9, 5)
    """
    return len(patch_shifts(kernel_size, patch_size))


@torch.no_grad()
def attend_like_convolution(attention: PatchAttention, conv: nn.Conv2d, patch_size: int, attn_bias: float) -> None:
    """Sets the parameters of an attention over patches to those of L21's Theorem 1, with M as ``attn_bias``.

    Head r has the position bias M at its shift δ_r and 0 elsewhere. W^V picks the pixels that the convolution reads in
    the patch there, and W^O has their weights; a head that is wider than needed picks other pixels too. W^Q becomes
    zero and W^K stays as it is: were both zero, neither would ever get a gradient. Shifts that lead out of the grid of
    the position bias from every patch get no weight.

    Args:
        attention (PatchAttention): The attention, with heads as of :func:`choose_head_dims` and a bias of the output.
        conv (nn.Conv2d): The convolution, with stride 1, padding ``'same'`` and a bias.
        patch_size (int): The side P of a patch.
        attn_bias (float): M. With 40 only rounding differs: e^−40 is 4e-18.
    """
    table, out, bias = attention.position.table, attention.out, cast(Tensor, conv.bias)
    for weight in (attention.query.weight, out.weight, table):
        nn.init.zeros_(weight)
    kernel = F.pad(conv.weight.flatten(2).permute(2, 0, 1), (0, 0, 0, 0, 0, 1))  # (K + 1, C_out, C_in); −1 is 0
    shifts, ends = patch_shifts(conv.kernel_size, patch_size), itertools.accumulate(attention.head_dims)
    for head, (shift, width, end) in enumerate(zip(shifts, attention.head_dims, ends)):
        entry = [n + size // 2 for n, size in zip(shift, table.shape[1:])]
        # A shift that the table does not have leads to padding from every patch.
        if all(0 <= n < size for n, size in zip(entry, table.shape[1:])):
            table[head, entry[0], entry[1]] = attn_bias
            positions = kernel_positions(conv.kernel_size, patch_size, shift)
            read = (positions >= 0).any(0).repeat(conv.in_channels)
            # Those that are read, then others, in order.
            pixels = read.int().argsort(descending=True, stable=True)[:width].sort().values
            matrix = kernel[positions].permute(2, 0, 3, 1).flatten(2).flatten(0, 1)  # M of A.2, (D_out, D)
            out.weight[:, end - width : end] = matrix[:, pixels]
        else:  # without output weights to begin with; other entries for every head, so that they learn other things
            pixels = (head * width + torch.arange(width, device='cpu')) % attention.dim
        attention.value.weight[end - width : end] = F.one_hot(pixels, attention.dim).to(table)
    out.bias.copy_(bias.repeat_interleave(patch_size**2))
