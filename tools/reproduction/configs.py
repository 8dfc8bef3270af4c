"""The config of a training: a network of configs/small, its data, its epochs and its seed."""

import math
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

from mmengine.config import Config

from attncnn_plugin import config_path

DATA = ('cifar10', 'cifar100', 'folder', 'digits')
WARM_UP = 2  # iterations of a warm-up, at least
VALIDATED = 10000  # training images from one validation to the next, at least


def network_config(name: str, options: Dict[str, Any]) -> Config:
    """A config of configs/small with some settings changed."""
    config = Config.fromfile(config_path(f'small/{name}.py'))
    config.merge_from_dict(dict(options))
    return config


def set_data(config: Config, data: str, data_root: Optional[Path], test_images: Optional[int] = None) -> None:
    """Gives a config other images.

    Args:
        config (Config): Of a network, for CIFAR-10: its pipelines load nothing.
        data (str): One of ``DATA``.
        data_root (Path | None): The folder of the images, None for that of the config.
        test_images (int | None): How many images it is validated with, as many of each class. Defaults to None, all.

    Raises:
        ValueError: A folder of images has no classes, or others for testing than for training.
    """
    other = Config.fromfile(config_path(f'small/_base_/data_{data}.py'))
    for name in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        dataset, own = other[name].dataset, config[name].dataset.pipeline
        _set_colours(own, other.data_preprocessor, blue_first=data == 'folder')
        dataset.pipeline = [*dataset.pipeline[:-1], *own]  # both end in PackInputs
        if data_root is not None and data != 'digits':
            dataset.data_root = str(data_root)
        if test_images is not None and name != 'train_dataloader':
            dataset = dict(type='BalancedSubset', dataset=dataset, num_images=test_images)
        config[name].dataset = dataset
    if data == 'folder':
        other.data_preprocessor.num_classes = _number_of_classes(Path(other.train_dataloader.dataset.data_root))
    config.data_preprocessor = other.data_preprocessor
    config.model.head.num_classes = classes = other.data_preprocessor.num_classes
    if classes < 5:
        for evaluator in (config.val_evaluator, config.test_evaluator):
            next(metric for metric in evaluator if metric.type == 'Accuracy').topk = (1,)


def _set_colours(pipeline: List[dict], preprocessor: dict, blue_first: bool) -> None:
    """Fills what an augmentation leaves empty with the mean of the images, which a preprocessor has red first."""
    order = -1 if blue_first else 1  # files are read blue first, and turned by the preprocessor
    mean, std = (list(preprocessor[name])[::order] for name in ('mean', 'std'))
    for step in pipeline:
        if 'fill_color' in step:
            step.update(fill_color=mean, fill_std=std)
        if 'pad_val' in step.get('hparams', {}):
            step.hparams.pad_val = [round(value) for value in mean]


def _number_of_classes(root: Path) -> int:
    """Those of a folder of images."""
    train, test = (
        sorted(path.name for path in root.glob(f'{split}/*') if path.is_dir()) for split in ('train', 'test')
    )
    if not train or train != test:
        raise ValueError(f'{root} must have a folder for each class in train, and the same in test: {train}, {test}')
    return len(train)


def set_images(config: Config, number: int, seed: int) -> None:
    """Trains a config with a part of its images, as many of each class, and draws all that is random by the seed."""
    config.train_dataloader.dataset = dict(
        type='BalancedSubset', dataset=config.train_dataloader.dataset, num_images=number, seed=seed
    )
    config.randomness = dict(seed=seed)
    starts = config.model.backbone.get('init_cfg') or []
    for start in [starts] if isinstance(starts, dict) else starts:
        if start.type == 'ConvolutionalHeads':
            start.seed = seed


def set_epochs(config: Config, epochs: int, images: int) -> None:
    """Stretches the schedule of a config.

    Args:
        config (Config): Changed in place. With two phases both are stretched alike.
        epochs (int): Of the whole training.
        images (int): Those of an epoch.

    Raises:
        ValueError: There are too few epochs for two phases, or too few iterations for a warm-up.
    """
    per_epoch = math.ceil(images / config.train_dataloader.batch_size)
    hooks = [hook for hook in config.get('custom_hooks') or [] if hook.type == 'PhaseTransitionHook']
    first = epochs
    for hook in hooks:
        if hook.epoch > 0:
            if epochs < 2:
                raise ValueError(f'epochs={epochs} must be at least 2 for a training in two phases')
            share = hook.epoch / config.train_cfg.max_epochs
            first = hook.epoch = min(max(round(share * epochs), 1), epochs - 1)
        _stretch(hook.param_scheduler, epochs - hook.epoch, per_epoch)
    _stretch(config.param_scheduler, first, per_epoch)
    config.train_cfg.max_epochs = epochs
    config.train_cfg.val_interval = min(math.ceil(VALIDATED / images), epochs)


def _stretch(schedulers: Union[dict, List[dict]], epochs: int, per_epoch: int) -> None:
    """Brings schedulers to a number of epochs."""
    schedulers = [schedulers] if isinstance(schedulers, dict) else schedulers
    if len(schedulers) > 1 and epochs * per_epoch <= WARM_UP:
        raise ValueError(
            f'{epochs} epochs of {per_epoch} batches are too few for a warm-up of {WARM_UP} iterations and a cosine: '
            'give more epochs, or more images'
        )
    factor = epochs / max(scheduler.end for scheduler in schedulers)
    for scheduler in schedulers:
        for key in ('begin', 'end'):
            if scheduler[key] > 0:
                scheduler[key] = min(max(scheduler[key] * factor, WARM_UP / per_epoch), epochs)
