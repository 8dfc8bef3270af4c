"""A CNN that becomes attention with the framework's tools, as processes: killed, distributed, tested, converted."""

import re
import signal

import mmpretrain
import numpy as np
import pytest
import torch
from helpers.processes import HOOKS, assert_equal, rates, run, train, train_two
from mmpretrain import ImageClassificationInferencer

pytestmark = pytest.mark.slow

EPOCHS, SWITCH, ITERATIONS = 4, 2, 3  # epochs, epochs of the first phase, iterations of an epoch

# Norms of fixed statistics: those of a batch are another rank's too.
CONFIG = """
_base_ = '{base}'
custom_imports = dict(
    imports=['attncnn_plugin', 'attncnn_plugin.mm.safe_loading', 'test_hooks'], allow_failed_imports=False)
model = dict(
    backbone=dict(backbone=dict(stem_channels=4, base_channels=4, norm_eval=True)), head=dict(in_channels=32))
optim_wrapper = dict(optimizer=dict(_delete_=True, type='SGD', lr=0.05, momentum=0.9, weight_decay=1e-4))
train_dataloader = dict(batch_size={batch_size}, dataset=dict(indices=24))
val_dataloader = dict(dataset=dict(indices=8))
train_cfg = dict(max_epochs=4)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(max_keep_ckpts=-1))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, begin=0, end=1, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', begin=1, end=2, convert_to_iter_based=True),
]
custom_hooks = [
    dict(type='PhaseTransitionHook', epoch=2, optim_wrapper=dict(optimizer=dict(lr=0.01)), param_scheduler=[
        dict(type='LinearLR', start_factor=1e-3, begin=0, end=1, convert_to_iter_based=True),
        dict(type='CosineAnnealingLR', begin=1, convert_to_iter_based=True)]),
    dict(type='EMAHook', momentum=0.2),
    dict(type='TestHook'),
]
"""
# PyTorch wants such norms on GPUs, whether or not their statistics are fixed.
SYNCED = """
_base_ = 'batch4.py'
custom_imports = dict(
    imports=['attncnn_plugin', 'attncnn_plugin.mm.safe_loading', 'test_hooks', 'norms_on_cpus'],
    allow_failed_imports=False)
sync_bn = 'torch'
"""
NORMS_ON_CPUS = """
from pathlib import Path

from torch.distributed import get_rank
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

def note(self, module):
    with open(Path(__file__).with_name(f'norms{get_rank()}.txt'), 'a') as file:
        print(sum(isinstance(part, SyncBatchNorm) for part in module.modules()), file=file)

DistributedDataParallel._passing_sync_batchnorm_handle = note
"""
TRANSITION = 'Transition at epoch 2:\nlayer           before           after'


@pytest.fixture(scope='module')
def folder(tmp_path_factory, repository):
    folder = tmp_path_factory.mktemp('cnn')
    (folder / 'test_hooks.py').write_text(HOOKS)
    (folder / 'norms_on_cpus.py').write_text(NORMS_ON_CPUS)
    (folder / 'synced.py').write_text(SYNCED)
    for batch_size in (8, 4):
        (folder / f'batch{batch_size}.py').write_text(
            CONFIG.format(base=repository / 'configs/resnet18_to_attention_digits.py', batch_size=batch_size)
        )
    return folder


@pytest.fixture(scope='module')
def whole(folder):
    """A run through both phases, never stopped."""
    assert TRANSITION in train(folder / 'batch8.py', folder / 'whole')
    return folder / 'whole'


@pytest.mark.parametrize('kill_at', [SWITCH * ITERATIONS - 2, SWITCH * ITERATIONS, EPOCHS * ITERATIONS - 1])
def test_killed_and_resumed(kill_at, whole, folder):
    """In the first phase, at the transition, and in the second phase."""
    name = f'killed{kill_at}'
    log = train(folder / 'batch8.py', folder / name, expected=-signal.SIGKILL, KILL_AT=str(kill_at))
    assert (TRANSITION in log) == (kill_at >= SWITCH * ITERATIONS)
    log = train(folder / 'batch8.py', folder / name, '--resume')
    assert f'resumed epoch: {kill_at // ITERATIONS}' in log
    assert_equal(folder / name, whole)
    assert rates(folder / name) == rates(whole) and len(rates(whole)) == EPOCHS * ITERATIONS


