"""The config of a training: a network of configs/small, its data, its epochs and its seed."""

import copy
import functools
import math
from pathlib import Path
from typing import Any, List, Mapping, Optional

from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmpretrain.registry import MODELS
from torch import nn

from attncnn_plugin import config_path

DATA = ('cifar10', 'cifar100', 'folder', 'digits')
WARM_UP = 2  # iterations of a warm-up, at least
VALIDATED = 10000  # training images from one validation to the next, at least


@functools.cache
def _read(name: str) -> Config:
    return Config.fromfile(config_path(f'small/{name}.py'))


def network_config(name: str, options: Mapping[str, Any]) -> Config:
    """Returns a config of configs/small with some settings changed."""
    config = copy.deepcopy(_read(name))
    config.merge_from_dict(dict(options))
    config.custom_imports.imports = [*config.custom_imports.imports, 'reproduction.plugins']
    return config


def build(config: Config) -> nn.Module:
    """Builds the classifier of a config."""
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        # A copy: mmpretrain adds settings of the model to those of the preprocessor.
        return MODELS.build(copy.deepcopy({'data_preprocessor': config.data_preprocessor, **config.model}))


def set_data(config: Config, data: str, data_root: Optional[Path], test_images: Optional[int] = None) -> None:
    """Gives a config other images: of ``DATA``, in a folder, validated with so many; None for those of the config."""
    other = copy.deepcopy(_read(f'_base_/data_{data}'))
    order = -1 if data == 'folder' else 1  # files are read blue first; a preprocessor has its colours red first
    mean, std = (list(other.data_preprocessor[name])[::order] for name in ('mean', 'std'))
    for name in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        dataset, pipeline = other[name].dataset, config[name].dataset.pipeline
        own = [step for step in pipeline if step.type not in ('RandomFlip', 'RandomCrop')]  # those are of the data
        for step in own:  # what an augmentation leaves empty has the mean of the images
            if 'fill_color' in step:
                step.update(fill_color=mean, fill_std=std)
            if 'pad_val' in step.get('hparams', {}):
                step.hparams.pad_val = [round(value) for value in mean]
        dataset.pipeline = [*dataset.pipeline[:-1], *own]  # both end in PackInputs
        if data_root is not None and data != 'digits':
            dataset.data_root = str(data_root)
        if test_images is not None and name != 'train_dataloader':
            dataset = dict(type='BalancedSubset', dataset=dataset, num_images=test_images)
        config[name].dataset = dataset
    if data == 'folder':
        root = Path(other.train_dataloader.dataset.data_root)
        train, test = (sorted(path.name for path in (root / of).glob('*') if path.is_dir()) for of in ('train', 'test'))
        if not train or train != test:
            raise ValueError(f'{root}/train and {root}/test must have a folder for each class: {train}, {test}')
        other.data_preprocessor.num_classes = len(train)
    config.data_preprocessor = other.data_preprocessor
    config.model.head.num_classes = classes = other.data_preprocessor.num_classes
    if classes < 5:
        config.val_evaluator[0].topk = config.test_evaluator[0].topk = (1,)


def set_images(config: Config, number: int, seed: int) -> None:
    """Trains a config with a part of its images, as many of each class, and draws all that is random by the seed."""
    dataset = config.train_dataloader.dataset
    config.train_dataloader.dataset = dict(type='BalancedSubset', dataset=dataset, num_images=number, seed=seed)
    config.randomness = dict(seed=seed)
    for start in config.model.backbone.get('init_cfg', []):
        if start.type in ('ConvolutionalHeads', 'ReleasedImpulse'):
            start.seed = seed


def set_epochs(config: Config, epochs: int, images: int) -> None:
    """Stretches the schedule of a config to a number of epochs of so many images, with two phases both alike."""
    per_epoch = math.ceil(images / config.train_dataloader.batch_size)
    first = epochs
    for hook in [hook for hook in config.get('custom_hooks', []) if hook.type == 'PhaseTransitionHook']:
        if hook.epoch > 0:
            if epochs < 2:
                raise ValueError(f'epochs={epochs} must be at least 2 for a training in two phases')
            first = hook.epoch = min(max(round(hook.epoch / config.train_cfg.max_epochs * epochs), 1), epochs - 1)
        _stretch(hook.param_scheduler, epochs - hook.epoch, per_epoch)
    _stretch(config.param_scheduler, first, per_epoch)
    config.train_cfg.max_epochs = epochs
    config.train_cfg.val_interval = min(math.ceil(VALIDATED / images), epochs)


def _stretch(schedulers: List[dict], epochs: int, per_epoch: int) -> None:
    if len(schedulers) > 1 and epochs * per_epoch <= WARM_UP:
        raise ValueError(f'{epochs} epochs of {per_epoch} batches are too few for a warm-up of {WARM_UP} iterations')
    factor = epochs / max(scheduler.end for scheduler in schedulers)
    for scheduler in schedulers:
        for key in [key for key in ('begin', 'end') if scheduler[key] > 0]:
            scheduler[key] = min(max(scheduler[key] * factor, WARM_UP / per_epoch), epochs)
