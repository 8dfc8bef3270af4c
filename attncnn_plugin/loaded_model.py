"""A model of either framework with images as it takes them, as the tools need it."""

import sys
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
import timm
import torch
from PIL import Image, UnidentifiedImageError
from timm.data import create_transform, resolve_model_data_config
from timm.layers import to_2tuple
from torch import Tensor

from .checkpoint_files import load_from_local
from .models import CMHSANetwork, SelfAttentionNetwork
from .structure import follow_state_dict


def evenly_spread(length: int, number: int) -> List[int]:
    """Returns indices of ``number`` elements of a sequence, or of all of them, where it has fewer.

    They are spread evenly, since the first elements of many data sets are of one class.
    """
    number = min(length, number)
    return [i * length // number for i in range(number)]


SUFFIXES = {'.bmp', '.jpeg', '.jpg', '.png', '.ppm', '.tif', '.tiff', '.webp'}


class LoadedModel:
    """A model in evaluation mode, and images for it: what a model of mmpretrain's and one of timm's have in common.

    Both have ``test_images(number)``, the images of the model's own tests; ``image(which)``, one by its number among
    them or by its file; ``read(path)``, a file after the transforms of the tests, ``(C, H, W)``; ``inputs(images)``,
    those images as the forward pass takes them, ``(B, C, H, W)``; and ``picture(image)``, one to look at,
    ``(H, W, 3)``, uint8, red first.

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
        """Returns height and width in pixels of the images that a network of this package is for; None of others."""
        return getattr(self._network, 'img_size', None)

    @property
    def grid(self) -> Tuple[int, int]:
        """Returns height and width in tokens of the grid that a network of this package is for.

        Raises:
            ValueError: The model does not say.
        """
        if self.img_size is None:
            raise ValueError(f'the model of {self.name} has no img_size: give the size of its grid in tokens')
        height, width = self.img_size
        return height // self._network.stem.reduction, width // self._network.stem.reduction

    def read_folder(self, folder: str, number: int) -> List[Tensor]:
        """Returns images of a folder and its subfolders, evenly spread by name, as those of ``read``.

        Raises:
            ValueError: There are none.
        """
        files = sorted(path for path in Path(folder).rglob('*') if path.suffix.lower() in SUFFIXES)
        if not files:
            raise ValueError(f'{folder} holds no image files ({" ".join(sorted(SUFFIXES))})')
        return [self.read(files[i]) for i in evenly_spread(len(files), number)]

    def some_inputs(self, folder: Optional[str], number: int) -> Tensor:
        """Returns images of a folder, or of the model's own tests, as the forward pass takes them, ``(B, C, H, W)``."""
        return self.inputs(self.test_images(number) if folder is None else self.read_folder(folder, number))

    @cached_property
    def _network(self) -> Any:
        own = (CMHSANetwork, SelfAttentionNetwork)
        return next((module for module in self.model.modules() if isinstance(module, own)), None)


def rgb_picture(pixels: Tensor) -> np.ndarray:
    """Returns pixels from 0 to 255, ``(C, H, W)``, grey or red first, as a picture ``(H, W, 3)``, uint8.

    Examples:
        >>> rgb_picture(torch.tensor([[[-1.0, 300.0]]]))[..., 0]
        array([[  0, 255]], dtype=uint8)
    """
    picture = pixels.clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
    return np.ascontiguousarray(np.broadcast_to(picture, (*picture.shape[:2], 3)))


class TimmModel(LoadedModel):
    """A model of timm in evaluation mode, and images after the transforms of its tests.

    Args:
        name (str): Its name in timm.
        checkpoint (str, optional): Its weights. Defaults to None.
        pretrained (bool): Whether to take timm's pretrained weights. Defaults to False. Without these and without a
            checkpoint the weights are random, and a line on the standard error stream says so.
        settings (dict, optional): Of ``timm.create_model``.

    Raises:
        FileNotFoundError: No such checkpoint.
        RuntimeError: No such model.
        ValueError: The checkpoint does not fit.
    """

    def __init__(
        self,
        name: str,
        checkpoint: Optional[str] = None,
        pretrained: bool = False,
        settings: Optional[Dict[str, Any]] = None,
    ) -> None:
        self.name, self.meta, self.head_numbers = name, {}, None
        self._model_settings = settings or {}
        self.model = timm.create_model(name, pretrained=pretrained, **self._model_settings).eval()
        if checkpoint is not None:
            if Path(checkpoint).suffix != '.safetensors':
                load_from_local(checkpoint, mmap=True)  # refuses damaged and malicious files
            state_dict = timm.models.load_state_dict(checkpoint, weights_only=True)
            follow_state_dict(self.model, state_dict)
            self.model.load_state_dict(state_dict)
        elif not pretrained:
            print(f'The weights of {name} are random: give --pretrained or --checkpoint', file=sys.stderr)

    def test_images(self, number: int) -> List[Tensor]:
        raise ValueError(f'{self.name}, a model of timm, has no test dataset: give images of your own, --images FOLDER')

    def image(self, which: str) -> Tensor:
        if which.isdecimal() and not Path(which).exists():
            raise ValueError(f'image {which} must be a file: {self.name}, a model of timm, has no test dataset')
        return self.read(which)

    def read(self, path: Union[str, Path]) -> Tensor:
        try:
            with Image.open(path) as image:
                return self._transform(image.convert('L' if self._data['input_size'][0] == 1 else 'RGB'))
        except UnidentifiedImageError as error:
            raise ValueError(f'{path} cannot be read as an image: {error}') from error

    def inputs(self, images: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(images))

    def picture(self, image: Tensor) -> np.ndarray:
        mean, std = (torch.tensor(self._data[name])[:, None, None] for name in ('mean', 'std'))
        return rgb_picture((255 * (image * std + mean)).round())

    @cached_property
    def _data(self) -> Dict[str, Any]:
        """Returns the data configuration for the settings of the model."""
        data = resolve_model_data_config(self.model)
        channels, *size = data['input_size']
        channels = self._model_settings.get('in_chans', channels)
        data['input_size'] = (channels, *to_2tuple(self._model_settings.get('img_size', size)))
        if channels == 1:
            data.update({name: (fmean(data[name]),) for name in ('mean', 'std')})
        return data

    @cached_property
    def _transform(self) -> Callable[[Image.Image], Tensor]:
        return create_transform(**self._data, is_training=False)
