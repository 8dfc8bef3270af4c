"""A small training in two phases, convolution and attention, in the framework's own trainer."""

import copy

import numpy as np
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

EPOCHS, SWITCH, ITERATIONS = 5, 2, 3  # epochs, epochs of the first phase, iterations of an epoch


def small_config(repository, work_dir, name='cmhsa3_digits', **changes):
    config = Config.fromfile(repository / f'configs/{name}.py')
    if name.startswith('cmhsa'):
        config.model.backbone.num_layers = 2
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
            'experiment_name': f'{work_dir.name}-{np.random.default_rng().integers(1 << 40)}',
        }
    )
    (hook,) = config.custom_hooks
    hook.epoch = SWITCH
    for schedulers in (config.param_scheduler, hook.param_scheduler):
        schedulers[0].end = schedulers[1].begin = 1
    config.param_scheduler[1].end = SWITCH
    config.merge_from_dict(changes)
    return config


@HOOKS.register_module()
class Recorder(Hook):
    """What the loop sees at every iteration, and the model at the end of every epoch."""

    priority = 'LOWEST'

    def before_run(self, runner):
        self.rates, self.phases, self.weights, self.start = [], [], {}, None

    def before_train(self, runner):
        self.start = runner.epoch

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.rates.append(runner.optim_wrapper.optimizer.param_groups[0]['lr'])
        self.phases.append(runner.model.backbone.phase)

    def after_train_epoch(self, runner):
        self.weights[runner.epoch + 1] = copy.deepcopy(runner.model.state_dict())


def run(config):
    runner = Runner.from_cfg(config)
    recorder = Recorder()
    runner.register_hook(recorder)
    runner.train()
    return runner, recorder
