"""Images as grids of flattened patches, and back."""
from typing import Tuple

from torch import Tensor


def image_to_patches(image: Tensor, patch_size: Tuple[int, int]) -> Tensor:
    """``(B, C, H, W)`` to ``(B, H/P, W/P, C·P·P)``, a patch flattened channel by channel, row by row.

    Raises:
        ValueError: The image cannot be cut into patches.
    """
    batch, channels, height, width = image.shape
    rows, columns = patch_size
    if height % rows or width % columns:
        raise ValueError(
            f'the image of {height}x{width} pixels cannot be cut into patches of {rows}x{columns}: resize or pad it to '
            'multiples of the patch size')
    patches = image.reshape(batch, channels, height // rows, rows, width // columns, columns)
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3)


def patches_to_image(patches: Tensor, patch_size: Tuple[int, int]) -> Tensor:
    """The inverse of :func:`image_to_patches`."""
    batch, height, width, dim = patches.shape
    rows, columns = patch_size
    channels = dim // (rows * columns)
    image = patches.reshape(batch, height, width, channels, rows, columns)
    return image.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, height * rows, width * columns)
