"""Loads a model of mmpretrain by its config and its checkpoint, with the images of its tests and its training."""

import sys
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import Any, List, Optional, Sequence, Tuple

import mmcv
import numpy as np
from mmcv.transforms import LoadImageFromFile
from mmengine.config import DictAction  # noqa: F401
from mmengine.dataset import Compose
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import CheckpointLoader, Runner, load_state_dict
from mmpretrain.models import ImageClassifier
from mmpretrain.registry import DATASETS
from PIL import Image, ImageOps
from timm.layers import to_2tuple
from torch import Tensor

from ..attention.state_dicts import without_prefix
from ..mm.runner import training_loss
from ..mm.tools import one_line, read_config
from ..pruning.importance import Loss
from ..structure import follow_state_dict
from .model import BATCH_SIZE, LoadedModel, rgb_picture


class ConfigModel(LoadedModel):
    """A model of mmpretrain, whose images go through the test pipeline of its config.

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
        self.name, self.config = path, read_config(path)
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
        backbone = self.config.model.get('backbone', {})
        channels = backbone.get('backbone', backbone).get('in_channels', 3)  # ConvToAttention has one inside
        built = getattr(self.model, 'backbone', self.model)
        size = getattr(built, 'img_size', None)
        self.shape = (channels, *to_2tuple(size)) if size and isinstance(self.model, ImageClassifier) else None
        self.size = to_2tuple(size) if size and built.__module__.startswith(__package__.partition('.')[0]) else None
        self.is_grey = channels == 1

    @cached_property
    def test_set(self) -> Any:
        """The dataset of the config's tests; raises ``ValueError`` where there is none that can be built."""
        try:
            return DATASETS.build(self._test_settings)
        except Exception as error:  # of any dataset
            raise ValueError(f'the test set of {self.name} cannot be read ({error}): give --images FOLDER') from error

    def read(self, path: str) -> Tuple[Tensor, np.ndarray]:
        """Returns an image, named by its number in the test set or by its file, as tensor and as picture.

        An image whose size is not the model's after the pipeline is scaled and cropped around its middle, and a line on
        the standard error stream says so.
        """
        if path.isdecimal() and not Path(path).exists():
            if int(path) >= (number := len(self.test_set)):
                raise ValueError(f'image {path} must be a file, or below {number}, the size of the test set')
            inputs = self.test_set[int(path)]['inputs']
        else:
            inputs = self._read_file(path)
        pixels = rgb_picture(inputs.flip(0) if self._blue_first else inputs)
        return self.model.data_preprocessor(dict(inputs=[inputs]), False)['inputs'][0], pixels

    def batches(self, paths: Optional[Sequence[str]], number: int) -> Tuple[List[Any], Loss, str]:
        if paths is not None:
            return super().batches(paths, number)
        if self.config.get('train_dataloader') is None:
            raise ValueError(f'{self.name} has no train_dataloader: give --images FOLDER')
        settings = {**self.config.train_dataloader, 'batch_size': min(number, BATCH_SIZE)}
        loader = Runner.build_dataloader(settings, seed=0)
        batches = [batch for batch, _ in zip(loader, range(-(-number // BATCH_SIZE)))]
        if isinstance(self.model, ImageClassifier) and 'gt_score' not in batches[0]['data_samples'][0]:
            self.model.head.cal_acc = True  # its loss comes with the accuracy
        return batches, training_loss, 'its training labels say'

    def _read_file(self, path: str) -> Tensor:
        loader, rest = self._pipeline
        try:
            load = loader or LoadImageFromFile(color_type='grayscale' if self.is_grey else 'color')
            image = load(dict(img_path=path))['img']
        except Exception as error:  # of any decoder
            raise ValueError(f'{path} cannot be read as an image ({error}): give a file such as PNG or JPEG') from error
        if not self.is_grey and not self._blue_first:
            image = mmcv.bgr2rgb(image)
        transform = lambda own: rest(dict(img=own, img_shape=own.shape[:2], ori_shape=own.shape[:2]))['inputs']  # noqa: E731
        inputs = transform(image)
        size = tuple(inputs.shape[1:])
        if self.size in (None, size):
            return inputs
        said = f'{path}: {size} pixels after the test pipeline are scaled and cropped to {self.size}, the size of the'
        print(f'{said} model', file=sys.stderr)
        fitted = ImageOps.fit(Image.fromarray(image), self.size[::-1], Image.Resampling.BICUBIC)
        return transform(np.array(fitted))

    @property
    def _test_settings(self) -> Any:
        if self.config.get('test_dataloader') is None:
            raise ValueError(f'{self.name} has no test_dataloader: its pipeline says how images become inputs')
        return self.config.test_dataloader.dataset

    @cached_property
    def _pipeline(self) -> Tuple[Optional[LoadImageFromFile], Compose]:
        """The test pipeline: the transform that loads files, if there is one, and the others."""
        settings = self._test_settings
        while 'pipeline' not in settings and 'dataset' in settings:  # as those of BalancedSubset
            settings = settings.dataset
        transforms = Compose(settings.pipeline).transforms
        loader = next((transform for transform in transforms if isinstance(transform, LoadImageFromFile)), None)
        return loader, Compose([transform for transform in transforms if transform is not loader])

    @property
    def _blue_first(self) -> bool:
        """Whether the pipeline's colours are in the order BGR, that of files; images in memory are RGB."""
        return self._pipeline[0] is not None or self.model.data_preprocessor.to_rgb
