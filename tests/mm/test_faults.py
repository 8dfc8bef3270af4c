"""What a long run meets: killed, out of numbers; damaged checkpoints."""

import os
import shutil
import signal
import textwrap
from pathlib import Path

import pytest
import torch
from helpers import processes
from helpers.processes import assert_equal

import attncnn_plugin  # noqa: F401
from attncnn_plugin.mm.reliability import find_whole_checkpoint

ITERATIONS = 3  # of an epoch

CONFIG = """
_base_ = '{base}'
custom_imports = dict(
    imports=['attncnn_plugin', 'attncnn_plugin.mm.safe_loading', 'test_hooks'], allow_failed_imports=False)
train_dataloader = dict(batch_size={batch_size}, dataset=dict(indices=24))
val_dataloader = dict(dataset=dict(indices=8))
train_cfg = dict(max_epochs=3)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(max_keep_ckpts=-1))
optim_wrapper = dict(optimizer=dict(_delete_=True, type='SGD', lr=0.05, momentum=0.9, weight_decay=0.))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, begin=0, end=1, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', begin=1, end=3, convert_to_iter_based=True),
]
custom_hooks = [dict(type='EMAHook', momentum=0.2), dict(type='TestHook')]
"""

HOOKS = textwrap.dedent("""
    import os, signal
    import torch
    from mmengine.dist import get_rank
    from mmengine.hooks import EMAHook, Hook
    from mmpretrain.registry import HOOKS

    fault, iteration, rank = os.environ.get('FAULT', 'none,-1,0').split(',')
    fsync, calls = os.fsync, []

    def killing_fsync(descriptor):
        calls.append(descriptor)
        if fault == 'save' and len(calls) == int(iteration):
            os.ftruncate(descriptor, 1000)
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    if fault == 'save':
        os.fsync = killing_fsync

    @HOOKS.register_module(force=True)
    class TestHook(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if (runner.iter, get_rank()) != (int(iteration), int(rank)):
                return
            if fault == 'nan':
                with torch.no_grad():
                    next(runner.model.parameters()).fill_(float('nan'))

        def after_train(self, runner):
            average = next(hook for hook in runner.hooks if isinstance(hook, EMAHook)).ema_model.state_dict()
            model = getattr(runner.model, 'module', runner.model).state_dict()
            torch.save(dict(model=model, average=average), os.path.join(runner.work_dir, f'rank{get_rank()}.pt'))
""")


@pytest.fixture(scope='module')
def folder(tmp_path_factory, repository):
    """The configs."""
    folder = tmp_path_factory.mktemp('faults')
    (folder / 'test_hooks.py').write_text(HOOKS)
    for batch_size in (8, 4):
        (folder / f'batch{batch_size}.py').write_text(
            CONFIG.format(base=repository / 'configs/sa_quadratic_digits.py', batch_size=batch_size)
        )
    return folder


@pytest.fixture(scope='module')
def train(folder):
    """Runs tools/train.py."""

    def train(work_dir, *options, **kwargs):
        return processes.train(folder / 'batch8.py', folder / work_dir, *options, **kwargs)

    return train


@pytest.fixture(scope='module')
def whole(folder, train):
    """A run to which nothing happens."""
    train('whole')
    return folder / 'whole'


def test_killed_while_saving(folder, train, whole):
    """While the checkpoint that last_checkpoint names is written again, with the best score."""
    train('saving', expected=-signal.SIGKILL, FAULT='save,3,0')
    work_dir = folder / 'saving'
    assert (work_dir / 'epoch_1.pth.part').stat().st_size == 1000
    assert (work_dir / 'last_checkpoint').read_text().endswith('epoch_1.pth') and torch.load(work_dir / 'epoch_1.pth')
    log = train('saving', '--resume')
    assert 'resumed epoch: 1, iter: 3' in log and 'damaged' not in log
    assert_equal(work_dir, whole, tolerance=0)
    assert not list(work_dir.glob('*.part'))


def test_which_checkpoint_is_whole(whole, tmp_path):
    last, newest = tmp_path / 'last_checkpoint', str(tmp_path / 'epoch_2.pth')
    assert find_whole_checkpoint(str(tmp_path)) is None
    for number, name in enumerate(['epoch_1', 'epoch_2', 'best_accuracy_top1_epoch_1']):
        shutil.copy(whole / f'{name}.pth', tmp_path)
        os.utime(tmp_path / f'{name}.pth', (number, number))
    assert find_whole_checkpoint(str(tmp_path)) == newest  # last_checkpoint is missing
    for content in ('', newest[:-5], '/moved/epoch_2.pth', newest):
        last.write_text(content)
        assert find_whole_checkpoint(str(tmp_path)) == newest
    other = tmp_path / 'other'  # the folder that was copied, which has trained on
    other.mkdir()
    shutil.copy(whole / 'epoch_3.pth', other / 'epoch_2.pth')
    last.write_text(str(other / 'epoch_2.pth'))
    assert find_whole_checkpoint(str(tmp_path)) == newest
    assert find_whole_checkpoint(str(tmp_path), str(other)) == str(other / 'epoch_2.pth')  # where checkpoints go
    shutil.rmtree(other)
    last.write_text(newest)
    content = Path(newest).read_bytes()
    weights = torch.load(newest)['state_dict']['head.fc.weight'].numpy().tobytes()
    flipped = bytearray(content)
    flipped[content.index(weights)] ^= 1  # one bit of one weight
    for damaged in (bytes(flipped), content[:5000] + content[5001:], content[:100_000]):
        Path(newest).write_bytes(damaged)
        os.utime(newest, (1, 1))
        assert find_whole_checkpoint(str(tmp_path)) == str(tmp_path / 'epoch_1.pth')
    os.truncate(tmp_path / 'epoch_1.pth', 0)
    with pytest.raises(FileNotFoundError, match=f'{newest} is damaged or missing, and {tmp_path} holds no other '):
        find_whole_checkpoint(str(tmp_path))


@pytest.mark.slow  # in one process: test_reliability_hooks.py
def test_invalid_loss_on_one_rank(folder):
    work_dir = folder / 'nan'
    log = processes.train_two(folder / 'batch4.py', work_dir, expected=1, FAULT=f'nan,{ITERATIONS},1')
    assert 'FloatingPointError: loss=nan at iteration 4 (epoch 2); nothing was saved since' in log
    assert 'FloatingPointError: a loss of another rank is invalid at iteration 4 (epoch 2)' in log
    assert not list(work_dir.glob('epoch_2*'))
    assert all(value.isfinite().all() for value in torch.load(work_dir / 'epoch_1.pth')['state_dict'].values())
