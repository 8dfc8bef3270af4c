"""Both phases in one run, in the framework's own trainer: optimizer, schedule, average, resuming, mistakes."""

import copy

import numpy as np
import pytest
import torch
from helpers.digits import CHANGE, EPOCHS, ITERATIONS, LAYER, assert_close, average_of, log_of, run, small_config
from mmengine.hooks import Hook
from mmengine.model import ExponentialMovingAverage
from mmengine.runner import Runner
from mmpretrain.registry import MODELS
from torch import nn

from attncnn_plugin.analysis import read_scalars
from attncnn_plugin.attention import ContentImageAttention

RATES = [2e-3, 0, *np.linspace(5e-4, 1e-4, 4)]  # by iterations: each phase to the end of its line
KINDS = ('CMHSA', 'narrow', 'CNN', 'iterations')


def config_of(kind, repository, work_dir, **changes):
    """A small run of CMHSA, with narrow heads too, of a CNN, and of CMHSA in a loop that counts iterations."""
    if kind == 'CNN':
        return small_config(repository, work_dir, 'resnet18_to_attention_digits', **changes)
    config = small_config(repository, work_dir)
    config.model.backbone.attn_bias_init = 40.0
    if kind == 'narrow':
        config.model.backbone.update(head_dim='exact', qk_dim=8)
    if kind == 'iterations':
        config.train_cfg = dict(type='IterBasedTrainLoop', max_iters=6, val_interval=6)
        config.train_dataloader.sampler = dict(type='InfiniteSampler', shuffle=True)
        config.default_hooks.checkpoint.update(by_epoch=False, interval=1)
        config.log_processor = dict(by_epoch=False)
        line = dict(type='PolyLR', power=1, begin=0, by_epoch=False)
        config.param_scheduler = [dict(line, end=2)]
        config.custom_hooks[0] = dict(
            type='PhaseTransitionHook',
            iter=2,
            optim_wrapper=dict(optimizer=dict(lr=5e-4)),
            param_scheduler=[dict(line, eta_min=1e-4)],  # its end is that of the run
        )
    config.merge_from_dict(changes)
    return config


def averaged(kind, config):
    config.custom_hooks.append(dict(type='EMAHook', momentum=0.2, update_buffers=kind == 'narrow'))
    return config


class Average(Hook):
    """The averages after the transition, computed here."""

    priority = 'LOWEST'

    def __init__(self, switch):
        self.switch = switch

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.switch:
            module = average_of(runner).module
            assert module.backbone.phase == 'attn' and not any(p.requires_grad for p in module.parameters())
            self.expected = {name: value.clone() for name, value in module.state_dict().items()}

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter >= self.switch:
            for name, value in runner.model.named_parameters():
                self.expected[name].lerp_(value.detach(), 0.2)


@pytest.fixture(scope='module', params=KINDS)
def whole(request, tmp_path_factory, repository):
    """A run through both phases: its kind, runner, recorder, average and work folder."""
    kind, work_dir = request.param, tmp_path_factory.mktemp('whole')
    average = Average(2 if kind == 'iterations' else CHANGE * ITERATIONS)
    config = averaged(kind, config_of(kind, repository, work_dir, log_level='INFO'))
    return kind, *run(config, average), average, work_dir


def test_phases_and_optimizer(whole, tool):
    kind, runner, recorder, _, work_dir = whole
    switch, end = (2, 6) if kind == 'iterations' else (CHANGE * ITERATIONS, EPOCHS * ITERATIONS)
    assert recorder.phases == ['conv'] * switch + ['attn'] * (end - switch)
    groups = runner.optim_wrapper.optimizer.param_groups
    assert {id(p) for group in groups for p in group['params']} == {id(p) for p in runner.model.parameters()}
    log = log_of(work_dir)
    ((step, _),) = read_scalars(work_dir)['transition/parameters']  # curves are marked here
    (file,) = work_dir.glob('*/vis_data/scalars.json')
    words = ['plot_curve', file, '--keys', 'accuracy/top1', 'loss', '--out', work_dir / 'curves.png']
    tool('mmpretrain_tool.py', 'analysis_tools/analyze_logs.py', *words)
    assert step == (2 if kind == 'iterations' else CHANGE)
    assert f'Transition at {"iter" if kind == "iterations" else "epoch"} 2' in log
    assert f'{"layer4.0.conv1 " if kind == "CNN" else "blocks.0.attn "} 3×3 kernel  9 heads' in log
    if kind != 'iterations':
        before, after, end = (recorder.weights[epoch] for epoch in (CHANGE, CHANGE + 1, EPOCHS))
        key = f'{LAYER}.key.weight' if kind == 'CNN' else 'backbone.blocks.1.attn.query.weight'
        assert key not in before and not torch.equal(after[key], end[key])
    if kind == 'CNN':  # positions do not decay
        layer = runner.model.get_submodule(LAYER)
        decays = {id(p): group['weight_decay'] for group in groups for p in group['params']}
        assert isinstance(layer, ContentImageAttention)
        assert decays[id(layer.encoding.center)] == 0 and decays[id(layer.key.weight)] == 1e-4


