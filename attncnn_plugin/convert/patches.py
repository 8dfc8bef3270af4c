"""A convolution on the image as attention over patches (Li et al. 2021 (L21), Theorem 1 and appendix A.2)."""

import itertools
import math
from typing import Any, Dict, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from ..attention.patch_attention import PatchAttention
from ..attention.patches import image_to_patches, patches_to_image
from ..attention.position_bias import WindowBias
from ..attention.window import per_axis
from .patch_matrices import exact_head_dim, factorize, unit_rows
from .patch_window import PatchWindow
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

    def forward(self, input: Tensor) -> Tensor:  # the name of nn.Conv2d's
        """Maps ``(B, C, H, W)`` or ``(C, H, W)`` to the convolution's output.

        Raises:
            ValueError: The image cannot be cut into patches, or does not have the convolution's channels.
        """
        channels = self.attention.dim // (self.patch_size[0] * self.patch_size[1])
        if input.ndim not in (3, 4) or input.shape[-3] != channels:
            raise ValueError(
                f'the input has shape {tuple(input.shape)}, but (B, {channels}, H, W) or ({channels}, H, W) is expected'
            )
        if input.ndim == 3:
            return self.forward(input[None])[0]
        return patches_to_image(self.attention(image_to_patches(input, self.patch_size)), self.out_patch_size)


def exact_head_dims(conv: nn.Conv2d, patch_size: Union[int, Tuple[int, int]]) -> Tuple[int, ...]:
    """Returns widths D_h that are enough for heads to be a convolution on the image, whatever its weights.

    The matrices W^V W^O of L21's heads are of low rank: from a patch that is one step away a convolution reads border
    pixels alone. A head has as many channels as it reads pixels, or writes pixels if these are fewer, times their
    channels. For odd kernels with stride 1 and no dilation that is the rank, for all but special weights. With even
    kernels, dilation or strides it can be more.

    Args:
        conv (nn.Conv2d): The convolution.
        patch_size (int | tuple[int, int]): Patch size P.

    Returns:
        tuple[int, ...]: D_h of every head, shift by shift, of :func:`conv_to_patch_mhsa`.

    Raises:
        TypeError, ValueError: As :func:`conv_to_patch_mhsa`.

    Examples:
        >>> widths = exact_head_dims(nn.Conv2d(3, 3, 3, padding=1), patch_size=16)
        >>> widths, sum(widths)
        ((3, 48, 3, 48, 768, 48, 3, 48, 3), 972)
    """
    rows, columns = per_axis('patch_size', patch_size, 2)
    shifts = PatchWindow.of(conv, (rows, columns)).shifts
    return tuple(exact_head_dim(conv, (rows, columns), shift) for shift in shifts)


def choose_head_dims(
    conv: nn.Conv2d, patch_size: Tuple[int, int], head_dim: Optional[str] = None, min_head_dim: int = 1
) -> Tuple[int, ...]:
    """Returns the channels D_h of each head by the setting of a network or a conversion.

    Args:
        conv (nn.Conv2d): The convolution; its weights are not read.
        patch_size (tuple[int, int]): Patch size P.
        head_dim (str, optional): None for those of a patch, as in L21, or ``'exact'`` for :func:`exact_head_dims`.
            Defaults to None.
        min_head_dim (int): The least channels of ``'exact'`` heads. Defaults to 1.

    Raises:
        ValueError: An unknown ``head_dim``; a ``min_head_dim`` below 1, or without ``'exact'``.
    """
    if head_dim not in (None, 'exact'):
        raise ValueError(f"head_dim={head_dim!r} is unknown: choose 'exact' or None, as wide as a patch")
    if min_head_dim < 1 or (min_head_dim > 1 and head_dim is None):
        raise ValueError(f"min_head_dim={min_head_dim} must be at least 1, and is for head_dim='exact' alone")
    exact = exact_head_dims(conv, patch_size)
    return tuple(
        conv.in_channels * math.prod(patch_size) if head_dim is None else max(width, min_head_dim) for width in exact
    )


