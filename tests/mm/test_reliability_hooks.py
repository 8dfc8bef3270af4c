"""The hooks for faults of a run in this process; tests/mm/test_faults.py has them in processes that are killed."""

import os
import resource
import shutil

import numpy as np
import pytest
import torch
from helpers.small import SMALL_ARCH
from mmengine.config import Config
from mmengine.fileio import put
from mmengine.hooks import Hook
from mmengine.runner import Runner

from attncnn_plugin.mm.reliability import AtomicBackend

EPOCHS, ITERATIONS = 2, 3


class Fault(Hook):
    """Calls a function before one iteration of a run."""

    priority = 'LOWEST'

    def __init__(self, iteration, function):
        self.iteration = iteration
        self.function = function

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.iteration:
            self.function(runner)


def build(repository, work_dir, fault=None, **changes):
    config = Config.fromfile(repository / 'configs/sa_quadratic_digits.py')
    config.model.backbone.arch = SMALL_ARCH
    config.model.head.in_channels = SMALL_ARCH['embed_dims']
    config.optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.05, momentum=0.9))
    config.merge_from_dict(
        {
            'train_dataloader.dataset.indices': 24,
            'train_dataloader.batch_size': 8,
            'val_dataloader.dataset.indices': 8,
            'train_cfg.max_epochs': EPOCHS,
            'default_hooks.checkpoint.max_keep_ckpts': -1,
            'work_dir': str(work_dir),
            'log_level': 'ERROR',
            'experiment_name': f'{work_dir.name}-{np.random.default_rng().integers(1 << 40)}',
            **changes,
        }
    )
    runner = Runner.from_cfg(config)
    if fault is not None:
        runner.register_hook(Fault(*fault))
    return runner


def break_weights(runner):
    with torch.no_grad():
        next(runner.model.parameters()).fill_(float('nan'))


@pytest.fixture(scope='module')
def whole(repository, tmp_path_factory):
    """The folder of a run to which nothing happens."""
    runner = build(repository, tmp_path_factory.mktemp('whole'))
    runner.train()
    return runner.work_dir


def test_invalid_loss(repository, tmp_path):
    runner = build(repository, tmp_path, (ITERATIONS, break_weights))
    with pytest.raises(FloatingPointError) as error:
        runner.train()
    assert str(error.value).startswith(
        f'loss=nan at iteration 4 (epoch 2); nothing was saved since {tmp_path}/epoch_1.pth: '
    )


def test_weights_that_are_not_finite(repository, tmp_path):
    runner = build(repository, tmp_path)
    runner.call_hook('before_save_checkpoint', checkpoint={})
    break_weights(runner)
    runner.message_hub.update_info('iter', 5)
    with pytest.raises(FloatingPointError, match='weight is not finite any more after iteration 6; nothing was saved'):
        runner.call_hook('before_save_checkpoint', checkpoint={})


def test_resumed_from_the_one_before(repository, tmp_path, whole):
    work_dir = shutil.copytree(whole, tmp_path / 'run')
    last, before = work_dir / 'epoch_2.pth', work_dir / 'epoch_1.pth'
    os.truncate(last, 5000)
    (work_dir / 'last_checkpoint').write_text(str(last))
    resumed = build(repository, work_dir, resume=True)
    warnings = []
    resumed.logger.warning = warnings.append
    resumed.call_hook('before_run')
    assert f'{last} is damaged, missing or of another folder: resuming from {before}' in warnings
    resumed.load_or_resume()
    assert resumed.iter == ITERATIONS


def test_resuming_from_weights_or_from_another_model(repository, tmp_path):
    torch.save(dict(weight=torch.zeros(2)), tmp_path / 'weights.pth')
    load_from = dict(load_from=str(tmp_path / 'weights.pth'))
    with pytest.raises(KeyError, match='weights.pth holds weights alone and cannot be resumed from: start from them '):
        build(repository, tmp_path, resume=True, **load_from).call_hook('before_run')
    with pytest.raises(ValueError, match='weights.pth is of another model: 0 of the 32 weights of this one are in it '):
        build(repository, tmp_path, **load_from).call_hook('before_run')


def test_files_are_complete_or_not_there(tmp_path):
    path = tmp_path / 'folder/file'
    atomic = dict(backend='atomic')
    put(b'before', str(path), backend_args=atomic)
    (tmp_path / 'folder/file.part').write_bytes(b'left by a killed process')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r'file \(10,000 bytes\) could not be written .*: make room, then go on'):
            AtomicBackend().put(bytes(10_000), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b'before' and os.listdir(path.parent) == ['file']
    put(b'after', str(path), backend_args=atomic)
    assert path.read_bytes() == b'after' and os.listdir(path.parent) == ['file']


class Stop(Hook):
    """Stops a run in the validation after an epoch."""

    def __init__(self, epoch):
        self.epoch = epoch

    def before_val(self, runner):
        if runner.epoch == self.epoch:
            raise KeyboardInterrupt


@pytest.mark.parametrize('stop', range(1, EPOCHS + 1))
@pytest.mark.parametrize('interval', [1, 5])
def test_a_validation_that_was_left_out(interval, stop, repository, tmp_path):
    """After the last epoch too, which is validated whatever the interval is."""
    changes = {'train_cfg.val_interval': interval, 'custom_hooks': [dict(type='ResumedValidationHook')]}
    wanted = [epoch for epoch in range(1, EPOCHS + 1) if epoch % interval == 0 or epoch == EPOCHS]
    runner = build(repository, tmp_path, **changes)
    runner.register_hook(Stop(stop))
    if stop in wanted:
        with pytest.raises(KeyboardInterrupt):
            runner.train()
    else:
        runner.train()
    resumed = build(repository, tmp_path, resume=True, **changes)
    validated = []
    resumed.val_loop.run = lambda: validated.append(resumed.epoch)
    resumed.train()
    assert validated == [epoch for epoch in wanted if epoch >= stop]