def test_schedules(whole):
    """Each phase has its own warm-up and its own cosine, counted from its beginning."""
    kind, runner, recorder, *_ = whole
    rates = np.array(recorder.rates)
    if kind == 'iterations':
        assert np.allclose(rates, RATES)
        return
    begin = 0
    peaks = (0.05, 0.01) if kind == 'CNN' else (2e-3, 5e-4)
    for peak, epochs in zip(peaks, (CHANGE, EPOCHS - CHANGE)):
        own, total = rates[begin * ITERATIONS : (begin + epochs) * ITERATIONS], (epochs - 1) * ITERATIONS
        assert np.isclose(own[0], 1e-3 * peak)
        assert np.allclose(own[ITERATIONS:], peak / 2 * (1 + np.cos(np.pi * np.arange(total) / total)))
        begin += epochs
    assert np.array_equal(runner.message_hub.get_scalar('train/lr').data[0], rates)  # what is logged


def test_average(whole):
    """The averaged copy goes through the transition, and is that of what trains then."""
    _, runner, _, average, _ = whole
    for name, value in average_of(runner).module.named_parameters():
        assert torch.allclose(value, average.expected[name], atol=1e-5), name


@pytest.mark.parametrize('at', [CHANGE - 1, CHANGE, CHANGE + 1])
def test_resumed_run_equals_the_whole_one(at, whole, repository, tmp_path):
    """From before, at and after the transition; the average too, and whatever heads the config has by then."""
    kind, runner, recorder, _, work_dir = whole
    unit, done = ('iter', at) if kind == 'iterations' else ('epoch', at * ITERATIONS)
    resume = dict(load_from=str(work_dir / f'{unit}_{at}.pth'), resume=True)
    into = [(kind, {})]
    if kind == 'narrow' and at > CHANGE:
        into = [('CMHSA', {}), ('CMHSA', {'model.backbone.phase': 'attn'})]
    for name, changes in into:
        resumed, again = run(averaged(kind, config_of(name, repository, tmp_path, **resume, **changes)))
        assert again.phases == recorder.phases[done:] and np.allclose(again.rates, recorder.rates[done:], rtol=1e-12)
        assert_close(resumed.model.state_dict(), runner.model.state_dict())
        assert_close(average_of(resumed).state_dict(), average_of(runner).state_dict())


def test_second_phases_own_optimizer(repository, tmp_path):
    config = small_config(repository, tmp_path)
    config.train_cfg.max_epochs = CHANGE + 1
    config.custom_hooks[0].optim_wrapper = dict(
        optimizer=dict(_delete_=True, type='SGD', lr=0.01, momentum=0.9, weight_decay=1e-4),
        paramwise_cfg=dict(custom_keys={'position.table': dict(lr_mult=10.0)}),
        clip_grad=dict(max_norm=5.0),
    )
    config.custom_hooks[0].param_scheduler = None
    runner, recorder = run(config)
    optimizer = runner.optim_wrapper.optimizer
    names = {id(parameter): name for name, parameter in runner.model.named_parameters()}
    rates = {names[id(p)]: group['lr'] for group in optimizer.param_groups for p in group['params']}
    assert type(optimizer) is torch.optim.SGD and runner.optim_wrapper.clip_grad_kwargs == dict(max_norm=5.0)
    assert rates['backbone.blocks.0.attn.position.table'] == 0.1 and rates['head.fc.weight'] == 0.01
    assert runner.param_schedulers == [] and recorder.rates[-1] == 0.01


def test_learning_rate_scaled_to_the_batch(repository, tmp_path):
    config = small_config(repository, tmp_path, auto_scale_lr=dict(enable=True, base_batch_size=16))
    config.train_cfg.max_epochs = CHANGE + 1
    config.param_scheduler = None
    config.custom_hooks[0].param_scheduler = []
    rates = run(config)[1].rates
    assert np.allclose([rates[0], rates[-1]], [2e-3 / 2, 5e-4 / 2])


