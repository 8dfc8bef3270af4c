"""A model as its config and its checkpoint say, and images as it takes them."""

import sys
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import List, Optional, Sequence, Tuple, Union

import mmcv
import numpy as np
from mmcv.transforms import LoadImageFromFile
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import CheckpointLoader, load_state_dict
from mmpretrain.models import ImageClassifier
from mmpretrain.registry import DATASETS
from PIL import Image, ImageOps
from timm.layers import to_2tuple
from torch import Tensor

from ..attention.state_dicts import without_prefix
from ..loaded_model import LoadedModel, evenly_spread, rgb_picture
from ..structure import follow_state_dict
from .runner import HEAD_NUMBERS
from .tools import one_line, read_config


class ConfigModel(LoadedModel):
    """A model in evaluation mode, its config, and images after the config's test pipeline.

    mmpretrain's ``ImageClassificationInferencer`` reads every file in colour and blue first, which is wrong for models
    of grey images and for datasets in memory. It fits no image to the model either.

    Args:
        path (str): The config.
        checkpoint (str): The checkpoint, which must fit the model in every key.
        options (dict, optional): Overrides settings of the config.

    Raises:
        FileNotFoundError: No such config or checkpoint.
        ValueError: The config names an unknown type or argument, or the checkpoint does not fit the model.

    Attributes:
        entries (set[str]): The names of what the checkpoint holds.
    """

    def __init__(self, path: str, checkpoint: str, options: Optional[dict] = None) -> None:
        self.name = path
        self.config: Config = read_config(path)
        self.config.merge_from_dict(options or {})
        init_default_scope(self.config.get('default_scope') or 'mmpretrain')
        if self.config.get('data_preprocessor') is not None:  # as mmengine's runner does
            self.config.model.setdefault('data_preprocessor', self.config.data_preprocessor)
        try:
            self.model = MODELS.build(self.config.model)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f'{path}: {one_line(error)}') from error
        self.model.eval()  # which returns nothing for some backbones
        try:
            loaded = CheckpointLoader.load_checkpoint(checkpoint, map_location='cpu')
            state_dict = without_prefix(loaded.get('state_dict', loaded), 'module.')
            follow_state_dict(self.model, state_dict, strict=False)
            load_state_dict(self.model, state_dict, strict=True)
        except RuntimeError as error:
            reason = shorten(str(error), 500, placeholder=' …')
            raise ValueError(f'{checkpoint} does not fit the model of {path}: {reason}') from error
        self.meta, self.entries = loaded.get('meta', {}), set(state_dict)
        size = self.img_size or getattr(getattr(self.model, 'backbone', None), 'img_size', None)
        is_classifier = isinstance(self.model, ImageClassifier) and size is not None
        self.input_shape = (self._in_channels, *to_2tuple(size)) if is_classifier else None
        self.head_numbers = loaded.get('message_hub', {}).get('runtime_info', {}).get(HEAD_NUMBERS)

    @cached_property
    def test_set(self):
        """Returns the dataset of the config's tests; raises ``ValueError`` where there is none that can be built."""
        settings = self._test_settings
        try:
            return DATASETS.build(settings)
        except Exception as error:  # of any dataset
            raise ValueError(
                f'the test dataset of {self.name} cannot be read ({error}): give images of your own'
            ) from error

    def test_images(self, number: int) -> List[Tensor]:
        """Returns images of the test set, evenly spread, as those of :meth:`read`."""
        return [self.test_set[i]['inputs'] for i in evenly_spread(len(self.test_set), number)]

    def image(self, which: str) -> Tensor:
        """Returns an image by its number in the test set or by its file, as those of :meth:`read`."""
        if not which.isdecimal():
            return self.read(which)
        if int(which) >= len(self.test_set):
            raise ValueError(f'image {which} must be a file, or below {len(self.test_set)}, the size of the test set')
        return self.test_set[int(which)]['inputs']

    def read(self, path: Union[str, Path]) -> Tensor:
        """Returns an image from a file after the test pipeline, not normalized yet, ``(C, H, W)``, uint8.

        An image whose size is not the model's after the pipeline is scaled and cropped around its middle, and a line on
        the standard error stream says so.

        Raises:
            FileNotFoundError: No such file.
            ValueError: The file holds no image; the config has no test pipeline.
        """
        image = self._load(path)
        inputs = self._transform(image)
        size = tuple(inputs.shape[1:])
        if self.img_size not in (None, size):
            print(
                f'{path}: {size} pixels after the test pipeline are scaled and cropped to {self.img_size}, the size of '
                'the model',
                file=sys.stderr,
            )
            fitted = ImageOps.fit(Image.fromarray(image), self.img_size[::-1], Image.Resampling.BICUBIC)
            inputs = self._transform(np.array(fitted))
        return inputs

    def inputs(self, images: Sequence[Tensor]) -> Tensor:
        """Returns images of :meth:`read` or of the test set, normalized; raises ``ValueError`` for different sizes."""
        sizes = sorted({tuple(image.shape[1:]) for image in images})
        if len(sizes) > 1:
            raise ValueError(
                f'the images have {len(sizes)} different sizes after the test pipeline, such as {sizes[0]} and '
                f'{sizes[-1]}, but one is needed: give images of the same size'
            )
        return self.model.data_preprocessor(dict(inputs=list(images)), False)['inputs']

    def picture(self, image: Tensor) -> np.ndarray:
        """Returns an image of :meth:`read` or of the test set to look at, ``(H, W, 3)``, uint8, red first."""
        return rgb_picture(image.flip(0) if self._blue_first else image)

    @property
    def _in_channels(self) -> int:
        backbone = self.config.model.get('backbone', {})
        return backbone.get('backbone', backbone).get('in_channels', 3)  # ConvToAttention has one inside

    @property
    def _test_settings(self) -> dict:
        if self.config.get('test_dataloader') is None:
            raise ValueError(f'{self.name} has no test_dataloader: its pipeline says how images become inputs')
        return self.config.test_dataloader.dataset

    @cached_property
    def _pipeline(self) -> Tuple[Optional[LoadImageFromFile], Compose]:
        """Returns the test pipeline: the transform that loads files, if there is one, and the others."""
        settings = self._test_settings
        while 'pipeline' not in settings and 'dataset' in settings:  # as those of BalancedSubset
            settings = settings.dataset
        transforms = Compose(settings.pipeline).transforms
        loader = next((transform for transform in transforms if isinstance(transform, LoadImageFromFile)), None)
        return loader, Compose([transform for transform in transforms if transform is not loader])

    @property
    def _blue_first(self) -> bool:
        """Returns True if colours in the pipeline are as in files; images in memory are red first."""
        return self._pipeline[0] is not None or self.model.data_preprocessor.to_rgb

    def _load(self, path: Union[str, Path]) -> np.ndarray:
        """Returns a file as the pipeline loads it, ``(H, W, 3)``, in its order of colours, or ``(H, W)`` if grey."""
        is_grey = self._in_channels == 1
        loader = self._pipeline[0] or LoadImageFromFile(color_type='grayscale' if is_grey else 'color')
        try:
            image = loader(dict(img_path=str(path)))['img']
        except FileNotFoundError:
            raise
        except Exception as error:  # of any decoder
            raise ValueError(f'{path} cannot be read as an image ({error}): give a file such as PNG or JPEG') from error
        return image if is_grey or self._blue_first else mmcv.bgr2rgb(image)

    def _transform(self, image: np.ndarray) -> Tensor:
        """Returns an image after the rest of the pipeline."""
        size = image.shape[:2]
        return self._pipeline[1](dict(img=image, img_shape=size, ori_shape=size))['inputs']
