"""A model of any of three libraries with images as it takes them, as the tools need it."""

import difflib
import shutil
import sys
from argparse import Namespace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from textwrap import shorten
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import timm
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import save
from timm.data import create_transform, resolve_model_data_config
from timm.layers import to_2tuple
from torch import Tensor, nn

from .checkpoint_files import load_from_local
from .hugging_face import load_hugging_face
from .models import CMHSANetwork, SelfAttentionNetwork
from .structure import follow_state_dict


def evenly_spread(length: int, number: int) -> List[int]:
    """Returns indices of ``number`` elements of a sequence, or of all of them, where it has fewer.

    They are spread evenly, since the first elements of many data sets are of one class.
    """
    number = min(length, number)
    return [i * length // number for i in range(number)]


def write_checkpoint(path: Union[str, Path], state_dict: Mapping[str, Tensor], **others: Any) -> None:
    """Writes a state dict to a new file: alone if its name ends in ``.safetensors``, with other entries if not."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if Path(path).suffix == '.safetensors':
        Path(path).write_bytes(save({name: value.contiguous() for name, value in state_dict.items()}))
    else:
        with open(path, 'wb') as file:
            torch.save({'state_dict': state_dict, **others}, file)


SUFFIXES = {'.bmp', '.jpeg', '.jpg', '.png', '.ppm', '.tif', '.tiff', '.webp'}


PREPROCESSOR = 'preprocessor_config.json'  # of Hugging Face: how images become inputs


class LoadedModel:
    """A model in evaluation mode, and images for it: what the models of all libraries have in common.

    All have ``test_images(number)``, the images of the model's own tests; ``image(which)``, one by its number among
    them or by its file; ``read(path)``, a file after the transforms of the tests, ``(C, H, W)``; ``inputs(images)``,
    those images as the forward pass takes them, ``(B, C, H, W)``; and ``picture(image)``, one to look at,
    ``(H, W, 3)``, uint8, red first.

    Attributes:
        name (str): The config, the name of the model in timm, or the folder of one of Hugging Face transformers.
        model (nn.Module): The model.
        meta (dict): The information about its training that the checkpoint holds.
        input_shape (tuple[int, int, int] | None): Channels, height and width of an image as the model takes it; None
            where it does not say.
        head_numbers (dict[str, list[int]] | None): By layer, what its heads were called when the training began, where
            an ``AttentionVisualizationHook`` followed them.
    """

    name: str
    model: Any
    meta: Dict[str, Any]
    input_shape: Optional[Tuple[int, int, int]]
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
        size = self.img_size or (self._network and self.input_shape and self.input_shape[1:])
        if not size:
            raise ValueError(f'the model of {self.name} has no img_size: give the size of its grid in tokens')
        height, width = size
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

    def save(self, path: str) -> None:
        """Saves the model, whose heads are fewer by now, in the form that it was read in."""
        write_checkpoint(path, self.model.state_dict(), meta=self.meta)

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


class FileModel(LoadedModel):
    """A model without a test dataset: its images are files."""

    num_channels: int
    mean: Sequence[float]
    std: Sequence[float]
    transform: Any  # of a PIL image, to what the model takes, (C, H, W)

    def test_images(self, number: int) -> List[Tensor]:
        raise ValueError(f'{self.name} has no test dataset: give images of your own, --images FOLDER')

    def image(self, which: str) -> Tensor:
        if which.isdecimal() and not Path(which).exists():
            raise ValueError(f'image {which} must be a file: {self.name} has no test dataset')
        return self.read(which)

    def read(self, path: Union[str, Path]) -> Tensor:
        try:
            with Image.open(path) as image:
                if image.mode.startswith('I'):  # levels of 16 bits, most of which are white after convert()
                    image = image.convert('I').point(lambda level: level / 256)
                pixels = image.convert('L' if self.num_channels == 1 else 'RGB')
        except OSError as error:
            raise ValueError(f'{path} cannot be read as an image: {error}') from error
        return self.transform(pixels)

    def inputs(self, images: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(images))

    def picture(self, image: Tensor) -> np.ndarray:
        mean, std = (torch.tensor(values, device='cpu')[:, None, None] for values in (self.mean, self.std))
        return rgb_picture((255 * (image * std + mean)).round())


def create_timm(name: str, argument: str, **settings: Any) -> nn.Module:
    """Returns a model of timm, by ``timm.create_model``.

    Raises:
        ValueError: timm has no model of this name; the message begins with the tool's argument, and has similar names.
    """
    try:
        return timm.create_model(name, **settings)
    except RuntimeError as error:
        if ':' in name or timm.is_model(name):  # of a hub, or a model that cannot be built so
            raise
        similar = difflib.get_close_matches(name, timm.list_models())
        advice = f'did you mean {" or ".join(similar)}?' if similar else 'timm.list_models() has the names'
        raise ValueError(f'{argument} {name} is no model of timm: {advice}') from error


class TimmModel(FileModel):
    """A model of timm in evaluation mode, and images after the transforms of its tests.

    Args:
        name (str): Its name in timm.
        checkpoint (str, optional): Its weights. Defaults to None.
        pretrained (bool): Whether to take timm's pretrained weights. Defaults to False. Without these and without a
            checkpoint the weights are random, and a line on the standard error stream says so.
        settings (dict, optional): Of ``timm.create_model``, such as ``num_classes``.

    Raises:
        FileNotFoundError: No such checkpoint.
        ValueError: No such model, or the checkpoint does not fit.
    """

    def __init__(
        self,
        name: str,
        checkpoint: Optional[str] = None,
        pretrained: bool = False,
        settings: Optional[Dict[str, Any]] = None,
    ) -> None:
        self.name, self.meta, self.head_numbers = name, {}, None
        settings = settings or {}
        self.model = create_timm(name, '--timm', pretrained=pretrained, **settings).eval()
        if checkpoint is not None:
            state_dict = read_timm(checkpoint)
            try:
                follow_state_dict(self.model, state_dict, strict=False)
                self.model.load_state_dict(state_dict)
            except RuntimeError as error:
                reason = shorten(str(error), 400, placeholder=' …')
                raise ValueError(
                    f'{checkpoint} does not fit {name}: {reason}; give the settings that it was trained with, such as '
                    '--model-kwargs num_classes=10 img_size=32, or another --timm'
                ) from error
        elif not pretrained:
            print(f'The weights of {name} are random: give --pretrained or --checkpoint', file=sys.stderr)
        data = resolve_model_data_config(self.model)
        self.num_channels = settings.get('in_chans', data['input_size'][0])
        self.input_shape = (self.num_channels, *to_2tuple(settings.get('img_size', data['input_size'][1:])))
        data['input_size'] = self.input_shape
        if self.num_channels == 1:
            data.update({name: (fmean(data[name]),) for name in ('mean', 'std')})
        self.mean, self.std = data['mean'], data['std']
        self.transform = create_transform(**data, is_training=False)


def read_timm(checkpoint: str) -> Dict[str, Any]:
    """Returns the state dict in a checkpoint, the average's in one of timm's ``train.py`` that has one.

    Raises:
        FileNotFoundError: No such file.
        ValueError, UnpicklingError: It is damaged, or not safe to load.
    """
    if not Path(checkpoint).is_file():
        raise FileNotFoundError(f'--checkpoint {checkpoint} is no file')
    with torch.serialization.safe_globals([Namespace]):  # the options of timm's train.py
        if Path(checkpoint).suffix != '.safetensors':
            load_from_local(checkpoint, mmap=True)  # refuses damaged and malicious files
        try:
            return timm.models.load_state_dict(checkpoint, weights_only=True)
        except SafetensorError as error:
            raise ValueError(f'--checkpoint {checkpoint} is damaged or no safetensors file: {error}') from error


class HuggingFaceModel(FileModel):
    """A model of Hugging Face transformers in evaluation mode, and images as its folder says.

    Without a ``preprocessor_config.json`` they have the size in the configuration, and the mean and deviation 0.5; a
    line on the standard error stream says so.

    Args:
        folder (str): Where ``save_pretrained`` has saved it, pruned or not.

    Raises:
        ImportError: Hugging Face transformers is not installed.
        ValueError: There is no such model.
    """

    def __init__(self, folder: str) -> None:
        self.name, self.meta, self.head_numbers = folder, {}, None
        if not Path(folder, 'config.json').is_file():
            raise ValueError(f'--hf {folder} has no config.json: give a folder that save_pretrained has written')
        try:
            self.model: Any = load_hugging_face(folder)
            self._processor = self._load_processor()
        except (OSError, RuntimeError, SafetensorError, ValueError) as error:
            reason = ' '.join(str(error).splitlines()[:2])
            raise ValueError(f'--hf {folder} cannot be loaded: {reason}') from error
        self._saved_dtype = self.model.dtype
        self.model.float()
        processor = self._processor
        self.mean, self.std = (processor.image_mean, processor.image_std) if processor.do_normalize else ([0.0], [1.0])

    def _load_processor(self) -> Any:
        from transformers import AutoImageProcessor, ViTImageProcessor

        config = self.model.config
        self.num_channels = getattr(config, 'num_channels', 3)
        self.input_shape = (self.num_channels, *to_2tuple(getattr(config, 'image_size', 224)))
        if Path(self.name, PREPROCESSOR).is_file():
            return AutoImageProcessor.from_pretrained(self.name)
        _, height, width = self.input_shape
        reason = f'{self.name} has no {PREPROCESSOR}: images are scaled to {height}x{width} pixels, with mean and'
        print(f'{reason} deviation 0.5', file=sys.stderr)
        half = [0.5] * self.num_channels
        return ViTImageProcessor(size=dict(height=height, width=width), image_mean=half, image_std=half)

    def transform(self, image: Image.Image) -> Tensor:
        return self._processor(image, return_tensors='pt')['pixel_values'][0]

    def save(self, path: str) -> None:
        self.model.to(self._saved_dtype).save_pretrained(path)
        if Path(self.name, PREPROCESSOR).is_file():
            shutil.copy(Path(self.name, PREPROCESSOR), path)
