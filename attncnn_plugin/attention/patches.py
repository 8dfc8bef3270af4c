"""Images as grids of flattened patches, and back."""

from typing import Tuple

import torch
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
            'multiples of the patch size'
        )
    patches = image.reshape(batch, channels, height // rows, rows, width // columns, columns)
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3)


def patches_to_image(
    patches: Tensor,
    patch_size: Tuple[int, int],
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """The inverse of :func:`image_to_patches`.

    Args:
        patches (Tensor): ``(B, H/P, W/P, C·P·P)``.
        patch_size (tuple[int, int]): Patch size P.
        memory_format (torch.memory_format): Of the image: contiguous, the default, or channels last.

    Returns:
        Tensor: ``(B, C, H, W)``.
    """
    batch, height, width, dim = patches.shape
    rows, columns = patch_size
    channels = dim // (rows * columns)
    image = patches.reshape(batch, height, width, channels, rows, columns)
    size = height * rows, width * columns
    if memory_format == torch.channels_last:  # in one copy too
        image = image.permute(0, 1, 4, 2, 5, 3).reshape(batch, *size, channels).permute(0, 3, 1, 2)
    else:
        image = image.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, *size)
    return image.contiguous(memory_format=memory_format)
