"""A convolution on the image as attention over patches (Li et al. 2021 (L21), Theorems 1, 5 and 6, appendix A.2)."""

import itertools
import math
from dataclasses import dataclass
from typing import Any, List, Optional, Tuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.images import block_diagonal
from ..attention.patches import PatchAttention, WindowBias, image_to_patches, patches_to_image
from ..attention.window import Sizes, Window, per_axis
from ..change import number_of_parameters
from .convolutions import computed, convolution_with

ATTN_BIAS = 40.0  # M: e^−40 is 4e-18, less than the rounding of 1 in float64

Pair = Tuple[int, int]


@dataclass(frozen=True)
class PatchConversionReport:
    """The size of attention over patches that is its convolution (L21, Theorem 1).

    Attributes:
        num_heads (int): Number of heads, one for each shift.
        shifts (tuple[tuple[int, int], ...]): The shift δ from a patch to the one that each head reads, (row, column)
            in patches.
        head_dims (tuple[int, ...]): Channels D_h of each head's values.
        parameters_before (int): Parameters of the convolution.
        parameters_after (int): Parameters of the attention.
    """

    num_heads: int
    shifts: Tuple[Tuple[int, int], ...]
    head_dims: Tuple[int, ...]
    parameters_before: int
    parameters_after: int

    def __str__(self) -> str:
        least, most = min(self.head_dims), max(self.head_dims)
        widths = f'{least}' if least == most else f'{least} to {most}'
        return (
            f'num_heads={self.num_heads} of {widths} channels: exact, a head for each shift from '
            f'{self.shifts[0]} to {self.shifts[-1]}; '
            f'{self.parameters_before:,} parameters became {self.parameters_after:,}'
        )


class PatchConvolutionAttention(nn.Module):
    """Attention over patches with the inputs and outputs of a convolution on the image.

    Args:
        attention (PatchAttention): Attention over the flattened patches.
        patch_size (tuple[int, int]): Height and width of a patch of the image.
        out_patch_size (tuple[int, int]): Height and width of a patch of the output.
    """

    def __init__(self, attention: PatchAttention, patch_size: Pair, out_patch_size: Pair) -> None:
        super().__init__()
        self.attention = attention
        self.patch_size = patch_size
        self.out_patch_size = out_patch_size

    def forward(self, input: Tensor) -> Tensor:  # the name of nn.Conv2d's
        """Maps ``(B, C, H, W)`` or ``(C, H, W)`` to the convolution's output.

        Raises:
            ValueError: The image cannot be cut into patches, or does not have the convolution's channels.
        """
        channels = self.attention.dim // math.prod(self.patch_size)
        if input.ndim not in (3, 4) or input.shape[-3] != channels:
            raise ValueError(
                f'the input has shape {tuple(input.shape)}, but (B, {channels}, H, W) or ({channels}, H, W) is expected'
            )
        if input.ndim == 3:
            return self.forward(input[None])[0]
        return patches_to_image(self.attention(image_to_patches(input, self.patch_size)), self.out_patch_size)


