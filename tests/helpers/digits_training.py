"""A small training on the digits in which heads are pruned, in the framework's own trainer."""

import numpy as np
from mmengine.config import Config
from mmengine.hooks import EMAHook

from helpers.small import SMALL_ARCH

EPOCHS, PRUNE_AT, ITERATIONS = 5, 2, 3  # epochs, the epoch of pruning, iterations of an epoch


def small_config(repository, folder, work_dir=None, hook=None, **changes):
    config = Config.fromfile(repository / 'configs/sa_generalized_digits.py')
    config.merge_from_dict(
        {
            'model.head.in_channels': 16,
            'train_dataloader.dataset.indices': 24,
            'train_dataloader.batch_size': 8,
            'val_dataloader.dataset.indices': 8,
            'train_cfg.max_epochs': EPOCHS,
            'default_hooks.logger.interval': 1,
            'default_hooks.checkpoint.max_keep_ckpts': -1,
            'work_dir': str(work_dir or folder),
            'log_level': 'WARNING',
            'experiment_name': str(np.random.default_rng().integers(1 << 60)),
            'custom_hooks': [] if hook is None else [dict(type='HeadPruningHook', **hook)],
        }
    )
    config.model.backbone.arch = SMALL_ARCH
    config.param_scheduler[0].end = config.param_scheduler[1].begin = 1
    config.param_scheduler[1].end = EPOCHS
    config.merge_from_dict(changes)
    return config


def average_of(runner):
    return next(hook for hook in runner.hooks if isinstance(hook, EMAHook)).ema_model
