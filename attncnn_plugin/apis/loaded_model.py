"""A model of either framework with images as it takes them, as the tools need it."""

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from ..models import CMHSANetwork, SelfAttentionNetwork
from .images import image_files


class LoadedModel(ABC):
    """A model in evaluation mode, and images for it.

    Attributes:
        name (str): The config, or the name of the model in timm.
        model (nn.Module): The model.
        meta (dict): The information about its training that the checkpoint holds.
        head_numbers (dict[str, list[int]] | None): By layer, what its heads were called when the training began, where
            an ``AttentionVisualizationHook`` followed them.
    """

    name: str
    model: Any
    meta: Dict[str, Any]
    head_numbers: Optional[Dict[str, List[int]]]

    @property
    def img_size(self) -> Optional[Tuple[int, int]]:
        """Height and width in pixels of the images that a network of this package is for; None if it does not say."""
        return getattr(self._network, 'img_size', None)

    @property
    def grid(self) -> Tuple[int, int]:
        """Height and width in tokens of the grid that a network of this package is for.

        Raises:
            ValueError: The model does not say.
        """
        if self.img_size is None:
            raise ValueError(f'the model of {self.name} has no img_size: give the size of its grid in tokens')
        height, width = self.img_size
        return height // self._network.stem.reduction, width // self._network.stem.reduction

    @abstractmethod
    def test_images(self, number: int) -> List[Tensor]:
        """Images of the model's own tests, evenly spread, as those of :meth:`read`.

        Raises:
            ValueError: It has none.
        """

    @abstractmethod
    def image(self, which: str) -> Tensor:
        """An image by its number among the tests or by its file, as those of :meth:`read`.

        Raises:
            ValueError: There is no such image.
        """

    @abstractmethod
    def read(self, path: Union[str, Path]) -> Tensor:
        """An image from a file, ``(C, H, W)``, after the transforms of the model's tests.

        Raises:
            FileNotFoundError: No such file.
            ValueError: The file holds no image.
        """

    @abstractmethod
    def inputs(self, images: Sequence[Tensor]) -> Tensor:
        """Images of :meth:`read` or of the tests as the forward pass takes them, ``(B, C, H, W)``."""

    @abstractmethod
    def picture(self, image: Tensor) -> np.ndarray:
        """An image of :meth:`read` or of the tests to look at, ``(H, W, 3)``, uint8, red first."""

    def read_folder(self, folder: str, number: int) -> List[Tensor]:
        """Images of a folder and its subfolders, evenly spread, as those of :meth:`read`."""
        return [self.read(path) for path in image_files(folder, number)]

    def some_inputs(self, folder: Optional[str], number: int) -> Tensor:
        """Images of a folder, or of the model's own tests, as the forward pass takes them, ``(B, C, H, W)``."""
        return self.inputs(self.test_images(number) if folder is None else self.read_folder(folder, number))

    @cached_property
    def _network(self) -> Any:
        own = (CMHSANetwork, SelfAttentionNetwork)
        return next((module for module in self.model.modules() if isinstance(module, own)), None)


def rgb_picture(pixels: Tensor) -> np.ndarray:
    """Pixels from 0 to 255, ``(C, H, W)``, grey or red first, as a picture ``(H, W, 3)``, uint8.

    Examples:
        >>> rgb_picture(torch.tensor([[[-1.0, 300.0]]]))[..., 0]
        array([[  0, 255]], dtype=uint8)
    """
    picture = pixels.clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
    return np.ascontiguousarray(np.broadcast_to(picture, (*picture.shape[:2], 3)))
