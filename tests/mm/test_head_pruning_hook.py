"""Heads pruned in the framework's own trainer: optimizer, average, bias, resuming, in attention of every kind."""

import numpy as np
import pytest
import torch
from helpers.digits import (
    CHANGE,
    EPOCHS,
    ITERATIONS,
    LAYER,
    assert_close,
    average_of,
    log_of,
    numbers,
    run,
    small_config,
)
from helpers.small import SMALL_ARCH, save_degenerate
from mmengine.hooks import Hook
from mmengine.runner import Runner

from attncnn_plugin.pruning import prunable_heads

C20 = 'SAGeneralized'  # two degenerate heads, found by C20's criteria
VIT = dict(type='VisionTransformer', arch=dict(SMALL_ARCH, num_heads=4), img_size=16, patch_size=4, in_channels=1)


def config_of(name, repository, folder, hook=None, **changes):
    config = small_config(repository, folder, 'sa_generalized_digits', **changes)
    if name == 'VisionTransformer':
        config.model.backbone = VIT
    hooks = [] if hook is None else [dict(type='HeadPruningHook', **hook)]
    config.custom_hooks = [*hooks, dict(type='EMAHook', momentum=0.2)]
    return config


@pytest.fixture(scope='module')
def start(tmp_path_factory):
    return save_degenerate(tmp_path_factory.mktemp('start') / 'start.pth')


@pytest.fixture(scope='module', params=[C20, 'VisionTransformer'])
def whole(request, tmp_path_factory, repository, start):
    """A run that prunes: its backbone, hook, runner, recorder and work folder."""
    folder, name = tmp_path_factory.mktemp('whole'), request.param
    hook = dict(epochs=[CHANGE], num_batches=2)
    changes = dict(load_from=start) if name == C20 else dict()
    if name != C20:
        hook['keep'] = 5
        changes['model.head.cal_acc'] = True  # losses that come with accuracies
    config = config_of(name, repository, folder, hook, log_level='INFO', **changes)
    return name, hook, *run(config), folder


def test_heads_and_optimizer(whole):
    name, _, runner, recorder, folder = whole
    before, after = recorder.heads[0], recorder.heads[-1]
    assert recorder.heads == [before] * CHANGE * ITERATIONS + [after] * (EPOCHS - CHANGE) * ITERATIONS
    assert (after == [2, 2]) if name == C20 else (sum(after) == 5 and min(after) >= 1)
    optimizer = runner.optim_wrapper.optimizer
    assert {id(p) for g in optimizer.param_groups for p in g['params']} == {id(p) for p in runner.model.parameters()}
    assert set(optimizer.state) == set(runner.model.parameters())
    for parameter, state in optimizer.state.items():
        assert state['exp_avg'].shape == parameter.shape
        assert state['step'] == EPOCHS * ITERATIONS  # on, not anew
    if name == C20:
        center = runner.model.backbone.blocks[0].attn.encoding.center
        assert [g['weight_decay'] for g in optimizer.param_groups if any(p is center for p in g['params'])] == [0.0]
    for key, value in average_of(runner).module.state_dict().items():
        assert value.shape == runner.model.state_dict()[key].shape
    log = log_of(folder)
    assert f'at epoch {CHANGE}: ' in log and 'Removed heads {' in log and 'parameters became' in log


def test_schedulers_stay(whole):
    rates, last = np.array(whole[3].rates), (EPOCHS - 1) * ITERATIONS
    cosine = 3e-3 / 2 * (1 + np.cos(np.pi * np.arange(last) / last))
    assert np.allclose(rates[ITERATIONS:], cosine)


@pytest.mark.parametrize('epoch', [1, CHANGE, CHANGE + 1])
def test_resumed_run_equals_the_whole_one(epoch, whole, repository, tmp_path):
    name, hook, runner, recorder, folder = whole
    resume = dict(load_from=str(folder / f'epoch_{epoch}.pth'), resume=True)
    resumed, again = run(config_of(name, repository, tmp_path, hook, **resume))
    assert again.heads == recorder.heads[epoch * ITERATIONS :]
    assert np.allclose(again.rates, recorder.rates[epoch * ITERATIONS :], rtol=1e-12)
    assert_close(resumed.model.state_dict(), runner.model.state_dict())
    assert_close(average_of(resumed).state_dict(), average_of(runner).state_dict())