def test_gradient_accumulation(repository, tmp_path):
    """What the first phase has accumulated at its end does not leak into the second."""
    config = small_config(repository, tmp_path, log_level='INFO', **{'train_cfg.max_epochs': CHANGE + 1})
    config.optim_wrapper.accumulative_counts = 4  # 6 iterations in the first phase
    config.custom_hooks[0].param_scheduler = None

    class Gradients(Hook):
        priority = 'LOWEST'

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if runner.iter == CHANGE * ITERATIONS:
                assert all(p.grad is None for p in runner.model.parameters())
                assert runner.optim_wrapper._inner_count == runner.iter

    run(config, Gradients())
    assert 'the gradient of some iterations is lost' in log_of(tmp_path)  # mmengine says so


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['CMHSA', 'CNN'])
def test_compiled_training(kind, repository, tmp_path):
    """Each phase compiles its own optimizer, twice where learning rates change: here of the CNN."""

    def config(work_dir, **changes):
        config = config_of(kind, repository, work_dir, **changes)
        if kind == 'CMHSA':
            config.model.backbone.num_layers = 1
            config.param_scheduler = config.custom_hooks[0].param_scheduler = []
        return config

    runner, recorder = run(config(tmp_path, compile=dict(backend='eager')))
    assert {type(group) for group in runner.optim_wrapper.optimizer.param_groups} == {dict}  # others fail to compile
    _, expected = run(config(tmp_path / 'eager'))
    for name, weight in expected.weights[EPOCHS].items():
        if not name.endswith('attn.out.bias'):  # the norm that follows takes it out: its gradient is rounding
            assert torch.allclose(recorder.weights[EPOCHS][name], weight, atol=1e-4), name


@pytest.mark.slow
def test_right_after_loading(repository, tmp_path):
    """Attention of the kernels that were loaded; attention itself is trained, too, by the optimizer of its phase."""
    frozen = {'optim_wrapper.optimizer.lr': 0.0, 'optim_wrapper.optimizer.weight_decay': 0.0}

    def config(folder, **changes):
        config = config_of('CNN', repository, tmp_path / folder, train_cfg=dict(max_epochs=2), **changes)
        config.custom_hooks[0] = dict(type='PhaseTransitionHook', epoch=0)
        return config

    start = config('start')
    start.custom_hooks = []
    start.train_cfg.max_epochs = 1
    model = run(start)[0].model
    at_once = dict(load_from=str(tmp_path / 'start/epoch_1.pth'))
    runner, recorder = run(config('frozen', **at_once, **frozen))
    assert recorder.phases == ['attn'] * 2 * ITERATIONS
    kernel = model.state_dict()[f'{LAYER}.weight']
    value = recorder.weights[2][f'{LAYER}.value.weight'].unflatten(1, (9, -1))
    assert torch.equal(value, kernel.flatten(2).transpose(1, 2))
    trained, _ = run(config('attention', load_from=str(tmp_path / 'frozen/epoch_1.pth')))
    groups = trained.optim_wrapper.optimizer.param_groups
    assert {id(p) for group in groups for p in group['params']} == {id(p) for p in trained.model.parameters()}
    assert not torch.equal(trained.model.get_parameter(f'{LAYER}.value.weight'), value.flatten(1))
    resumed, again = run(config('resumed', load_from=str(tmp_path / 'frozen/epoch_1.pth'), resume=True, **frozen))
    assert again.start == 1 and again.phases == ['attn'] * ITERATIONS


def test_right_after_loading_by_iterations(repository, tmp_path):
    """The schedule of the run is that of the attention."""
    config = config_of('iterations', repository, tmp_path)
    config.custom_hooks[0] = dict(type='PhaseTransitionHook', iter=0)
    config.train_cfg.max_iters = 2
    _, recorder = run(config)
    assert recorder.phases == ['attn', 'attn'] and np.allclose(recorder.rates, RATES[:2])


