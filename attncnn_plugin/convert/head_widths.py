"""How wide heads are that are a convolution on the image, beyond Li et al. 2021 (L21), where D_h = D."""

from typing import Optional, Sequence, Tuple, Union

from torch import nn

from ..layers.window import per_axis
from .patch_matrices import exact_head_dim
from .patch_window import PatchWindow

HeadDim = Union[int, str, Sequence[int], None]


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
    head_dim: HeadDim,
    conv: nn.Conv2d,
    patch_size: Tuple[int, int],
    dim: int,
    num_heads: Optional[int] = None,
    min_head_dim: int = 1,
) -> Tuple[int, ...]:
    """Returns the channels D_h of each head by the setting of a network or a conversion.

    Args:
        head_dim (int | str | Sequence[int], optional): D for None; ``'exact'`` for :func:`exact_head_dims`, but not
            more than D; or numbers, for all heads or for each.
        conv (nn.Conv2d): The convolution; its weights are not read.
        patch_size (tuple[int, int]): Patch size P.
        dim (int): Channels D of a token.
        num_heads (int, optional): Number of heads. Defaults to one for each shift of the convolution.
        min_head_dim (int): The least channels of ``'exact'`` heads, those of heads that the convolution does not need.
            Defaults to 1.

    Raises:
        ValueError: Too few heads; an unknown or too small width; not one for each head.
    """
    needed = len(PatchWindow.of(conv, patch_size).shifts)
    num_heads = needed if num_heads is None else num_heads
    if num_heads < needed:
        raise ValueError(
            f'num_heads={num_heads} is too few: a kernel of {conv.kernel_size} on patches of {patch_size} needs '
            f'{needed} (L21, Theorems 1 and 6)'
        )
    if min_head_dim < 1 or (min_head_dim > 1 and head_dim != 'exact'):
        raise ValueError(f"min_head_dim={min_head_dim} must be at least 1, and is for head_dim='exact' alone")
    if isinstance(head_dim, str):
        if head_dim != 'exact':
            raise ValueError(f"head_dim={head_dim!r} is unknown: choose 'exact', a number, one for each head, or None")
        exact = [min(width, dim) for width in exact_head_dims(conv, patch_size)] + [1] * (num_heads - needed)
        return tuple(max(width, min_head_dim) for width in exact)
    if head_dim is None or isinstance(head_dim, int):
        head_dim = [dim if head_dim is None else head_dim] * num_heads
    if len(head_dim) != num_heads or min(head_dim) < 1:
        raise ValueError(
            f'head_dim={head_dim} must be at least 1, one for all heads or one for each of the {num_heads}'
        )
    return tuple(head_dim)