@pytest.mark.parametrize('resume', [False, True])
def test_pruned_checkpoint_in_a_config_that_never_prunes(resume, whole, repository, tmp_path):
    """The optimizer trains what is there; a transformer of another library needs a hook that brings it there."""
    name, _, _, recorder, folder = whole
    path = folder / f'epoch_{CHANGE + 1}.pth'
    config = config_of(name, repository, tmp_path, load_from=str(path), resume=resume)
    if name != C20:
        config.custom_hooks.append(dict(type='FollowStateDictHook'))
    config.train_cfg.max_epochs = CHANGE + 2 if resume else 1
    config.param_scheduler = None
    runner, again = run(config)
    assert again.heads == recorder.heads[-1:] * ITERATIONS
    before = torch.load(path)['state_dict']
    trained = {key for key, _ in runner.model.named_parameters()}
    assert {key for key in trained if not torch.equal(runner.model.state_dict()[key], before[key])} == trained


def test_by_what_heads_attend_to(repository, tmp_path):
    """A head without queries is uniform, in means over training images; its output, here a constant, stays."""
    config = config_of('VisionTransformer', repository, tmp_path, dict(epochs=[0], criteria=['entropy'], num_batches=2))
    config.train_cfg.max_epochs = 1
    config.optim_wrapper.optimizer.update(lr=0.0, weight_decay=0.0)
    runner, images = Runner.from_cfg(config), torch.randn(4, 1, 16, 16)
    with torch.no_grad():
        for parameter in runner.model.backbone.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
        attention = runner.model.backbone.layers[0].attn
        attention.qkv.weight.view(3, 4, 4, 16)[[0, 2], 1] = 0  # queries and values of the second head
        attention.qkv.bias[4:8] = 0
    expected = runner.model.eval()(images)
    torch.save(dict(state_dict=runner.model.state_dict(), meta={}), tmp_path / 'start.pth')
    config.load_from = str(tmp_path / 'start.pth')
    runner, _ = run(config)
    assert numbers(runner.model) == [3, 4]
    torch.testing.assert_close(runner.model.eval()(images), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_share_of_the_multiply_adds(repository, tmp_path):
    """Of those at each of the epochs; a run that is resumed ends as it would have."""
    hook = dict(epochs=[1, 3], multiply_adds=0.92, num_batches=1)
    runner, recorder = run(config_of('VisionTransformer', repository, tmp_path, hook))
    counts = [sum(recorder.heads[epoch * ITERATIONS]) for epoch in range(EPOCHS)]
    assert 8 == counts[0] > counts[1] == counts[2] > counts[3] == counts[4]
    resume = dict(load_from=str(tmp_path / 'epoch_3.pth'), resume=True)
    again, _ = run(config_of('VisionTransformer', repository, tmp_path / 'on', hook, **resume))
    assert numbers(again.model) == numbers(runner.model)


@pytest.mark.slow
def test_two_hooks_at_the_same_epoch(repository, tmp_path):
    """Each prunes its own layers, and leaves one head, twice; an epoch that never comes is a warning."""
    every = dict(criteria=[dict(type='uniform', threshold=1e9)], num_batches=1)
    config = config_of(C20, repository, tmp_path, dict(every, epochs=1, layers='*.0.*'), **{'train_cfg.max_epochs': 2})
    config.custom_hooks.insert(1, dict(every, type='HeadPruningHook', epochs=[0, 1, 7], layers='*.1.*'))
    assert numbers(run(config)[0].model) == [1, 1]
    assert 'The run ends after 2 epochs: HeadPruningHook does nothing at epoch 7\n' in log_of(tmp_path)


@pytest.mark.slow
def test_augmentations_of_a_resumed_run(repository, tmp_path):
    """Heads are judged by the same images as without a stop, where each epoch has random numbers of its own."""

    def config(folder, **changes):
        new = config_of('VisionTransformer', repository, folder, dict(epochs=[1], keep=5, num_batches=1), **changes)
        new.train_dataloader.dataset.pipeline.insert(-1, dict(type='RandomFlip', prob=0.5))
        new.custom_hooks.append(dict(type='EpochSeedHook'))
        new.train_cfg.max_epochs = 2
        return new

    whole, _ = run(config(tmp_path))
    resumed, _ = run(config(tmp_path / 'on', load_from=str(tmp_path / 'epoch_1.pth'), resume=True))
    assert_close(resumed.model.state_dict(), whole.model.state_dict())


class Degenerate(Hook):
    """After the transition the second head is uniform, the third looks as the first."""

    priority = 'LOWEST'

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == CHANGE * ITERATIONS:
            encoding = runner.model.get_submodule(LAYER).encoding
            with torch.no_grad():
                encoding.sqrt_precision[1] = 0
                encoding.center[2] = encoding.center[0]


def cnn(repository, work_dir, **changes):
    """A CNN that becomes attention, and loses heads an epoch later."""
    changes = {'model.backbone.content': None, 'log_level': 'INFO', **changes}
    config = small_config(repository, work_dir, 'resnet18_to_attention_digits', **changes)
    config.optim_wrapper.paramwise_cfg.custom_keys['encoding'] = dict(lr_mult=0.0, decay_mult=0.0)
    hook = dict(type='HeadPruningHook', epochs=[CHANGE + 1], criteria=['uniform', 'duplicate'])
    config.custom_hooks.insert(0, hook)
    config.custom_hooks.append(dict(type='EMAHook', momentum=0.2))
    return config


@pytest.mark.slow
def test_after_a_transition(repository, tmp_path):
    """Really smaller, in the model, its average and its optimizer; resumed from there with both hooks."""
    runner, _ = run(cnn(repository, tmp_path / 'whole'), Degenerate())
    layer = runner.model.get_submodule(LAYER)
    assert layer.num_heads == 7 and layer.value.weight.shape == (32, 7 * 16)
    groups = runner.optim_wrapper.optimizer.param_groups
    assert {id(p) for group in groups for p in group['params']} == {id(p) for p in runner.model.parameters()}
    assert average_of(runner).module.get_submodule(LAYER).num_heads == 7
    log = log_of(tmp_path / 'whole')
    assert f'{LAYER} at epoch 3: 2 of 9 heads degenerate' in log and 'duplicate  distance 0 < 0.01 from head 0' in log

    checkpoint = str(tmp_path / 'whole' / f'epoch_{CHANGE + 2}.pth')
    again, _ = run(cnn(repository, tmp_path / 'again', resume=True, load_from=checkpoint), Degenerate())
    assert again.model.get_submodule(LAYER).num_heads == 7
    assert_close(again.model.state_dict(), runner.model.state_dict())

    for resume in (False, True):  # without the hook that turns a CNN
        config = cnn(repository, tmp_path / str(resume), load_from=checkpoint, resume=resume)
        config.custom_hooks = [dict(type='HeadPruningHook'), dict(type='EMAHook')]
        with pytest.raises(ValueError, match=rf"built before .* such as {LAYER}\.value.weight: .* phase='attn' of"):
            run(config)


@pytest.mark.parametrize('epoch', [CHANGE, CHANGE + 1])
@pytest.mark.parametrize('settings', [dict(criteria=['uniform', 'stripe']), dict(multiply_adds=0.9)])
def test_criteria_of_attention_to_come(settings, epoch, repository, tmp_path):
    """At the transition's epoch or later; criteria that are not for what convolutions became end the run."""
    config = small_config(repository, tmp_path)
    config.custom_hooks.insert(0, dict(type='HeadPruningHook', epochs=[epoch], num_batches=1, **settings))
    if 'criteria' in settings:
        with pytest.raises(TypeError, match="backbone.blocks.0.attn: the criterion 'stripe' is for Gaussian heads"):
            run(config)
    else:
        runner, _ = run(config)
        assert sum(numbers(runner.model)) < sum(own.built_heads for own in prunable_heads(runner.model).values())


@pytest.mark.parametrize(
    'name, settings, error, message',
    [
        (C20, dict(criteria=['ugly']), ValueError, "criterion 'ugly' is unknown"),
        ('VisionTransformer', dict(), TypeError, "layers.0.attn: the criterion 'stripe' is for Gaussian heads"),
        ('VisionTransformer', dict(criteria=['entropy'], layers='x*'), ValueError, "no attention with layers='x\\*'"),
        ('VisionTransformer', dict(epoch=1), TypeError, "multiple values for argument 'epoch'"),
    ],
)
def test_refused_at_once(name, settings, error, message, repository, tmp_path):
    config = config_of(name, repository, tmp_path, dict(epochs=[EPOCHS - 1], **settings))
    with pytest.raises(error, match=message):
        run(config)
    assert not list(tmp_path.glob('*.pth'))
