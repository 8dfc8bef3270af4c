"""Heads pruned with the framework's tools, as processes: distributed, killed, tested, published, without a training."""

import signal
import sys
from pathlib import Path

import mmpretrain
import numpy as np
import pytest
import torch
from helpers.processes import HOOKS, assert_equal, rates, run, train, train_two
from helpers.small import SMALL_ARCH, small_timm
from mmpretrain import FeatureExtractor, ImageClassificationInferencer

import attncnn_plugin.mm.safe_loading  # noqa: F401
from attncnn_plugin.pruning import find_degenerate_heads

EPOCHS, PRUNE_AT, ITERATIONS = 6, 2, 3  # epochs, the epoch of pruning, iterations of an epoch

CONFIG = """
_base_ = '{base}'
custom_imports = dict(
    imports=['attncnn_plugin', 'attncnn_plugin.mm.safe_loading', 'test_hooks'], allow_failed_imports=False)
model = dict(backbone=dict(arch=dict(_delete_=True, **{arch})), head=dict(in_channels=16))
# Plain gradients: AdamW makes steps of the rounding errors in gradients that are zero.
optim_wrapper = dict(optimizer=dict(_delete_=True, type='SGD', lr=0.05, momentum=0.9, weight_decay=1e-4))
train_dataloader = dict(batch_size={batch_size}, dataset=dict(indices=24))
val_dataloader = dict(dataset=dict(indices=8))
train_cfg = dict(max_epochs=6)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(max_keep_ckpts=-1))
custom_hooks = [
    dict(type='HeadPruningHook', epochs=[2], lr_scale=0.5, num_batches=1),
    dict(type='EMAHook', momentum=0.2),
    dict(type='TestHook'),
]
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory, repository):
    folder = tmp_path_factory.mktemp('pruning')
    (folder / 'test_hooks.py').write_text(HOOKS)
    torch.manual_seed(0)
    model = small_timm('sa_generalized_cifar', in_chans=1)
    with torch.no_grad():
        model.blocks[0].attn.encoding.sqrt_precision[1] = 0
        model.blocks[1].attn.encoding.sqrt_precision[2] = torch.tensor([[3.0, 0.0], [0.0, 1e-6]])
    state = {name if name.startswith('head') else f'backbone.{name}': v for name, v in model.state_dict().items()}
    torch.save(dict(state_dict=state, meta={}), folder / 'start.pth')
    for batch_size in (8, 4):
        (folder / f'batch{batch_size}.py').write_text(
            CONFIG.format(base=repository / 'configs/sa_generalized_digits.py', batch_size=batch_size, arch=SMALL_ARCH)
        )
    return folder


@pytest.fixture(scope='module')
def whole(folder, repository):
    """A run that prunes, never stopped."""
    log = train(folder / 'batch8.py', folder / 'whole', '--cfg-options', f'load_from={folder}/start.pth')
    assert "Removed heads {'backbone.blocks.0.attn': [1], 'backbone.blocks.1.attn': [2]}" in log
    assert 'largest eigenvalue 0 < 1e-05' in log and 'condition number' in log
    return folder / 'whole'


@pytest.mark.parametrize(
    'kill_at', [3, 6, pytest.param(9, marks=pytest.mark.slow), 12, pytest.param(15, marks=pytest.mark.slow)]
)
def test_killed_and_resumed(kill_at, whole, folder, repository):
    """At each epoch boundary in turn; at the second, the heads are gone, and the last checkpoint still has them."""
    name = f'killed{kill_at}'
    train(
        folder / 'batch8.py',
        folder / name,
        '--cfg-options',
        f'load_from={folder}/start.pth',
        expected=-signal.SIGKILL,
        KILL_AT=str(kill_at),
    )
    log = train(folder / 'batch8.py', folder / name, '--resume')
    assert f'resumed epoch: {kill_at // ITERATIONS}' in log
    assert_equal(folder / name, whole)
    assert rates(folder / name) == rates(whole) and len(rates(whole)) == EPOCHS * ITERATIONS


def test_two_processes(whole, folder, repository):
    """Twelve iterations after the pruning: equal on both ranks, and to one process with the same batches."""
    log = train_two(folder / 'batch4.py', folder / 'two', '--cfg-options', f'load_from={folder}/start.pth')
    assert 'GPU number: 2' in log and 'Removed heads' in log
    train_two(folder / 'batch4.py', folder / 'again', '--resume', folder / 'two/epoch_3.pth')
    for rank in (0, 1):
        assert_equal(folder / 'two', folder / 'two', rank, tolerance=0)
        assert_equal(folder / 'two', whole, rank, tolerance=1e-5)
        assert_equal(folder / 'again', folder / 'two', rank)


def test_loads_everywhere(whole, folder, repository, tmp_path):
    """A pruned checkpoint with the config that made it, and published."""
    config, checkpoint = str(folder / 'batch8.py'), str(whole / f'epoch_{EPOCHS}.pth')
    log = run('python', repository / 'tools/test.py', config, checkpoint, '--work-dir', tmp_path, folder=folder)
    assert 'Epoch(test)' in log and 'accuracy/top1' in log and 'do not match' not in log

    tool = Path(mmpretrain.__file__).parent / '.mim/tools/model_converters/publish_model.py'
    run(
        'python',
        '-c',
        f'import attncnn_plugin.mm.safe_loading, runpy, sys; sys.argv[0] = {str(tool)!r}; '
        f'runpy.run_path({str(tool)!r}, run_name="__main__")',
        checkpoint,
        tmp_path / 'published.pth',
        folder=folder,
    )
    (published,) = tmp_path.glob('published*.pth')

    sys.path.insert(0, str(folder))
    model = mmpretrain.get_model(config, pretrained=checkpoint)
    other = mmpretrain.get_model(config, pretrained=str(published))
    sys.path.remove(str(folder))
    assert [block.attn.num_heads for block in model.backbone.blocks] == [2, 2]
    saved = torch.load(checkpoint)['state_dict']
    for loaded in (model, other):
        assert all(torch.equal(value, saved[name]) for name, value in loaded.state_dict().items())
    image = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    (result,) = ImageClassificationInferencer(model)([image])
    assert np.isclose(sum(result['pred_scores']), 1)
    (features,) = FeatureExtractor(model)([image])
    assert features[-1].shape == (16,)
    ours = small_timm('sa_generalized_cifar', in_chans=1, checkpoint_path=checkpoint).eval()
    x = torch.randn(1, 1, 16, 16)
    assert torch.equal(ours(x), model(x))


def tool(folder, repository, *options, **kwargs):
    return run(
        'python',
        repository / 'tools/model_converters/prune_heads.py',
        folder / 'batch8.py',
        folder / 'start.pth',
        folder / 'out/pruned.pth',
        *options,
        folder=folder,
        **kwargs,
    )


@pytest.mark.parametrize(
    'options, heads',
    [
        (['--criterion', 'uniform', 'stripe'], [[0, 2], [0, 1]]),
        (['--criterion', 'uniform'], [[0, 2], [0, 1, 2]]),
        (['--criterion', 'entropy', '--size', '8', '8'], [[0, 2], [0, 1, 2]]),
        (['--heads', '{1: [0, 2]}'], [[0, 1, 2], [1]]),
    ],
)
def test_without_a_training(options, heads, folder, repository):
    log = tool(folder, repository, *options)
    assert 'parameters became' in log and f'Saved {folder}/out/pruned.pth' in log
    before = torch.load(folder / 'start.pth')['state_dict']
    after = torch.load(folder / 'out/pruned.pth')['state_dict']
    for block, kept in enumerate(heads):
        name = f'backbone.blocks.{block}.attn.encoding.center'
        assert torch.equal(after[name], before[name][kept])
    model = small_timm('sa_generalized_cifar', in_chans=1, checkpoint_path=str(folder / 'out/pruned.pth'))
    assert [block.attn.num_heads for block in model.blocks] == [len(kept) for kept in heads]
    if not options:
        assert not any(find_degenerate_heads(block.attn).heads for block in model.blocks)


@pytest.mark.parametrize(
    'options, message',
    [
        (['--heads', '{0: [7]}'], 'heads=[7] must be different heads from 0 to 2'),
        (['--heads', '[0]'], "--heads '[0]' must be the heads of each block, for instance '{0: [1, 3]}'"),
        (['--heads', '{0: [0, 1, 2]}'], 'are all heads of the layer: keep one'),
        (['--criterion', 'ugly'], "criterion 'ugly' is unknown"),
    ],
)
def test_tool_refuses(options, message, folder, repository):
    log = tool(folder, repository, *options, expected=1)
    assert message in log.strip().splitlines()[-1]
