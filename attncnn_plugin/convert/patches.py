"""A convolution on the image as attention over patches (Li et al. 2021 (L21), Theorem 1 and appendix A.2)."""

import itertools
import math
from dataclasses import dataclass
from typing import Any, Dict, List, Tuple, Union

import torch
from torch import Tensor, nn

from ..layers.merged_patch_attention import MergedPatchAttention
from ..layers.patch_attention import PatchAttention
from ..layers.patches import image_to_patches, patches_to_image
from ..layers.position_bias import WindowBias
from ..layers.window import Window, per_axis
from .kernels import kernel_matrix
from .report import PatchConversionReport

ATTN_BIAS = 40.0  # M: e^−40 is nothing beside 1 in float64 and float32 alike


class PatchConvolutionAttention(nn.Module):
    """Attention over patches with the inputs and outputs of a convolution on the image.

    Args:
        attention (PatchAttention): Attention over the flattened patches.
        patch_size (tuple[int, int]): Height and width of a patch of the image.
        out_patch_size (tuple[int, int]): Height and width of a patch of the output.
    """

    def __init__(
        self,
        attention: PatchAttention,
        patch_size: Tuple[int, int],
        out_patch_size: Tuple[int, int],
    ) -> None:
        super().__init__()
        self.attention = attention
        self.patch_size = patch_size
        self.out_patch_size = out_patch_size

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` or ``(C, H, W)`` to the convolution's output.

        Raises:
            ValueError: The image cannot be cut into patches, or does not have the convolution's channels.
        """
        channels = self.attention.dim // (self.patch_size[0] * self.patch_size[1])
        if x.ndim not in (3, 4) or x.shape[-3] != channels:
            raise ValueError(
                f'the input has shape {tuple(x.shape)}, but (B, {channels}, H, W) or ({channels}, H, W) is expected'
            )
        if x.ndim == 3:
            return self.forward(x[None])[0]
        return patches_to_image(self.attention(image_to_patches(x, self.patch_size)), self.out_patch_size)


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
        """The shifts of the patches that ``conv`` connects.

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


def conv_to_patch_mhsa(
    conv: nn.Conv2d, patch_size: Union[int, Tuple[int, int]]
) -> Tuple[PatchConvolutionAttention, PatchConversionReport]:
    """Turns a convolution on the image into multi-head self-attention over patches (L21, Theorem 1).

    Head r has the position bias M at its shift δ_r and 0 elsewhere, W^V = I, and in W^O the weights of the kernel
    between the pixels of the two patches; W^Q is zero and W^K random, so that training can move both. Where the patch
    at δ_r lies outside the image, a null key stands for the zeros there. N_h = (2⌈(K − 1)/2P⌉ + 1)² for odd K.

    Args:
        conv (nn.Conv2d): Zero padding, any groups and dilation, a stride that divides the patch size, n pixels to
            n/stride.
        patch_size (int | tuple[int, int]): Patch size P.

    Returns:
        tuple[PatchConvolutionAttention, PatchConversionReport]: The attention, for images whose sides are multiples
        of P, and the shifts and parameters that it takes.

    Raises:
        TypeError: ``conv`` is not an ``nn.Conv2d``.
        ValueError: A patch size below 1, or a convolution of another kind.

    Examples:
        >>> conv = nn.Conv2d(1, 2, kernel_size=3, padding=1)
        >>> attention, report = conv_to_patch_mhsa(conv, patch_size=4)
        >>> print(report)
        num_heads=9: exact, a head for each shift from (-1, -1) to (1, 1); 20 parameters became 11,633
        >>> images = torch.randn(1, 1, 8, 12)
        >>> torch.allclose(attention(images), conv(images), atol=1e-5)
        True
    """
    rows, columns = per_axis('patch_size', patch_size, 2)
    window = PatchWindow.of(conv, (rows, columns))
    out_patch_size = (rows // conv.stride[0], columns // conv.stride[1])
    num_heads = len(window.shifts)
    dd: Dict[str, Any] = {'device': conv.weight.device, 'dtype': conv.weight.dtype}
    attention = PatchAttention(
        conv.in_channels * rows * columns,
        num_heads,
        WindowBias(num_heads, window.first, window.size, **dd),
        out_dim=conv.out_channels * math.prod(out_patch_size),
        bias=conv.bias is not None,
        **dd,
    )
    attend_like_convolution(attention, conv, (rows, columns))
    module = PatchConvolutionAttention(attention, (rows, columns), out_patch_size).train(conv.training)
    before, after = (sum(parameter.numel() for parameter in made.parameters()) for made in (conv, module))
    return module, PatchConversionReport(num_heads, tuple(window.shifts), before, after)


@torch.no_grad()
def attend_like_convolution(
    attention: Union[PatchAttention, MergedPatchAttention],
    conv: nn.Conv2d,
    patch_size: Tuple[int, int],
    attn_bias: float = ATTN_BIAS,
) -> None:
    """Sets the parameters of an attention over patches to those of L21's Theorem 1.

    W^Q becomes zero and W^K stays as it is: were both zero, neither would ever get a gradient. Their product can be
    zero, for the scores are linear in it.

    Args:
        attention (PatchAttention | MergedPatchAttention): With at least one head for each shift of the convolution.
            Further heads get no weight, nor do shifts that lead out of the grid of its position bias from every patch.
        conv (nn.Conv2d): The convolution.
        patch_size (tuple[int, int]): Patch size P.
        attn_bias (float): M. Defaults to 40, exact in float32.

    Raises:
        ValueError: The attention has too few heads; the convolution is of another kind, see :meth:`PatchWindow.of`.

    Examples:
        >>> attention = PatchAttention(dim=16, num_heads=9, position=WindowBias(9, (-1, -1), (3, 3)))
        >>> attend_like_convolution(attention, nn.Conv2d(1, 1, 3, padding=1), patch_size=(4, 4))
        >>> attention.position.table[0].tolist()
        [[40.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    window = PatchWindow.of(conv, patch_size)
    shifts = window.shifts
    if attention.num_heads < len(shifts):
        raise ValueError(
            f'num_heads={attention.num_heads} is too few for a kernel of {conv.kernel_size} on patches of '
            f'{patch_size}: it needs {len(shifts)} (L21, Theorems 1 and 6)'
        )
    first, table = attention.position.first, attention.position.table
    if isinstance(attention, MergedPatchAttention):
        query, out = attention.query_key, attention.value_out
    else:
        query, out = attention.query, attention.out
        identity = torch.eye(attention.dim, dtype=table.dtype, device=table.device)
        attention.value.weight.copy_(identity.repeat(attention.num_heads, 1))  # W^V = I
    for weight in (query.weight, out.weight, table):
        nn.init.zeros_(weight)
    heads = out.weight.unflatten(1, (attention.num_heads, -1))  # (D_out, N_h, D)
    for head, shift in enumerate(shifts):
        entry = shift[0] - first[0], shift[1] - first[1]
        # A shift that the table does not have leads to padding from every patch.
        if 0 <= entry[0] < table.shape[1] and 0 <= entry[1] < table.shape[2]:
            table[head, entry[0], entry[1]] = attn_bias
            heads[:, head] = patch_to_patch(conv, patch_size, shift)
    if out.bias is not None:
        out.bias.zero_()
        if conv.bias is not None:
            out.bias.copy_(conv.bias.repeat_interleave(len(out.bias) // len(conv.bias)))


def patch_to_patch(conv: nn.Conv2d, patch_size: Tuple[int, int], shift: Tuple[int, int]) -> Tensor:
    """The weights from the pixels of patch q + δ to the outputs of patch q (L21, A.2), ``(D_out, D)``."""
    kernel = kernel_matrix(conv).unflatten(0, conv.kernel_size)  # (K1, K2, C_out, C_in)
    window = Window.of(conv)
    entries, valid = [], []
    for axis, patch in enumerate(patch_size):
        stride, dilation, before = window.stride[axis], window.dilation[axis], window.padding[axis][0]
        source = shift[axis] * patch + torch.arange(patch, device=kernel.device)  # s, from the first pixel of patch q
        target = stride * torch.arange(patch // stride, device=kernel.device)  # t
        offset = source[None, :] - target[:, None] + before  # of the pixel in the window of the output: (t, s)
        entry = torch.div(offset, dilation, rounding_mode='floor')
        valid.append((offset % dilation == 0) & (entry >= 0) & (entry < window.kernel_size[axis]))
        entries.append(entry.clamp(0, window.kernel_size[axis] - 1))
    rows, columns = entries
    weight = kernel[rows[:, None, :, None], columns[None, :, None, :]]  # (t1, t2, s1, s2, C_out, C_in)
    weight = weight * (valid[0][:, None, :, None] & valid[1][None, :, None, :])[..., None, None]
    return weight.permute(4, 0, 1, 5, 2, 3).flatten(0, 2).flatten(1)