def test_killed_and_resumed_right_after_loading(whole, folder):
    """The transition at epoch 0, then a stop in the epoch after it."""
    options = ['--cfg-options', 'custom_hooks.0.epoch=0', f'load_from={whole / f"epoch_{SWITCH}.pth"}']
    log = train(folder / 'batch8.py', folder / 'zero', *options)
    assert 'Transition at epoch 0:\n' in log
    kwargs = dict(expected=-signal.SIGKILL, KILL_AT=str(ITERATIONS + 1))
    train(folder / 'batch8.py', folder / 'zero_killed', *options, **kwargs)
    log = train(folder / 'batch8.py', folder / 'zero_killed', '--resume', *options[:2])
    assert 'resumed epoch: 1' in log and 'Transition at epoch' not in log
    assert_equal(folder / 'zero_killed', folder / 'zero')


@pytest.mark.parametrize('norms', ['of a process', 'of all processes'])
def test_two_processes(norms, whole, folder):
    """Equal weights on both ranks, those of one process with the same batches; resumed in each phase.

    The norms of all processes, ``sync_bn='torch'``, have fixed statistics here: on CPUs they have no others.
    """
    two = folder / f'two norms {norms}'
    config = folder / ('batch4.py' if norms == 'of a process' else 'synced.py')
    log = train_two(config, two)
    assert 'GPU number: 2' in log and TRANSITION in log and 'Epoch(val) [4]' in log
    if norms == 'of all processes':  # on both ranks, in each phase
        assert [(folder / f'norms{rank}.txt').read_text().split() for rank in (0, 1)] == [['20', '20']] * 2
    for rank in (0, 1):
        assert_equal(two, two, rank, tolerance=0)
        assert_equal(two, whole, rank, tolerance=1e-5)
    for epoch in (1, 3):
        again = folder / f'again{epoch} norms {norms}'
        train_two(config, again, '--resume', two / f'epoch_{epoch}.pth')
        for rank in (0, 1):
            assert_equal(again, two, rank)


@pytest.mark.parametrize('epoch', [SWITCH, EPOCHS])
def test_checkpoints_of_both_phases_load_everywhere(epoch, whole, folder, repository, monkeypatch):
    """With the config that made the run, and nothing said."""
    config, checkpoint = str(folder / 'batch8.py'), str(whole / f'epoch_{epoch}.pth')
    test = repository / 'tools/test.py'
    log = run('python', test, config, checkpoint, '--work-dir', folder / f'test{epoch}', folder=folder)
    assert 'accuracy/top1' in log and 'do not match' not in log
    monkeypatch.syspath_prepend(folder)
    model = mmpretrain.get_model(config, pretrained=checkpoint)
    assert model.backbone.phase == ('conv' if epoch == SWITCH else 'attn')
    saved = torch.load(checkpoint)['state_dict']
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    image = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    (result,) = ImageClassificationInferencer(model)([image])
    assert np.isclose(sum(result['pred_scores']), 1)


@pytest.mark.parametrize('phase', ['conv', 'attn'])
def test_converter(phase, whole, folder, repository, monkeypatch):
    """A checkpoint of the CNN as one of attention, for either phase's config; the output stays as it was."""
    config, first, out = folder / 'batch8.py', whole / f'epoch_{SWITCH}.pth', folder / f'converted/{phase}.pth'
    tool = repository / 'tools/model_converters/conv_to_attention.py'
    options = ('--cfg-options', f'model.backbone.phase={phase}')
    monkeypatch.syspath_prepend(str(folder))  # for the config's own imports
    assert f'Saved {out}' in run('python', tool, config, first, out, *options, folder=folder)
    before, after = (mmpretrain.get_model(str(config), pretrained=str(path)).eval() for path in (first, out))
    x = torch.randn(2, 1, 8, 8)
    assert (before.backbone.phase, after.backbone.phase) == ('conv', 'attn')
    with torch.no_grad():
        assert torch.allclose(before(x), after(x), atol=0.02 * before(x).abs().max().item())
    log = run('python', tool, config, out, folder / 'no.pth', *options, folder=folder, expected=1)
    assert f'{out} is not of the convolution phase: there is nothing to convert' in log


def test_the_config_of_two_minutes(repository, tmp_path):
    """As the documentation has it, from the beginning to the end."""
    log = train(repository / 'configs/resnet18_to_attention_digits.py', tmp_path)
    scores = [float(score) for score in re.findall(r'accuracy/top1: ([\d.]+)', log)]
    drift = float(re.search(r'Relative change of the output on the current batch: ([\d.e-]+)', log)[1])
    assert len(scores) == 30 and 'Transition at epoch 15:\n' in log
    assert min(scores[14], scores[-1]) > 97 and 0 < drift < 0.01
