"""How many heads a convolution takes (Li et al. 2021 (L21), Theorems 1, 5 and 6)."""

import math
from typing import Sequence, Union

from ..attention.window import per_axis


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
