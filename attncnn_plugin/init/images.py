"""Random images with the spectrum of natural ones, on which a start is calibrated and measured."""

from typing import Any, Tuple

import torch
from torch import Tensor, nn

from ..analysis.vision_transformer import find_transformer
from .parts import patch_convolutions

NUM_IMAGES = 4


def random_images(model: nn.Module, number: int = NUM_IMAGES, seed: int = 0) -> Tensor:
    """Noise whose amplitude falls as 1/f, as that of photos does (Field 1987), with mean 0 and deviation 1.

    Args:
        model (nn.Module): A vision transformer, or a model with one; images have its size, channels, type and device.
        number (int): Of images. Defaults to 4.
        seed (int): Of the noise. Defaults to 0.

    Returns:
        Tensor: ``(number, channels, height, width)``.

    Examples:
        >>> import timm
        >>> random_images(timm.create_model('vit_tiny_patch16_224', img_size=64, depth=1)).shape
        torch.Size([4, 3, 64, 64])
    """
    _, network = find_transformer(model)
    height, width = image_size(network)
    weight = patch_convolutions(network)[0].weight
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(number, weight.shape[1], height, width, generator=generator, dtype=torch.float64)
    rows, columns = torch.fft.fftfreq(height), torch.fft.fftfreq(width)
    frequency = (rows[:, None] ** 2 + columns**2).sqrt().clamp(min=1 / max(height, width))
    images = torch.fft.ifft2(torch.fft.fft2(noise) / frequency).real
    images = (images - images.mean()) / images.std()
    return images.to(weight)


def image_size(network: Any) -> Tuple[int, int]:
    """Height and width of the images that a network was built for.

    Raises:
        ValueError: It does not say.
    """
    embed = network.patch_embed
    for size in (getattr(embed, 'img_size', None), getattr(embed, 'init_input_size', None)):
        if size is not None:
            return (int(size[0]), int(size[1]))
    raise ValueError(
        f'the patch_embed of {type(network).__name__} has neither img_size nor init_input_size: give images of the '
        'size for which the model was built'
    )
