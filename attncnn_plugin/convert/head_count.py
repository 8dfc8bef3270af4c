"""How many heads a convolution takes (L21, Theorems 1, 5 and 6)."""

import math
from typing import Sequence, Union

from ..layers.window import per_axis


def min_heads(kernel_size: Union[int, Sequence[int]], patch_size: Union[int, Sequence[int]] = 1) -> int:
    """Number of heads that are needed and enough for a generic convolution with stride 1 and ``padding='same'``.

    It is the number of shifts between tokens that the kernel covers. From a pixel the kernel reaches ⌊(K − 1)/2⌋ pixels
    before and the others after; the pixels of a patch together reach ⌈before/P⌉ patches before, ⌈after/P⌉ after and
    their own. Pixels, P = 1, take one head for each kernel position (L21, Theorem 5). For an odd K an axis has
    2⌈(K − 1)/2P⌉ + 1 shifts (L21, Theorem 1), 3 if P ≥ K > 1, thus 9 heads (Theorem 6); for an even K, not covered by
    L21, the same or fewer.

    Enough is one head for each shift, with nothing attended to outside the image. Fewer can only do where the
    token-to-token matrices of the shifts are linearly dependent, since N_h heads give a sum of N_h terms, attention map
    times matrix. Those of a random kernel are independent if it has at least as many pairs of channels as shifts.

    Args:
        kernel_size (int | Sequence[int]): Size K of the kernel, along each of one to three axes; an integer is a square
            kernel, with two axes.
        patch_size (int | Sequence[int]): Size P of the patch that makes a token, an integer or one for each axis.
            Defaults to 1, tokens that are pixels.

    Returns:
        int: The number of heads.

    Raises:
        ValueError: A size that is not a positive integer, or not one for each axis.
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
