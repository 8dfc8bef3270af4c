"""A model as its config and its checkpoint say, and images as it takes them: what the tools begin with."""

import sys
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import List, Optional, Sequence, Tuple, Union

import mmcv
import numpy as np
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import load_checkpoint
from mmpretrain.registry import DATASETS, TRANSFORMS
from PIL import Image, ImageOps
from torch import Tensor

from ..models.networks.grid_network import GridNetwork
from .images import evenly_spread, image_files

HEAD_NUMBERS = 'attention_heads'  # of runtime_info in a checkpoint, see ``ConfigModel.head_numbers``


class ConfigModel:
    """A model in evaluation mode, its config, and images after the config's test pipeline.

    Args:
        path (str): The config.
        checkpoint (str): The checkpoint, which must fit the model in every key.
        options (dict, optional): Overrides settings of the config.

    Attributes:
        config (Config): The config.
        model (nn.Module): The model.
        meta (dict): What the checkpoint says of its training.
        head_numbers (dict[str, list[int]] | None): By layer, what its heads were called when the training began, where
            an ``AttentionVisualizationHook`` followed them.

    Raises:
        FileNotFoundError: No such config or checkpoint.
        ValueError: The checkpoint does not fit the model.
    """

    def __init__(self, path: str, checkpoint: str, options: Optional[dict] = None) -> None:
        self.path = path
        self.config = Config.fromfile(path)
        self.config.merge_from_dict(options or {})
        init_default_scope(self.config.get('default_scope', 'mmpretrain'))
        preprocessor = self.config.get('data_preprocessor')
        self.model = MODELS.build({'data_preprocessor': preprocessor, **self.config.model}).eval()
        try:
            loaded = load_checkpoint(self.model, checkpoint, map_location='cpu', strict=True)
        except RuntimeError as error:
            reason = shorten(str(error), 500, placeholder=' …')
            raise ValueError(f'{checkpoint} does not fit the model of {path}: {reason}') from error
        self.meta = loaded.get('meta', {})
        self.head_numbers = loaded.get('message_hub', {}).get('runtime_info', {}).get(HEAD_NUMBERS)

    @property
    def in_channels(self) -> int:
        """Number of channels of an image: 1 are grey ones."""
        return self.config.model.get('backbone', {}).get('in_channels', 3)

    @property
    def img_size(self) -> Optional[Tuple[int, int]]:
        """Height and width of the images that the model is for, in pixels; None if it does not say."""
        return next(
            (
                tuple(module.img_size)
                for module in self.model.modules()
                if isinstance(module, GridNetwork) and hasattr(module, 'img_size')
            ),
            None,
        )

    @property
    def grid(self) -> Tuple[int, int]:
        """Height and width in tokens of the grid that the network is for.

        Raises:
            ValueError: The model does not say.
        """
        if self.img_size is None:
            raise ValueError(f'the model of {self.path} has no img_size: give the size of its grid in tokens')
        stem = next(module.stem for module in self.model.modules() if isinstance(module, GridNetwork))
        return tuple(size // stem.reduction for size in self.img_size)

    @cached_property
    def test_set(self):
        """The dataset of the config's tests.

        Raises:
            ValueError: The config has none, or it cannot be built.
        """
        settings = self._test_settings
        try:
            return DATASETS.build(settings)
        except Exception as error:  # of any dataset
            raise ValueError(
                f'the test dataset of {self.path} cannot be read ({error}): give images of your own'
            ) from error

    def test_images(self, number: int) -> List[Tensor]:
        """Images of the test set, evenly spread, as those of :meth:`read`."""
        return [self.test_set[i]['inputs'] for i in evenly_spread(len(self.test_set), number)]

    def image(self, which: str) -> Tensor:
        """An image by its number in the test set or by its file, as those of :meth:`read`.

        Raises:
            ValueError: A number beyond the test set.
        """
        if not which.isdecimal():
            return self.read(which)
        if int(which) >= len(self.test_set):
            raise ValueError(f'image {which} must be a file, or below {len(self.test_set)}, the size of the test set')
        return self.test_set[int(which)]['inputs']

    def read_folder(self, folder: str, number: int) -> List[Tensor]:
        """Images of a folder and its subfolders, evenly spread, as those of :meth:`read`."""
        return [self.read(path) for path in image_files(folder, number)]

    def read(self, path: Union[str, Path]) -> Tensor:
        """An image from a file after the test pipeline, not normalized yet.

        Where the pipeline leaves it in another size than the model's, as that of a dataset with a single size does, it
        is scaled and cropped around its middle, which is said on the standard error stream.

        Args:
            path (str | Path): An image file, or an ``.npy`` array of uint8, ``(H, W)`` or ``(H, W, 3)``, red first.

        Returns:
            Tensor: ``(C, H, W)``, uint8, in the order of channels that the data preprocessor expects.

        Raises:
            FileNotFoundError: No such file.
            ValueError: The file holds no image; the config has no test pipeline.
        """
        image = self._load(path)
        inputs, size = self._transformed(image), self.img_size
        if size is not None and tuple(inputs.shape[1:]) != size:
            print(
                f'{path}: {by(inputs.shape[1:])} pixels after the test pipeline are scaled and cropped to '
                f'{by(size)}, the size of the model',
                file=sys.stderr,
            )
            fitted = ImageOps.fit(Image.fromarray(image), size[::-1], Image.Resampling.BICUBIC)
            inputs = self._transformed(np.array(fitted))
        return inputs

    def inputs(self, images: Sequence[Tensor]) -> Tensor:
        """Images that :meth:`read` or the test set gave, normalized, as the forward pass takes them, ``(B, C, H, W)``.

        Raises:
            ValueError: They have different sizes.
        """
        sizes = sorted({tuple(image.shape[1:]) for image in images})
        if len(sizes) > 1:
            raise ValueError(
                f'the images have {len(sizes)} different sizes after the test pipeline, such as '
                f'{by(sizes[0])} and {by(sizes[-1])}, but one is needed: give images of the same size'
            )
        return self.model.data_preprocessor(dict(inputs=list(images)), False)['inputs']

    def picture(self, image: Tensor) -> np.ndarray:
        """An image that :meth:`read` or the test set gave, for the eye, ``(H, W, 3)``, uint8, red first."""
        picture = image.clamp(0, 255).byte().permute(1, 2, 0).numpy()
        if self._blue_first:
            picture = picture[..., ::-1]
        return np.ascontiguousarray(np.broadcast_to(picture, (*picture.shape[:2], 3)))

    @property
    def _test_settings(self) -> dict:
        if self.config.get('test_dataloader') is None:
            raise ValueError(f'{self.path} has no test_dataloader: its pipeline says how images become inputs')
        return self.config.test_dataloader.dataset

    @cached_property
    def _steps(self) -> Tuple[List[dict], List[dict]]:
        """The settings of the test pipeline: what loads a file, if anything does, and what comes after it."""
        loading, others = [], []
        for step in self._test_settings.pipeline:
            name = step['type'] if isinstance(step['type'], str) else step['type'].__name__
            (loading if name.split('.')[-1] == 'LoadImageFromFile' else others).append(step)
        return loading, others

    @property
    def _blue_first(self) -> bool:
        """The order of colours in the pipeline: that of files, unless images are in memory already, red first."""
        return bool(self._steps[0]) or self.model.data_preprocessor.to_rgb

    def _load(self, path: Union[str, Path]) -> np.ndarray:
        """A file as the pipeline loads it, ``(H, W, 3)``, in the pipeline's order of colours, or ``(H, W)`` if grey."""
        grey = self.in_channels == 1
        if Path(path).suffix == '.npy':
            image = np.load(path)
            if image.dtype != np.uint8 or image.ndim not in (2, 3) or image.ndim == 3 and image.shape[2] != 3:
                raise ValueError(
                    f'{path} is an array of {image.dtype} and shape {image.shape}, but an image is of '
                    'uint8, (H, W) or (H, W, 3)'
                )
            image = np.array(Image.fromarray(image).convert('L' if grey else 'RGB'))
            return np.ascontiguousarray(image[..., ::-1]) if self._blue_first and not grey else image
        default = dict(type='LoadImageFromFile', color_type='grayscale' if grey else 'color')
        try:
            image = TRANSFORMS.build((self._steps[0] or [default])[0])(dict(img_path=str(path)))['img']
        except FileNotFoundError:
            raise
        except Exception as error:  # of any decoder
            raise ValueError(f'{path} cannot be read as an image: {error}') from error
        return image if grey or self._blue_first else mmcv.bgr2rgb(image)

    def _transformed(self, image: np.ndarray) -> Tensor:
        pipeline = Compose([TRANSFORMS.build(step) for step in self._steps[1]])
        return pipeline(dict(img=image, img_shape=image.shape[:2], ori_shape=image.shape[:2]))['inputs']


def by(size: Sequence[int]) -> str:
    """``'32x48'``"""
    return 'x'.join(map(str, size))
