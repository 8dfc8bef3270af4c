"""Weights of small networks, trained on CIFAR-10-J, and ten images to try them with.

A network has a file of safetensors in half precision, ``NAME.safetensors``, with the names of its timm model, and a
model card, ``NAME.md``. Both are made by ``tools/model_converters/pack_weights.py``. Nothing in them can be run.
"""

from pathlib import Path
from typing import Any, Dict, Mapping, Optional

import torch

__all__ = ['CLASSES', 'example_images', 'in_single_precision', 'weights_file']

FOLDER = Path(__file__).parent
CLASSES = ('airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck')


def weights_file(name: str) -> Optional[str]:
    """Finds the weights that come with the package for a network.

    Args:
        name (str): Its name in timm, such as ``'sa_quadratic_small'``.

    Returns:
        str | None: The path of the file; None where there is none.
    """
    path = FOLDER / f'{name}.safetensors'
    return str(path) if path.is_file() else None


def in_single_precision(state_dict: Mapping[str, Any], model: Any) -> Dict[str, Any]:
    """Converts half precision to single, as timm's filter of pretrained weights."""
    return {name: value.float() if value.dtype == torch.half else value for name, value in state_dict.items()}


def example_images() -> Dict[str, str]:
    """Finds an image of each class of CIFAR-10, 32x32 pixels, from its test set: no network here was trained on it.

    Returns:
        dict[str, str]: The path of the PNG file of each of ``CLASSES``, in their order.

    Examples:
        >>> from PIL import Image
        >>> Image.open(example_images()['frog']).size
        (32, 32)
    """
    return {name: str(FOLDER / 'images' / f'{name}.png') for name in CLASSES}
