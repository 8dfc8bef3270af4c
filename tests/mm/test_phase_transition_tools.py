"""Both phases of CMHSA with the framework's tools, as processes: killed, distributed, tested, converted."""

import re
import signal
import sys

import mmpretrain
import numpy as np
import pytest
import torch
from helpers.processes import HOOKS, assert_equal, rates, run, train, train_two
from helpers.small import small_cmhsa
from mmpretrain import ImageClassificationInferencer

import attncnn_plugin.mm.safe_loading  # noqa: F401

EPOCHS, SWITCH, ITERATIONS = 4, 2, 3  # epochs, epochs of the first phase, iterations of an epoch

CONFIG = """
_base_ = '{base}'
custom_imports = dict(
    imports=['attncnn_plugin', 'attncnn_plugin.mm.safe_loading', 'test_hooks'], allow_failed_imports=False)
model = dict(backbone=dict(num_layers=2, attn_bias_init=40.))
# Plain gradients: AdamW makes steps of the rounding errors in gradients that are zero.
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


@pytest.fixture(scope='module')
def folder(tmp_path_factory, repository):
    folder = tmp_path_factory.mktemp('phases')
    (folder / 'test_hooks.py').write_text(HOOKS)
    for batch_size in (8, 4):
        (folder / f'batch{batch_size}.py').write_text(
            CONFIG.format(base=repository / 'configs/cmhsa3_digits.py', batch_size=batch_size)
        )
    return folder


@pytest.fixture(scope='module')
def whole(folder, repository):
    """A run through both phases, never stopped."""
    log = train(folder / 'batch8.py', folder / 'whole')
    assert 'Transition at epoch 2:\n' in log and 'blocks.0.attn  3×3 kernel  9 heads' in log
    return folder / 'whole'


@pytest.mark.parametrize('kill_at', [SWITCH * ITERATIONS - 2, SWITCH * ITERATIONS, EPOCHS * ITERATIONS - 1])
def test_killed_and_resumed(kill_at, whole, folder, repository):
    """In the first phase, at the transition, and in the second phase."""
    name = f'killed{kill_at}'
    log = train(folder / 'batch8.py', folder / name, expected=-signal.SIGKILL, KILL_AT=str(kill_at))
    assert ('Transition at epoch 2' in log) == (kill_at >= SWITCH * ITERATIONS)
    log = train(folder / 'batch8.py', folder / name, '--resume')
    assert f'resumed epoch: {kill_at // ITERATIONS}' in log
    assert_equal(folder / name, whole)
    assert rates(folder / name) == rates(whole) and len(rates(whole)) == EPOCHS * ITERATIONS


@pytest.fixture(scope='module')
def two(folder):
    """The same run by two processes."""
    log = train_two(folder / 'batch4.py', folder / 'two')
    assert 'GPU number: 2' in log and 'Transition at epoch 2' in log and 'Epoch(val) [4]' in log
    return folder / 'two'


@pytest.mark.parametrize(
    'epoch, options', [(3, []), pytest.param(1, ['--cfg-options', 'compile.backend=eager'], marks=pytest.mark.slow)]
)
def test_two_processes(epoch, options, two, whole, folder):
    """Equal weights on both ranks, those of one process with the same batches; resumed in each phase; compiled."""
    again = folder / f'again{epoch}'
    log = train_two(folder / 'batch4.py', again, '--resume', two / f'epoch_{epoch}.pth', *options)
    assert log.count('Model has been "compiled"') == len(options)  # at the start, and at the transition
    for rank in (0, 1):
        assert_equal(two, two, rank, tolerance=0)
        assert_equal(two, whole, rank, tolerance=1e-5)
        assert_equal(again, two, rank, tolerance=1e-5 if options else 1e-6)


@pytest.mark.parametrize('epoch', [SWITCH, EPOCHS])
def test_checkpoints_of_both_phases_load_everywhere(epoch, whole, folder, repository):
    """With the config that made the run, and nothing said."""
    config, checkpoint = str(folder / 'batch8.py'), str(whole / f'epoch_{epoch}.pth')
    log = run(
        'python',
        repository / 'tools/test.py',
        config,
        checkpoint,
        '--work-dir',
        folder / f'test{epoch}',
        folder=folder,
    )
    assert 'Epoch(test)' in log and 'accuracy/top1' in log and 'do not match' not in log

    sys.path.insert(0, str(folder))
    model = mmpretrain.get_model(config, pretrained=checkpoint)
    sys.path.remove(str(folder))
    phase = 'conv' if epoch == SWITCH else 'attn'
    assert model.backbone.phase == phase
    saved = torch.load(checkpoint)['state_dict']
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())

    image = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    (result,) = ImageClassificationInferencer(model)([image])
    assert np.isclose(sum(result['pred_scores']), 1)
    ours = small_cmhsa('conv', img_size=32, patch_size=8, in_chans=1, mlp_dim=256, checkpoint_path=checkpoint).eval()
    x = torch.randn(1, 1, 32, 32)
    assert ours.phase == phase and torch.equal(ours(x), model(x))


@pytest.mark.parametrize('phase', ['conv', 'attn'])
def test_converter(phase, whole, folder, repository):
    """A first-phase checkpoint as one of the second, for either phase's config; the output stays as it was."""
    config, first, out = folder / 'batch8.py', whole / f'epoch_{SWITCH}.pth', folder / f'converted/{phase}.pth'
    tool = repository / 'tools/model_converters/conv_to_attention.py'
    log = run('python', tool, config, first, out, '--cfg-options', f'model.backbone.phase={phase}', folder=folder)
    assert f'Saved {out}' in log
    kwargs = dict(img_size=32, patch_size=8, in_chans=1, mlp_dim=256)
    before = small_cmhsa('conv', **kwargs, checkpoint_path=str(first)).eval()
    after = small_cmhsa('attn', **kwargs, checkpoint_path=str(out)).eval()
    x = torch.randn(2, 1, 32, 32)
    assert (before.phase, after.phase) == ('conv', 'attn') and torch.allclose(before(x), after(x), atol=1e-5)
    assert torch.load(out)['meta']['dataset_meta']['classes']


