"""A model of timm by its name, and images as its data configuration says."""

import sys
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

import numpy as np
import timm
import torch
from PIL import Image, UnidentifiedImageError
from timm.data import create_transform, resolve_model_data_config
from timm.layers import to_2tuple
from torch import Tensor

from ..structure import follow_state_dict
from ..utils.checkpoint_files import load_from_local
from .loaded_model import LoadedModel, rgb_picture

OTHER_FORMATS = ('.safetensors', '.npz', '.npy')  # which timm reads itself


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
            if Path(checkpoint).suffix not in OTHER_FORMATS:
                load_from_local(checkpoint, mmap=True)  # refuses damaged and malicious files
            if Path(checkpoint).suffix in ('.npz', '.npy'):
                timm.models.load_checkpoint(self.model, checkpoint)
            else:
                state_dict = timm.models.load_state_dict(checkpoint, weights_only=True)
                follow_state_dict(self.model, state_dict)
                self.model.load_state_dict(state_dict)
        elif not pretrained:
            print(f'The weights of {name} are random: give --pretrained or --checkpoint', file=sys.stderr)

    def test_images(self, number: int) -> List[Tensor]:
        raise ValueError(
            f'{self.name} is a model of timm, which has no test dataset: give images of your own (--images FOLDER of '
            'the tools)'
        )

    def image(self, which: str) -> Tensor:
        if which.isdecimal() and not Path(which).exists():
            raise ValueError(f'image {which} must be a file: {self.name}, a model of timm, has no test dataset')
        return self.read(which)

    def read(self, path: Union[str, Path]) -> Tensor:
        try:
            with Image.open(path) as image:
                return self._transform(image.convert('L' if self._is_grey else 'RGB'))
        except UnidentifiedImageError as error:
            raise ValueError(f'{path} cannot be read as an image: {error}') from error

    def inputs(self, images: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(images))

    def picture(self, image: Tensor) -> np.ndarray:
        mean, std = (torch.tensor(self._data[name])[:, None, None] for name in ('mean', 'std'))
        return rgb_picture((255 * (image * std + mean)).round())

    @cached_property
    def _data(self) -> Dict[str, Any]:
        """The data configuration for the settings of the model."""
        data = resolve_model_data_config(self.model)
        channels, *size = data['input_size']
        channels = self._model_settings.get('in_chans', channels)
        data['input_size'] = (channels, *to_2tuple(self._model_settings.get('img_size', size)))
        if channels == 1:
            data.update({name: (fmean(data[name]),) for name in ('mean', 'std')})
        return data

    @property
    def _is_grey(self) -> bool:
        return self._data['input_size'][0] == 1

    @cached_property
    def _transform(self) -> Callable[[Image.Image], Tensor]:
        return create_transform(**self._data, is_training=False)
