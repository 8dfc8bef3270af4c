"""Loads a timm, Hugging Face or mmpretrain model together with its preprocessing and its images."""

import difflib
import os
import shutil
import sys
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from textwrap import shorten
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import timm
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import save
from timm.data import create_transform, resolve_model_data_config
from timm.layers import to_2tuple
from timm.utils import ParseKwargs
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from ..analysis.recorder import attention_layers
from ..checkpoint_files import load_from_local
from ..hugging_face import load_hugging_face
from ..pruning.importance import Loss
from ..structure import follow_state_dict

SUFFIXES = {'.bmp', '.jpeg', '.jpg', '.png', '.ppm', '.tif', '.tiff', '.webp'}
PREPROCESSOR = 'preprocessor_config.json'  # of Hugging Face: how images become inputs
BATCH_SIZE = 32


class Picture(NamedTuple):
    """An image: its name, the model's input, ``(C, H, W)``, a picture to look at, ``(H, W, 3)``, RGB, and its class."""

    name: str
    tensor: Tensor
    pixels: np.ndarray
    label: Optional[int] = None


class LoadedModel:
    """A model in evaluation mode, with its preprocessing and its images; each library has a subclass.

    Attributes:
        name (str): Its name in timm, its folder, or its config.
        model (nn.Module): The model.
        shape (tuple[int, int, int] | None): Channels, height and width of an image; None where it does not say.
        transform (Callable): From an image of PIL to the model's input, ``(C, H, W)``.
        mean, std (Sequence[float]): With which the transform normalizes channels.
        meta (dict): What an mmengine checkpoint says of its training.
        test_set (Sequence): Its test set, for a model that comes with one.
    """

    meta: Dict[str, Any] = {}
    test_set: Sequence[Any] = ()

    def read(self, path: str) -> Tuple[Tensor, np.ndarray]:
        """Returns an image file as the tensor that the model takes, and as a picture to look at."""
        if path.isdecimal() and not Path(path).exists():
            raise ValueError(f'image {path} must be a file: {self.name} has no test set')
        try:
            with Image.open(path) as image:
                if image.mode == 'F' or (image.mode, image.format) == ('I', 'TIFF'):
                    raise OSError('its levels have 32 bits: save it with 8 or 16')
                if image.mode.startswith('I'):  # levels of 16 bits, most of which are white after convert()
                    image = image.convert('I').point(lambda level: level / 256)
                pixels = image.convert('L' if self.shape and self.shape[0] == 1 else 'RGB')
        except (OSError, Image.DecompressionBombError) as error:
            raise ValueError(f'{path} cannot be read as an image: {error}') from error
        tensor = self.transform(pixels)
        mean, std = (torch.tensor(own, device='cpu')[:, None, None] for own in (self.mean, self.std))
        return tensor, rgb_picture((255 * (tensor * std + mean)).round())

    def images(self, paths: Optional[Sequence[str]], number: int) -> List[Picture]:
        """Returns images of files and folders, or of the model's test set, evenly spread.

        Those of one folder with subfolders have a label, the subfolder's number by name, as torchvision's
        ``ImageFolder`` gives it.

        Raises:
            ValueError: There are none, or one that cannot be read.
        """
        if paths is None and not len(self.test_set):
            raise ValueError(f'{self.name} has no test set: give images of your own, --images FOLDER')
        found = [(str(i), None) for i in range(len(self.test_set))] if paths is None else []
        for path in paths or ():
            found += files_in(path) if Path(path).is_dir() else [(path, None)]
        number = min(number, len(found))
        chosen = [found[i * len(found) // number] for i in range(number)]
        is_one = paths is not None and len(paths) == 1
        read = bar_of(chosen, 'images')
        return [Picture(name_of(path), *self.read(path), label if is_one else None) for path, label in read]

    def inputs_for_means(self, paths: Optional[Sequence[str]], number: int) -> Tensor:
        """Returns the inputs of :meth:`images`, ``(B, C, H, W)``.

        It is any one image where none are given and all attention is by position.
        """
        layers = attention_layers(self.model).values()
        if paths is None and self.shape and layers and not any(own.depends_on_content for own in layers):
            return torch.zeros(1, *self.shape)
        return stacked(self.images(paths, number))

    def example(self) -> Optional[Tensor]:
        """Returns an image of random numbers, where the model says its size."""
        return None if self.shape is None else torch.rand(1, *self.shape)

    def batches(self, paths: Optional[Sequence[str]], number: int) -> Tuple[List[Any], Loss, str]:
        """Returns batches of images, a function of loss and number of right predictions, and where labels come from.

        Raises:
            ValueError: As of :meth:`images`; the model gives no logits, or has other classes than the folder.
        """
        images = self.images(paths, number)
        inputs, labels = stacked(images).split(BATCH_SIZE), [image.label for image in images]
        with torch.no_grad():
            logits = torch.cat([logits_of(self.model, own) for own in (inputs if None in labels else inputs[:1])])
        if None in labels:
            right, words = logits.argmax(1), 'the whole model predicts, as the images are in no subfolders'
        else:
            right, words = torch.tensor(labels), 'the subfolders say'
            (folder,) = paths or ['']
            classes = len([own for own in Path(folder).iterdir() if own.is_dir()])
            if classes != logits.shape[1]:
                raise ValueError(
                    f'--images {folder} has {classes} folders, but the model {logits.shape[1]} classes: give a folder '
                    'for each, or images without subfolders, whose labels are what the model predicts'
                )
        return list(zip(inputs, right.split(BATCH_SIZE))), loss_and_right, words

    def save(self, path: str) -> None:
        """Saves the model in the format that it was loaded from."""
        write_checkpoint(path, self.model.state_dict(), self.meta)


def name_of(path: str) -> str:
    """Returns the name of an image in figures and pages."""
    return f'test image {path}' if path.isdecimal() and not Path(path).exists() else Path(path).name


def files_in(path: str) -> List[Tuple[str, Optional[int]]]:
    """Returns the paths of all images below a folder, sorted, and the class of each if all are in subfolders."""
    folder = Path(path)
    below = (Path(own, name) for own, _, names in os.walk(folder, followlinks=True) for name in names)
    files = sorted(own for own in below if own.suffix.lower() in SUFFIXES)
    if not files:
        raise ValueError(f'{folder} holds no image files ({" ".join(sorted(SUFFIXES))})')
    classes = sorted(own.name for own in folder.iterdir() if own.is_dir())
    parts = [own.relative_to(folder).parts for own in files]
    labels = [classes.index(own[0]) if len(own) > 1 else None for own in parts]
    return [(str(own), None if None in labels else label) for own, label in zip(files, labels)]


def stacked(images: Sequence[Picture]) -> Tensor:
    """Returns images as a batch; raises ``ValueError`` for different sizes."""
    sizes = sorted({tuple(image.tensor.shape[1:]) for image in images})
    if len(sizes) > 1:
        raise ValueError(
            f'the images have {len(sizes)} different sizes after preprocessing, such as {sizes[0]} and {sizes[-1]}, '
            'but one is needed: give images of the same size'
        )
    return torch.stack([image.tensor for image in images])


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    """Returns the logits of a classifier of any of the three libraries."""
    output = model(images)
    logits = getattr(output, 'logits', output)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        raise ValueError(
            f'a {type(model).__name__} gives no logits, so heads cannot be judged by the loss of a classifier: '
            'name those to prune by --heads, or use head_importance with a loss of your own'
        )
    return logits


def loss_and_right(model: nn.Module, batch: Any) -> Tuple[Tensor, Tensor]:
    """Returns the cross-entropy of images and labels, and how many predictions are right."""
    logits = logits_of(model, batch[0])
    return cross_entropy(logits, batch[1]), (logits.argmax(1) == batch[1]).sum()


@contextmanager
def progress(loss: Loss, number: int, what: str) -> Iterator[Loss]:
    """Yields the loss with a progress bar of so many calls."""
    with bar_of(range(number), what) as bar:

        def counted(model: nn.Module, batch: Any) -> Any:
            bar.update()
            return loss(model, batch)

        yield counted


def bar_of(items: Sequence[Any], what: str) -> tqdm:
    """Returns a progress bar; in a file, such as the log of a job, it says every half minute how far it is."""
    seconds = 0.1 if sys.stderr.isatty() else 30
    return tqdm(items, what, delay=seconds, mininterval=seconds, leave=False)


def rgb_picture(pixels: Tensor) -> np.ndarray:
    """Returns pixels from 0 to 255, ``(C, H, W)``, grey or red first, as a picture ``(H, W, 3)``, uint8.

    Examples:
        >>> rgb_picture(torch.tensor([[[-1.0, 300.0]]]))[..., 0]
        array([[  0, 255]], dtype=uint8)
    """
    picture = pixels.clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
    return np.ascontiguousarray(np.broadcast_to(picture, (*picture.shape[:2], 3)))


def write_checkpoint(path: str, state_dict: Dict[str, Tensor], meta: Any = None) -> None:
    """Writes a state dict to a new file: alone in a ``.safetensors`` file, in others under ``'state_dict'``."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if Path(path).suffix == '.safetensors':
        Path(path).write_bytes(save({name: value.contiguous() for name, value in state_dict.items()}))
    else:
        with open(path, 'wb') as file:
            torch.save({'state_dict': state_dict, 'meta': meta or {}}, file)


def load(args: Namespace) -> LoadedModel:
    """Returns the model that the options name."""
    torch.manual_seed(getattr(args, 'seed', 0))  # of random weights and images, and of keys that loading makes
    if args.timm:
        loaded = TimmModel(args.timm, args.checkpoint, args.pretrained, **parsed(ParseKwargs, args.model_kwargs))
        if not (args.pretrained or args.checkpoint or args.verb == 'start'):
            print(f'The weights of {args.timm} are random: give --pretrained or --checkpoint', file=sys.stderr)
        return loaded
    if args.hf:
        return HuggingFaceModel(args.hf)
    from ..mm import safe_loading  # noqa: F401
    from .config_model import ConfigModel, DictAction

    return ConfigModel(*args.mm, parsed(DictAction, args.cfg_options))


def parsed(action: Any, pairs: Optional[Sequence[str]]) -> Dict[str, Any]:
    """Returns ``key=value`` pairs as an action of argparse reads them."""
    found = Namespace(settings={})
    action([], 'settings')(None, found, pairs or [])
    return found.settings


class TimmModel(LoadedModel):
    """A model of timm, whose images go through its test transform.

    Args:
        name (str): Its name in timm.
        checkpoint (str, optional): Its weights. Defaults to None.
        pretrained (bool): Whether to take timm's pretrained weights. Defaults to False. Without these and without a
            checkpoint the weights are random.
        settings: Of ``timm.create_model``, such as ``num_classes``.

    Raises:
        FileNotFoundError: No such checkpoint.
        ValueError: No such model, or the checkpoint does not fit.
    """

    def __init__(self, name: str, checkpoint: Optional[str] = None, pretrained: bool = False, **settings: Any) -> None:
        self.name = name
        try:
            self.model = timm.create_model(name, pretrained=pretrained, **settings).eval()
        except RuntimeError as error:
            if ':' in name or timm.is_model(name):  # of a hub, or a model that cannot be built so
                raise
            similar = difflib.get_close_matches(name, timm.list_models())
            advice = f'did you mean {" or ".join(similar)}?' if similar else 'timm.list_models() has the names'
            raise ValueError(f'--timm {name} is no model of timm: {advice}') from error
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
        data = resolve_model_data_config(self.model)
        channels = settings.get('in_chans', data['input_size'][0])
        self.shape = (channels, *to_2tuple(settings.get('img_size', data['input_size'][1:])))
        data['input_size'] = self.shape
        if channels == 1:
            data.update({name: (fmean(data[name]),) for name in ('mean', 'std')})
        self.mean, self.std = data['mean'], data['std']
        self.transform = create_transform(**data, is_training=False)


def read_timm(checkpoint: str) -> Dict[str, Any]:
    """Returns the state dict of a checkpoint; of timm's ``train.py``, that of the weight average if there is one.

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


class HuggingFaceModel(LoadedModel):
    """A model of Hugging Face transformers, whose images go through the processor in its folder.

    Without a ``preprocessor_config.json`` they have the size in the configuration, and the mean and deviation 0.5; a
    line on the standard error stream says so.

    Args:
        folder (str): Where ``save_pretrained`` has saved it, pruned or not.

    Raises:
        ImportError: Hugging Face transformers is not installed.
        ValueError: There is no such model.
    """

    def __init__(self, folder: str) -> None:
        self.name = folder
        if not Path(folder, 'config.json').is_file():
            raise ValueError(f'--hf {folder} has no config.json: give a folder that save_pretrained has written')
        try:
            self.model = load_hugging_face(folder)
            processor = self._load_processor()
        except (OSError, RuntimeError, SafetensorError, ValueError) as error:
            raise ValueError(f'--hf {folder} cannot be loaded: {" ".join(str(error).splitlines()[:2])}') from error
        self._saved_dtype = self.model.dtype
        self.model.float()
        self.transform = lambda image: processor(image, return_tensors='pt')['pixel_values'][0]
        self.mean, self.std = (processor.image_mean, processor.image_std) if processor.do_normalize else ([0.0], [1.0])

    def _load_processor(self) -> Any:
        from transformers import AutoImageProcessor, ViTImageProcessor

        config = self.model.config
        self.shape = (getattr(config, 'num_channels', 3), *to_2tuple(getattr(config, 'image_size', 224)))
        if Path(self.name, PREPROCESSOR).is_file():
            return AutoImageProcessor.from_pretrained(self.name)
        channels, height, width = self.shape
        reason = f'{self.name} has no {PREPROCESSOR}: images are scaled to {height}x{width} pixels, with mean and'
        print(f'{reason} deviation 0.5', file=sys.stderr)
        half = [0.5] * channels
        return ViTImageProcessor(size=dict(height=height, width=width), image_mean=half, image_std=half)

    def save(self, path: str) -> None:
        self.model.to(self._saved_dtype).save_pretrained(path)
        if Path(self.name, PREPROCESSOR).is_file():
            shutil.copy(Path(self.name, PREPROCESSOR), path)