def test_converter_refuses(whole, folder, repository):
    tool = repository / 'tools/model_converters/conv_to_attention.py'
    second = whole / f'epoch_{EPOCHS}.pth'
    log = run('python', tool, folder / 'batch8.py', second, folder / 'no.pth', folder=folder, expected=1)
    assert log.strip().endswith(f'{second} is not of the convolution phase: there is nothing to convert')
    log = run(
        'python',
        tool,
        repository / 'configs/sa_quadratic_digits.py',
        second,
        folder / 'no.pth',
        folder=folder,
        expected=1,
    )
    assert 'sa_quadratic_digits.py has no CMHSA and no ConvToAttention: there is nothing to convert' in log
    assert not (folder / 'no.pth').exists()


class RunsAtLoading:
    def __reduce__(self):
        return print, ('run',)


@pytest.mark.parametrize(
    'content, message',
    [
        (None, r'.*/bad\.pth can not be found\.'),
        (b'PK\x03\x04 cut', r'.*/bad\.pth is damaged or no checkpoint at all: give a whole file .*'),
        (RunsAtLoading(), r'.*/bad\.pth was refused and nothing in it was run: it asks for .*print, but a .* alone'),
        ([1], r'.*/bad\.pth holds a list, but a checkpoint is a dictionary of weights, .*'),
        ({'state_dict': {}}, r'.*/bad\.pth does not fit the model of .*/batch8\.py: .*backbone.*'),
    ],
    ids=['missing', 'damaged', 'malicious', 'list', 'other'],
)
def test_converter_refuses_a_file_in_one_sentence(content, message, folder, tmp_path, repository):
    path = tmp_path / 'bad.pth'
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    tool = repository / 'tools/model_converters/conv_to_attention.py'
    log = run('python', tool, folder / 'batch8.py', path, tmp_path / 'no.pth', folder=folder, expected=1)
    assert 'Traceback' not in log and re.fullmatch(message, log.strip().splitlines()[-1])
    assert not (tmp_path / 'no.pth').exists()
