"""Vision transformers pruned with the framework's tools, as processes: distributed, tested, without a training."""

import shutil
import sys

import mmpretrain
import pytest
import torch
from helpers.processes import HOOKS, assert_equal, run, train, train_two
from mmengine.runner import load_checkpoint

import attncnn_plugin.mm.safe_loading  # noqa: F401
from attncnn_plugin import follow_state_dict

CONFIG = """
_base_ = '{base}'
custom_imports = dict(
    imports=['attncnn_plugin', 'attncnn_plugin.mm.safe_loading', 'test_hooks'], allow_failed_imports=False)
model = dict(
    backbone=dict(
        _delete_=True,
        type='VisionTransformer',
        arch=dict(embed_dims=16, num_layers=2, num_heads=4, feedforward_channels=24),
        img_size=16,
        patch_size=4,
        in_channels=1,
    ),
    head=dict(in_channels=16),
)
# Plain gradients: AdamW makes steps of the rounding errors in gradients that are zero.
optim_wrapper = dict(optimizer=dict(_delete_=True, type='SGD', lr=0.05, momentum=0.9, weight_decay=1e-4))
train_dataloader = dict(batch_size={batch_size}, dataset=dict(indices=24))
val_dataloader = dict(dataset=dict(indices=8))
train_cfg = dict(max_epochs=3)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(max_keep_ckpts=-1))
custom_hooks = [
    dict(
        type='HeadPruningHook',
        epochs=[1],
        criteria=[dict(type='importance', multiply_adds=0.9), 'duplicate'],
        num_batches=2,
    ),
    dict(type='EMAHook', momentum=0.2),
    dict(type='TestHook'),
]
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory, repository):
    folder = tmp_path_factory.mktemp('vit')
    (folder / 'test_hooks.py').write_text(HOOKS)
    for batch_size in (8, 4):
        text = CONFIG.format(base=repository / 'configs/sa_quadratic_digits.py', batch_size=batch_size)
        (folder / f'batch{batch_size}.py').write_text(text)
    return folder


@pytest.fixture(scope='module')
def whole(folder):
    """A run that prunes."""
    log = train(folder / 'batch8.py', folder / 'whole', '--cfg-options', 'randomness.seed=0')
    assert 'importance  importance' in log and "Removed heads {'backbone.layers." in log
    return folder / 'whole'


@pytest.mark.slow
def test_two_processes(whole, folder):
    """Equal on both ranks, and to one process with the same batches."""
    options = '--cfg-options', 'randomness.seed=0'
    log = train_two(folder / 'batch4.py', folder / 'two', *options)
    assert 'GPU number: 2' in log and 'Removed heads' in log
    for rank in (0, 1):
        assert_equal(folder / 'two', folder / 'two', rank, tolerance=0)
        assert_equal(folder / 'two', whole, rank, tolerance=1e-5)


STOCK = """
_base_ = '{base}'
custom_hooks = []
"""
AVERAGED = """
_base_ = '{base}'
custom_hooks = [dict(type='EMAHook', momentum=0.2)]
"""


@pytest.mark.parametrize('config', [STOCK, AVERAGED])
def test_a_config_without_hooks_of_the_plugin(config, whole, folder, repository, tmp_path):
    """The tools add what the model needs: a test, and a training that goes on."""
    path = tmp_path / 'stock.py'
    path.write_text(config.format(base=folder / 'batch8.py'))
    checkpoint = whole / 'epoch_2.pth'
    options = ('--work-dir', tmp_path / 'a', '--cfg-options', 'default_hooks.logger.interval=1')
    log = run('python', repository / 'tools/test.py', path, checkpoint, *options, folder=folder)
    assert 'accuracy/top1' in log and 'do not match' not in log and 'FollowStateDictHook' in log
    copy = tmp_path / 'b'
    copy.mkdir()
    shutil.copy(checkpoint, copy)
    options = ('--work-dir', copy, '--resume', copy / checkpoint.name)
    log = run('python', repository / 'tools/train.py', path, *options, folder=folder)
    assert 'Saving checkpoint at 3 epochs' in log and 'do not match' not in log
    saved, before = (torch.load(of / 'epoch_3.pth')['state_dict'] for of in (copy, whole))
    assert {name: value.shape for name, value in saved.items()} == {name: value.shape for name, value in before.items()}


def test_loads_everywhere(whole, folder, repository, tmp_path):
    config, checkpoint = str(folder / 'batch8.py'), str(whole / 'epoch_3.pth')
    log = run('python', repository / 'tools/test.py', config, checkpoint, '--work-dir', tmp_path, folder=folder)
    assert 'Epoch(test)' in log and 'accuracy/top1' in log and 'do not match' not in log
    sys.path.insert(0, str(folder))
    model = mmpretrain.get_model(config)
    sys.path.remove(str(folder))
    saved = torch.load(checkpoint)['state_dict']
    follow_state_dict(model, saved)
    load_checkpoint(model, checkpoint, strict=True)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert sum(layer.attn.num_heads for layer in model.backbone.layers) < 8


@pytest.mark.parametrize(
    'options, heads, kind',
    [
        (['--criterion', 'importance', '--keep', '3'], 3, 'of 4 heads least important\n'),
        (['--criterion', 'uniform', 'importance', '--keep', '3'], 3, 'of 4 heads degenerate or least important\n'),
        (['--heads', '{"backbone.layers.1.attn": [0, 3]}'], 6, ''),
        (['--heads', '{0: [1]}'], 7, ''),
    ],
)
def test_without_a_training(options, heads, kind, whole, folder, repository):
    tool = repository / 'tools/model_converters/prune_heads.py'
    start, pruned = whole / 'epoch_1.pth', folder / 'pruned.pth'
    log = run('python', tool, folder / 'batch8.py', start, pruned, *options, folder=folder)
    assert 'parameters became' in log and kind in log and ('degenerate' in log) == ('degenerate' in kind)
    state = torch.load(pruned)['state_dict']
    assert sum(state[f'backbone.layers.{i}.attn.proj.weight'].shape[1] for i in range(2)) == 4 * heads


@pytest.mark.parametrize(
    'options, message',
    [
        (['--criterion', 'importance'], 'nothing says how many heads go'),
        (['--criterion', 'entropy', '--keep', '3'], 'add it to --criterion'),
        (['--criterion', 'stripe'], "the criterion 'stripe' is for Gaussian heads"),
        (['--heads', '{7: [1]}'], 'heads of 7 are to be removed, but there are 0'),
    ],
)
def test_mistakes_of_the_tool(options, message, whole, folder, repository):
    tool = repository / 'tools/model_converters/prune_heads.py'
    log = run('python', tool, folder / 'batch8.py', whole / 'epoch_1.pth', 'x.pth', *options, folder=folder, expected=1)
    assert message in log and 'Traceback' not in log