@pytest.mark.parametrize(
    'kind, changes, hook, error, message',
    [
        ('CMHSA', {'model.backbone.phase': 'attn'}, {}, ValueError, 'is attention at epoch 0, before epoch=2 of'),
        ('CMHSA', {}, dict(optim_wrapper=dict(optimizer=dict(momentum=0.9))), TypeError, "unexpected .* 'momentum'"),
        ('CMHSA', {}, dict(param_scheduler=dict(type='CosineAnnealingLR', begin=3)), ValueError, 'begin=3, end=3'),
        ('iterations', {}, dict(param_scheduler=dict(type='PolyLR')), ValueError, "'PolyLR'.* counts epochs, but the"),
    ],
)
def test_mistakes_show_at_once(kind, changes, hook, error, message, repository, tmp_path):
    config = config_of(kind, repository, tmp_path, **changes)
    config.custom_hooks[0].update(hook)
    with pytest.raises(error, match=message):
        run(config)
    assert not list(tmp_path.glob('*.pth'))


def test_without_a_config(repository, tmp_path):
    """A runner made of objects: the hook has nothing to inherit from."""
    config = small_config(repository, tmp_path)

    def runner(optimizer):
        hook = dict(type='mmpretrain.PhaseTransitionHook', epoch=1, optim_wrapper=dict(optimizer=optimizer))
        return Runner(
            model=config.model,
            work_dir=str(tmp_path),
            train_dataloader=config.train_dataloader,
            train_cfg=dict(by_epoch=True, max_epochs=2),
            optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
            custom_hooks=[hook],
            default_scope='mmpretrain',
            experiment_name=config.experiment_name + str(optimizer),
        )

    with pytest.raises(KeyError, match="'type'"):
        runner(dict(lr=0.01)).train()
    assert runner(dict(type='SGD', lr=0.01)).train().backbone.phase == 'attn'


def test_resumed_without_the_state_of_the_schedulers(repository, tmp_path):
    """With mmengine's own hook, which lets it pass: an end that is not given is the end of the phase."""
    hook = {'default_hooks.checkpoint.type': 'CheckpointHook'}
    run(small_config(repository, tmp_path, **hook, **{'default_hooks.checkpoint.save_param_scheduler': False}))
    resume = dict(resume=True, load_from=str(tmp_path / f'epoch_{CHANGE + 1}.pth'))
    runner, _ = run(small_config(repository, tmp_path / 'resumed', **resume, **hook))
    assert [scheduler.end for scheduler in runner.param_schedulers] == [3, 9]  # iterations of the second phase


@pytest.mark.parametrize('epochs', [1, EPOCHS])
def test_a_run_that_ends_before_the_transition_says_so(epochs, repository, tmp_path):
    """At the beginning for its length, at the end because another hook stops it."""
    config = small_config(repository, tmp_path, log_level='INFO', **{'train_cfg.max_epochs': epochs})
    config.custom_hooks[0].epoch = 1
    config.custom_hooks += [dict(type='HeadPruningHook', epochs=[1])]
    config.custom_hooks += [dict(type='EarlyStoppingHook', monitor='accuracy/top1', stopping_threshold=-1)]
    assert run(config)[0].model.backbone.phase == 'conv'
    log = log_of(tmp_path)  # mmengine logs a warning once
    for name in ('PhaseTransitionHook', 'HeadPruningHook'):
        assert log.count(f'The run ends after 1 epochs: {name} does nothing at epoch 1\n') == 1
    assert (log.index('The run ends after') < log.index('Epoch(train)')) == (epochs == 1)


@pytest.mark.slow
def test_several_networks(repository, tmp_path):
    """Any model that holds the backbone: here two of them, and an average of one, such as MoCo's."""

    @MODELS.register_module(force=True)
    class Twins(nn.Module):
        def __init__(self, twin):
            super().__init__()
            self.left, self.right = MODELS.build(copy.deepcopy(twin)), MODELS.build(copy.deepcopy(twin))
            self.average = ExponentialMovingAverage(self.left)

        @property
        def phase(self):
            return self.left.phase

        def forward(self, x):
            self.average.update_parameters(self.left)
            return tuple((a + b) / 2 for a, b in zip(self.left(x), self.right(x)))

        def init_weights(self):
            pass

    def twins(work_dir, **changes):
        config = small_config(repository, work_dir, **changes)
        config.model.backbone = dict(type='Twins', twin=config.model.backbone)
        return run(config)

    runner, _ = twins(tmp_path)
    assert runner.model.backbone.left.phase == runner.model.backbone.right.phase == 'attn'
    resume = dict(resume=True, load_from=str(tmp_path / f'epoch_{CHANGE + 1}.pth'))
    assert twins(tmp_path / 'resumed', **resume)[1].phases == ['attn'] * 2 * ITERATIONS