def conv_to_patch_mhsa(
    conv: nn.Conv2d,
    patch_size: Union[int, Tuple[int, int]],
    head_dim: Optional[str] = None,
    qk_dim: Optional[int] = None,
) -> Tuple[PatchConvolutionAttention, PatchConversionReport]:
    """Turns a convolution on the image into multi-head self-attention over patches (L21, Theorem 1).

    Head r has the position bias M at its shift δ_r and 0 elsewhere, W^V = I, and in W^O the weights of the kernel
    between the pixels of the two patches; W^Q is zero and W^K random, so that training can move both. Where the patch
    at δ_r lies outside the image, a null key stands for the zeros there. N_h = (2⌈(K − 1)/2P⌉ + 1)² for odd K.

    Args:
        conv (nn.Conv2d): Zero padding, any groups and dilation, a stride that divides the patch size, n pixels to
            n/stride.
        patch_size (int | tuple[int, int]): Patch size P.
        head_dim (str, optional): Channels D_h of a head's values: None for those of a patch, as in L21, or ``'exact'``
            for just enough to be the convolution, see :func:`exact_head_dims`. Defaults to None.
        qk_dim (int, optional): Channels D_k of a head's queries and keys. Defaults to those of a patch.

    Returns:
        tuple[PatchConvolutionAttention, PatchConversionReport]: The attention, for images whose sides are multiples
        of P, and the shifts, widths and parameters that it takes.

    Raises:
        TypeError: ``conv`` is not an ``nn.Conv2d``.
        ValueError: A size or width below 1, or a convolution of another kind.

    Examples:
        >>> conv = nn.Conv2d(1, 2, kernel_size=3, padding=1)
        >>> attention, report = conv_to_patch_mhsa(conv, patch_size=4)
        >>> print(report)
        num_heads=9 of 16 channels: exact, a head for each shift from (-1, -1) to (1, 1); 20 parameters became 11,633
        >>> narrow, report = conv_to_patch_mhsa(conv, patch_size=4, head_dim='exact', qk_dim=4)
        >>> print(report)
        num_heads=9 of 1 to 16 channels: exact, a head for each shift from (-1, -1) to (1, 1); 20 parameters became 2,993
        >>> images = torch.randn(1, 1, 8, 12)
        >>> all(torch.allclose(module(images), conv(images), atol=1e-5) for module in (attention, narrow))
        True
    """  # noqa: E501
    rows, columns = per_axis('patch_size', patch_size, 2)
    window = PatchWindow.of(conv, (rows, columns))
    out_patch_size = (rows // conv.stride[0], columns // conv.stride[1])
    num_heads = len(window.shifts)
    dd: Dict[str, Any] = {'device': conv.weight.device, 'dtype': conv.weight.dtype}
    dim = conv.in_channels * rows * columns
    attention = PatchAttention(
        dim,
        num_heads,
        WindowBias(num_heads, window.first, window.size, **dd),
        head_dim=choose_head_dims(conv, (rows, columns), head_dim),
        qk_dim=qk_dim,
        out_dim=conv.out_channels * math.prod(out_patch_size),
        bias=conv.bias is not None,
        **dd,
    )
    attend_like_convolution(attention, conv, (rows, columns))
    module = PatchConvolutionAttention(attention, (rows, columns), out_patch_size).train(conv.training)
    before, after = (sum(parameter.numel() for parameter in made.parameters()) for made in (conv, module))
    return module, PatchConversionReport(num_heads, tuple(window.shifts), attention.head_dims, before, after)


@torch.no_grad()
def attend_like_convolution(
    attention: PatchAttention, conv: nn.Conv2d, patch_size: Tuple[int, int], attn_bias: float = ATTN_BIAS
) -> None:
    """Sets the parameters of an attention over patches to those of L21's Theorem 1.

    W^Q becomes zero and W^K stays as it is: were both zero, neither would ever get a gradient.

    Args:
        attention (PatchAttention): With at least one head for each shift of the convolution, each wide enough. Further
            heads get no weight, nor do shifts that lead out of the grid of its position bias from every patch.
        conv (nn.Conv2d): The convolution.
        patch_size (tuple[int, int]): Patch size P.
        attn_bias (float): M. Defaults to 40, exact in float32.

    Raises:
        ValueError: The attention has too few heads, or one that is too narrow; the convolution is of another kind, see
            :meth:`PatchWindow.of`.

    Examples:
        >>> attention = PatchAttention(dim=16, num_heads=9, position=WindowBias(9, (-1, -1), (3, 3)))
        >>> attend_like_convolution(attention, nn.Conv2d(1, 1, 3, padding=1), patch_size=(4, 4))
        >>> attention.position.table[0].tolist()
        [[40.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    shifts = PatchWindow.of(conv, patch_size).shifts
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
            values = unit_rows([(head * width + n) % attention.dim for n in range(width)], attention.dim, table)
        attention.value.weight[end - width : end] = values
    if out.bias is not None:
        out.bias.zero_()
        if conv.bias is not None:
            out.bias.copy_(conv.bias.repeat_interleave(math.prod(patch_size) // math.prod(conv.stride)))