def patch_shifts(conv: nn.Conv2d, patch_size: Pair) -> Tuple[Pair, ...]:
    """Returns the shifts δ from a patch to those that a convolution on the image reads, row by row: one head each.

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
    axes: List[range] = []
    sizes = zip(patch_size, window.kernel_size, window.stride, window.dilation, window.padding)
    for patch, kernel, stride, dilation, (before, after) in sizes:
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
        axes.append(range(-before // patch, (patch - stride - before + extent - 1) // patch + 1))
    rows, columns = axes
    return tuple(itertools.product(rows, columns))


def kernel_positions(conv: nn.Conv2d, patch_size: Pair, shift: Pair) -> Tensor:
    """Returns the kernel position between output t of patch q and pixel s of patch q + δ, ``(t, s)``; −1 for none."""
    window, axes = Window.of(conv), []
    for axis, patch in enumerate(patch_size):
        stride, dilation, before = window.stride[axis], window.dilation[axis], window.padding[axis][0]
        # On the CPU: they are counted, even for a model without memory.
        source = shift[axis] * patch + torch.arange(patch, device='cpu')  # s, from the first pixel of patch q
        target = stride * torch.arange(patch // stride, device='cpu')  # t
        offset = source - target[:, None] + before  # of the pixel in the window of the output: (t, s)
        entry = torch.div(offset, dilation, rounding_mode='floor')
        seen = (offset % dilation == 0) & (entry >= 0) & (entry < window.kernel_size[axis])
        axes.append(entry.masked_fill(~seen, -1))
    rows, columns = axes[0][:, None, :, None], axes[1][None, :, None, :]  # (t1, t2, s1, s2)
    positions = rows * window.kernel_size[1] + columns
    return positions.masked_fill((rows < 0) | (columns < 0), -1).flatten(2).flatten(0, 1)


def choose_head_dims(
    conv: nn.Conv2d, patch_size: Pair, head_dim: Optional[str] = None, min_head_dim: int = 1
) -> Tuple[int, ...]:
    """Returns the channels D_h of each head by the arguments of :class:`~attncnn_plugin.models.CMHSANetwork`.

    From a patch that is one step away a convolution reads only border pixels. An exact head has as many channels as it
    reads pixels, or writes pixels if these are fewer, times their channels; one, where dilation steps over a patch.

    Raises:
        TypeError, ValueError: A wrong ``head_dim`` or ``min_head_dim``; see :func:`patch_shifts`.

    Examples:
        >>> widths = choose_head_dims(nn.Conv2d(3, 3, 3, padding=1), (16, 16), 'exact')
        >>> widths, sum(widths)
        ((3, 48, 3, 48, 768, 48, 3, 48, 3), 972)
    """
    if head_dim not in (None, 'exact'):
        raise ValueError(f"head_dim={head_dim!r} is unknown: choose 'exact' or None, as wide as a patch")
    if min_head_dim < 1 or (min_head_dim > 1 and head_dim is None):
        raise ValueError(f"min_head_dim={min_head_dim} must be at least 1, and is only for head_dim='exact'")
    dim, widths = conv.in_channels * math.prod(patch_size), []
    for shift in patch_shifts(conv, patch_size):
        seen = kernel_positions(conv, patch_size, shift) >= 0
        read, written = (int(seen.any(axis).sum()) for axis in (0, 1))
        exact = min(read * conv.in_channels, written * conv.out_channels)
        widths.append(dim if head_dim is None else min(dim, max(exact, min_head_dim)))
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
    kernel, patch = per_axis('kernel_size', kernel_size, 2), per_axis('patch_size', patch_size, 2)
    conv = nn.Conv2d(1, 1, (kernel[0], kernel[1]), padding='same', device='meta')
    return len(patch_shifts(conv, (patch[0], patch[1])))


def conv_to_patch_mhsa(
    conv: nn.Conv2d, patch_size: Sizes, head_dim: Optional[str] = None, qk_dim: Optional[int] = None
) -> Tuple[PatchConvolutionAttention, PatchConversionReport]:
    """Turns a convolution on the image into multi-head self-attention over patches (L21, Theorem 1).

    Head r has the position bias M at its shift δ_r and 0 elsewhere, W^V = I, and in W^O the weights of the kernel
    between the pixels of the two patches; W^Q is zero and W^K random, so that training can move both. Where the patch
    at δ_r lies outside the image, a null key stands for the zeros there. N_h = (2⌈(K − 1)/2P⌉ + 1)² for odd K.

    Args:
        conv (nn.Conv2d): Zero padding, any groups and dilation, a stride that divides the patch size, n pixels to
            n/stride.
        patch_size (int | tuple[int, int]): Patch size P.
        head_dim, qk_dim: As of :class:`~attncnn_plugin.models.CMHSANetwork`.

    Returns:
        tuple[PatchConvolutionAttention, PatchConversionReport]: The attention, for images whose sides are multiples
        of P, and the shifts, widths and parameters that it takes.

    Raises:
        TypeError: ``conv`` is not an ``nn.Conv2d``, or computes something else than its attributes describe.
        ValueError: A size or width below 1, or a convolution of another kind.

    Examples:
        >>> conv = nn.Conv2d(1, 2, kernel_size=3, padding=1)
        >>> attention, report = conv_to_patch_mhsa(conv, patch_size=4)
        >>> print(report)
        num_heads=9 of 16 channels: exact, a head for each shift from (-1, -1) to (1, 1); 20 parameters became 11,633
        >>> images = torch.randn(1, 1, 8, 12)
        >>> torch.allclose(attention(images), conv(images), atol=1e-5)
        True
    """
    rows, columns = per_axis('patch_size', patch_size, 2)
    size_before, training, shifts = number_of_parameters(conv), conv.training, patch_shifts(conv, (rows, columns))
    conv = cast(nn.Conv2d, convolution_with(computed(conv)))
    out_patch_size = (rows // conv.stride[0], columns // conv.stride[1])
    size = [last - first + 1 for first, last in zip(shifts[0], shifts[-1])]
    dd: Any = dict(device=conv.weight.device, dtype=conv.weight.dtype)
    attention = PatchAttention(
        conv.in_channels * rows * columns,
        len(shifts),
        WindowBias(len(shifts), shifts[0], (size[0], size[1]), **dd),
        head_dim=choose_head_dims(conv, (rows, columns), head_dim),
        qk_dim=qk_dim,
        out_dim=conv.out_channels * math.prod(out_patch_size),
        bias=conv.bias is not None,
        **dd,
    )
    attend_like_convolution(attention, conv, (rows, columns))
    module = PatchConvolutionAttention(attention, (rows, columns), out_patch_size).train(training)
    sizes = size_before, number_of_parameters(module)
    return module, PatchConversionReport(len(shifts), shifts, attention.head_dims, *sizes)


@torch.no_grad()
def attend_like_convolution(
    attention: PatchAttention, conv: nn.Conv2d, patch_size: Pair, attn_bias: float = ATTN_BIAS
) -> None:
    """Sets the parameters of an attention over patches to those of L21's Theorem 1, with M as ``attn_bias``.

    W^Q becomes zero and W^K stays as it is: were both zero, neither would ever get a gradient. Heads beyond those of
    the shifts get no weight, nor do shifts that lead out of the grid of the position bias from every patch.

    Raises:
        ValueError: The attention has too few heads, or one that is too narrow; see :func:`patch_shifts`.
    """
    shifts = patch_shifts(conv, patch_size)
    if attention.num_heads < len(shifts):
        raise ValueError(
            f'num_heads={attention.num_heads} is too few for a kernel of {conv.kernel_size} on patches of '
            f'{patch_size}: it needs {len(shifts)} (L21, Theorems 1 and 6)'
        )
    first, table = attention.position.first, attention.position.table
    out, head_dims = attention.out, attention.head_dims
    for weight in (attention.query.weight, out.weight, table):
        nn.init.zeros_(weight)
    for head, (width, end) in enumerate(zip(head_dims, itertools.accumulate(head_dims))):
        entry = [n - start for n, start in zip(shifts[head], first)] if head < len(shifts) else [-1, -1]
        # A shift that the table does not have leads to padding from every patch.
        if all(0 <= n < size for n, size in zip(entry, table.shape[1:])):
            table[head, entry[0], entry[1]] = attn_bias
            values, out.weight[:, end - width : end] = factorize(conv, patch_size, shifts[head], width)
        else:  # without output weights to begin with; other entries for every head, so that they learn other things
            values = unit_rows((head * width + torch.arange(width, device='cpu')) % attention.dim, attention.dim, table)
        attention.value.weight[end - width : end] = values
    if out.bias is not None:
        out.bias.zero_()
        if conv.bias is not None:
            out.bias.copy_(conv.bias.repeat_interleave(math.prod(patch_size) // math.prod(conv.stride)))


def factorize(conv: nn.Conv2d, patch_size: Pair, shift: Pair, width: int) -> Tuple[Tensor, Tensor]:
    """Factors the weights M from the pixels of patch q + δ to the outputs of patch q (L21, A.2) into W^V and W^O.

    W^V, ``(D_h, D)``, picks the pixels that are read, and W^O, ``(D_out, D_h)``, has their weights; or W^V has the
    weights and W^O puts the outputs in their places. A head that is wider than needed has other pixels too.
    """
    positions = kernel_positions(conv, patch_size, shift)
    kernel = block_diagonal(conv.weight.detach().flatten(2), conv.groups)  # (K, C_out, C_in)
    kernel = F.pad(kernel, (0, 0, 0, 0, 0, 1))  # (K + 1, C_out, C_in); the last, −1, has zeros
    weights = kernel[positions.to(kernel.device)]  # (t, s, C_out, C_in)
    matrix = weights.permute(2, 0, 3, 1).flatten(2).flatten(0, 1)  # M, (D_out, D)
    seen = positions >= 0
    read, written = seen.any(0).repeat(conv.in_channels), seen.any(1).repeat(conv.out_channels)
    if width >= read.sum():
        pixels = _first_of(read, width)
        return unit_rows(pixels, matrix.shape[1], matrix), matrix[:, pixels]
    if width >= written.sum():
        pixels = _first_of(written, width)
        return matrix[pixels], unit_rows(pixels, len(matrix), matrix).T
    raise ValueError(f'a head of {width} channels is too narrow for the patch at {shift}')


def _first_of(used: Tensor, number: int) -> Tensor:
    """Returns the indices of so many entries, in order: of those that are used, then of others."""
    return used.int().argsort(descending=True, stable=True)[:number].sort().values


def unit_rows(entries: Tensor, dim: int, like: Tensor) -> Tensor:
    """Returns rows of the identity, ``(n, dim)``, of the dtype and on the device of another tensor."""
    return F.one_hot(entries, dim).to(like)
