"""Small trainings on the digits in the framework's own trainer, in this process."""

import copy

import numpy as np
import torch
from mmengine.config import Config
from mmengine.hooks import EMAHook, Hook
from mmengine.runner import Runner

from .small import SMALL_ARCH, numbers

EPOCHS, CHANGE, ITERATIONS = 5, 2, 3  # epochs, the epoch of a transition or a pruning, iterations of an epoch
LAYER = 'backbone.layer4.0.conv1'  # of the CNN, one of those that become attention
SGD = dict(_delete_=True, type='SGD', lr=0.05, momentum=0.9, weight_decay=1e-4)


def small_config(repository, work_dir, name='cmhsa3_digits', **changes):
    """The config of a file with a small network and 24 images, in two phases where the file has them."""
    config = Config.fromfile(repository / f'configs/{name}.py')
    backbone, hooks = config.model.backbone, config.get('custom_hooks') or []
    config.merge_from_dict(
        {
            'train_dataloader.dataset.indices': 24,
            'train_dataloader.batch_size': 8,
            'val_dataloader.dataset.indices': 8,
            'train_cfg.max_epochs': EPOCHS,
            'default_hooks.logger.interval': 1,
            'default_hooks.checkpoint.max_keep_ckpts': -1,
            'work_dir': str(work_dir),
            'log_level': 'WARNING',
            # One of its own: runs of the same second share their visualizer otherwise.
            'experiment_name': f'{work_dir.name}-{np.random.default_rng().integers(1 << 60)}',
        }
    )
    for schedulers in (config.param_scheduler, *(hook.param_scheduler for hook in hooks)):
        schedulers[0].end = schedulers[1].begin = 1
    config.param_scheduler[1].end = EPOCHS
    for hook in hooks:
        hook.epoch = config.param_scheduler[1].end = CHANGE
    if backbone.type == 'CMHSA':
        backbone.num_layers = 2
    elif backbone.type == 'ConvToAttention':
        backbone.backbone.update(stem_channels=4, base_channels=4)
        config.model.head.in_channels = 32
        # Plain gradients: AdamW makes steps of the rounding errors in gradients that are zero.
        config.merge_from_dict({'optim_wrapper.optimizer': SGD})
        hooks[0].optim_wrapper.optimizer.lr = 0.01
    else:
        backbone.arch, config.model.head.in_channels = SMALL_ARCH, 16
    config.merge_from_dict(changes)
    return config


class Recorder(Hook):
    """What the loop sees at every iteration, and the weights at the end of every epoch."""

    priority = 'LOWEST'

    def before_run(self, runner):
        self.rates, self.phases, self.heads, self.weights, self.start = [], [], [], {}, None

    def before_train(self, runner):
        self.start = runner.epoch

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.rates.append(runner.optim_wrapper.optimizer.param_groups[0]['lr'])
        self.phases.append(getattr(runner.model.backbone, 'phase', None))
        self.heads.append(numbers(runner.model))

    def after_train_epoch(self, runner):
        self.weights[runner.epoch + 1] = copy.deepcopy(runner.model.state_dict())


def run(config, *hooks):
    """Trains; the runner, and what a recorder has seen."""
    runner, recorder = Runner.from_cfg(config), Recorder()
    for hook in (*hooks, recorder):
        runner.register_hook(hook)
    runner.train()
    return runner, recorder


def average_of(runner):
    return next(hook for hook in runner.hooks if isinstance(hook, EMAHook)).ema_model


def log_of(work_dir):
    return next(work_dir.glob('*/*.log')).read_text()


def assert_close(state_dict, expected, tolerance=1e-6):
    assert state_dict.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(state_dict[name].float(), value.float(), atol=tolerance), name
