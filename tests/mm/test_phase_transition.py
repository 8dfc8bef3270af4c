"""Both phases of CMHSA in one run, in the framework's own trainer: optimizer, schedule, average, resuming."""

import copy

import numpy as np
import pytest
import torch
from helpers.two_phases import EPOCHS, ITERATIONS, SWITCH, run, small_config
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseModel
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import nn

from attncnn_plugin.mm.phase_transition import PhaseTransitionHook


def hook_of(runner, kind):
    return next(hook for hook in runner.hooks if isinstance(hook, kind))


@pytest.fixture(scope='module')
def whole(tmp_path_factory, repository):
    """A run through both phases, and its work folder."""
    work_dir = tmp_path_factory.mktemp('whole')
    config = small_config(repository, work_dir)
    config.model.backbone.attn_bias_init = 40.0
    return *run(config), work_dir


def test_phases_and_optimizer(whole):
    runner, recorder, _ = whole
    assert recorder.phases == ['conv'] * SWITCH * ITERATIONS + ['attn'] * (EPOCHS - SWITCH) * ITERATIONS
    optimizer = runner.optim_wrapper.optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    trained = {id(p) for group in optimizer.param_groups for p in group['params']}
    assert trained == {id(p) for p in runner.model.parameters()}
    assert runner.message_hub.get_info('transition_drift') < 1e-5
    before, after = recorder.weights[SWITCH], recorder.weights[SWITCH + 1]
    assert 'backbone.blocks.0.attn.conv.weight' in before
    for name in ('position.table', 'query.weight', 'key.weight', 'value.weight', 'out.weight', 'out.bias'):
        assert (
            not torch.equal(
                after[f'backbone.blocks.1.attn.{name}'], recorder.weights[EPOCHS][f'backbone.blocks.1.attn.{name}']
            )
            or name[0] == 'p'
        )  # M = 40


def test_schedules(whole, repository, tmp_path):
    """Each phase has its own warm-up and its own cosine, counted from its beginning."""
    rates = np.array(whole[1].rates)

    def phase(lr, epochs):
        warm_up, total = ITERATIONS, ITERATIONS * epochs
        linear = lr * np.linspace(1e-3, 1, warm_up)  # the first iteration at 1e-3, the last at 1
        cosine = lr / 2 * (1 + np.cos(np.pi * np.arange(total - warm_up) / (total - warm_up)))
        return np.concatenate([linear, cosine])

    config = small_config(repository, tmp_path)
    first = config.optim_wrapper.optimizer.lr
    second = config.custom_hooks[0].optim_wrapper.optimizer.lr
    expected = np.concatenate([phase(first, SWITCH), phase(second, EPOCHS - SWITCH)])
    assert rates.shape == expected.shape
    warm_up = np.arange(len(rates)) % (SWITCH * ITERATIONS) < ITERATIONS
    assert np.allclose(rates[~warm_up][:ITERATIONS], expected[~warm_up][:ITERATIONS], rtol=1e-6)
    assert np.allclose(rates[[0, SWITCH * ITERATIONS]], [1e-3 * first, 1e-3 * second])
    assert np.allclose(rates[SWITCH * ITERATIONS + ITERATIONS :], expected[SWITCH * ITERATIONS + ITERATIONS :])
    assert np.array_equal(whole[0].message_hub.get_scalar('train/lr').data[0], rates)  # what is logged


@pytest.mark.parametrize('epoch', range(1, EPOCHS))
def test_resumed_run_equals_the_whole_one(epoch, whole, repository, tmp_path):
    """From before, at and after the transition."""
    runner, recorder, work_dir = whole
    config = small_config(repository, tmp_path, load_from=str(work_dir / f'epoch_{epoch}.pth'), resume=True)
    config.model.backbone.attn_bias_init = 40.0
    resumed, again = run(config)
    assert again.start == epoch
    assert again.phases == recorder.phases[epoch * ITERATIONS :]
    assert np.array_equal(again.rates, recorder.rates[epoch * ITERATIONS :])
    for at in range(epoch + 1, EPOCHS + 1):
        assert again.weights[at].keys() == recorder.weights[at].keys()
        for name, weight in recorder.weights[at].items():
            assert torch.allclose(again.weights[at][name], weight, atol=1e-6), (at, name)


def test_second_phases_own_optimizer(repository, tmp_path):
    config = small_config(repository, tmp_path)
    config.train_cfg.max_epochs = SWITCH + 1
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
    config.train_cfg.max_epochs = SWITCH + 1
    config.param_scheduler = None
    config.custom_hooks[0].param_scheduler = []
    rates = run(config)[1].rates
    assert np.allclose([rates[0], rates[-1]], [2e-3 / 2, 5e-4 / 2])


@pytest.mark.parametrize('update_buffers', [False, True])
def test_average(update_buffers, repository, tmp_path):
    """The averaged copy goes through the transition with its function unchanged, and is resumed."""
    config = small_config(repository, tmp_path / 'whole')
    config.model.backbone.attn_bias_init = 40.0
    config.custom_hooks.append(dict(type='EMAHook', momentum=0.2, update_buffers=update_buffers))
    images = torch.randn(2, 1, 32, 32)

    @HOOKS.register_module(force=True)
    class Outputs(Hook):
        """The averaged network before and after the transition, and averages computed here."""

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            averaged = hook_of(runner, EMAHook).ema_model
            if runner.iter == SWITCH * ITERATIONS:
                self.after = averaged.module.eval()(images)
                assert averaged.module.backbone.phase == 'attn'
                assert not any(p.requires_grad for p in averaged.module.parameters())
                assert torch.equal(
                    averaged.module.backbone.blocks[0].attn.key.weight, runner.model.backbone.blocks[0].attn.key.weight
                )
                self.expected = {k: v.clone() for k, v in averaged.module.state_dict().items()}

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if runner.iter == SWITCH * ITERATIONS - 1:
                self.before = hook_of(runner, EMAHook).ema_model.module.eval()(images)
            if runner.iter >= SWITCH * ITERATIONS:
                for name, value in runner.model.named_parameters():
                    self.expected[name].lerp_(value.detach(), 0.2)

    outputs = Outputs()
    runner = Runner.from_cfg(config)
    runner.register_hook(outputs, 'LOWEST')
    runner.train()
    assert torch.allclose(outputs.after, outputs.before, atol=1e-5)
    averaged = hook_of(runner, EMAHook).ema_model
    for name, value in averaged.module.state_dict().items():
        assert torch.allclose(value, outputs.expected[name], atol=1e-5), name

    for epoch in (SWITCH, SWITCH + 1):
        config = small_config(
            repository,
            tmp_path / f'resumed{epoch}',
            resume=True,
            load_from=str(tmp_path / 'whole' / f'epoch_{epoch}.pth'),
        )
        config.model.backbone.attn_bias_init = 40.0
        config.custom_hooks.append(dict(type='EMAHook', momentum=0.2, update_buffers=update_buffers))
        resumed = run(config)[0]
        for name, value in hook_of(resumed, EMAHook).ema_model.state_dict().items():
            assert torch.allclose(value, averaged.state_dict()[name], atol=1e-6), name


def test_gradient_accumulation(repository, tmp_path, caplog):
    """What the first phase has accumulated at its end does not leak into the second."""
    config = small_config(repository, tmp_path, log_level='INFO')
    config.optim_wrapper.accumulative_counts = 4  # 6 iterations in the first phase

    class Gradients(Hook):
        priority = 'LOWEST'

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if runner.iter == SWITCH * ITERATIONS:
                assert all(p.grad is None for p in runner.model.parameters())
                assert runner.optim_wrapper._inner_count == runner.iter

    runner = Runner.from_cfg(config)
    runner.register_hook(Gradients())
    runner.train()
    assert 1e-6 < runner.message_hub.get_info('transition_drift') < 1e-2  # with the default M
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert 'after 6 iterations, not a multiple of accumulative_counts=4: the gradients of the last 2 are dropped' in log
    assert (
        'Transition at epoch 2:\nlayer          before      after    parameters\nblocks.0.attn  3×3 kernel  9 heads'
        in log
    )
    assert 'Relative change of the output on the current batch: ' in log


@pytest.mark.parametrize('layers, changing_rates', [(1, False), pytest.param(2, True, marks=pytest.mark.slow)])
def test_compiled_training(layers, changing_rates, repository, tmp_path):
    """Each phase compiles its own optimizer, twice where learning rates change."""

    def config(work_dir, **changes):
        config = small_config(repository, work_dir, **{'model.backbone.num_layers': layers, **changes})
        if not changing_rates:
            config.param_scheduler = config.custom_hooks[0].param_scheduler = []
        return config

    runner, recorder = run(config(tmp_path, compile=dict(backend='eager')))
    assert {type(group) for group in runner.optim_wrapper.optimizer.param_groups} == {dict}  # others fail to compile
    _, expected = run(config(tmp_path / 'eager'))
    for name, weight in expected.weights[EPOCHS].items():
        if not name.endswith('attn.out.bias'):  # the norm that follows takes it out: its gradient is rounding
            assert torch.allclose(recorder.weights[EPOCHS][name], weight, atol=1e-4), name


def test_two_separate_runs(whole, repository, tmp_path):
    """A checkpoint of the first phase in a config of the second."""
    _, recorder, work_dir = whole
    config = small_config(repository, tmp_path, load_from=str(work_dir / f'epoch_{SWITCH}.pth'))
    config.custom_hooks = []
    config.model.backbone.update(phase='attn', attn_bias_init=40.0)
    config.train_cfg.max_epochs = 1
    config.optim_wrapper.optimizer.lr = 0.0
    config.optim_wrapper.optimizer.weight_decay = 0.0
    runner, again = run(config)
    assert again.start == 0
    images = torch.randn(2, 1, 32, 32)
    first = Runner.from_cfg(small_config(repository, tmp_path)).model
    first.load_state_dict(recorder.weights[SWITCH])
    assert first.backbone.phase == 'conv'
    assert torch.allclose(runner.model.eval()(images), first.eval()(images), atol=1e-5)


@pytest.mark.parametrize(
    'changes, error, message',
    [
        (
            dict(train_cfg=dict(_delete_=True, type='IterBasedTrainLoop', max_iters=4)),
            TypeError,
            'counts epochs, but the loop is a IterBasedTrainLoop',
        ),
        (
            dict(
                model=dict(
                    backbone=dict(_delete_=True, type='SAQuadratic', arch='tiny', in_channels=1, out_type='avg_featmap')
                )
            ),
            ValueError,
            'finds no CMHSA in the model',
        ),
        (
            dict(model=dict(backbone=dict(phase='attn'))),
            ValueError,
            "in phase='attn' at epoch 0, before epoch=2 of PhaseTransitionHook",
        ),
    ],
)
def test_what_cannot_be_trained(changes, error, message, repository, tmp_path):
    config = small_config(repository, tmp_path)
    config.merge_from_dict(changes)
    if error is TypeError:
        config.param_scheduler = None
    with pytest.raises(error, match=message):
        run(config)


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

    with pytest.raises(ValueError, match='of PhaseTransitionHook names no type of optimizer, and the config'):
        runner(dict(lr=0.01)).train()
    assert runner(dict(type='SGD', lr=0.01)).train().backbone.phase == 'attn'


def test_models_without_an_output(repository, tmp_path):
    """A line in the log must not end a training."""
    from mmpretrain.models import ImageClassifier
    from mmpretrain.registry import MODELS

    @MODELS.register_module(force=True)
    class LossOnly(ImageClassifier):
        def forward(self, inputs, data_samples=None, mode='tensor'):
            if mode == 'tensor':
                raise RuntimeError('no such mode')
            return super().forward(inputs, data_samples, mode)

    config = small_config(repository, tmp_path, log_level='INFO')
    config.model.type = 'LossOnly'
    runner, recorder = run(config)
    assert recorder.phases[-1] == 'attn'
    assert "LossOnly has no output for a batch in mode='tensor' (no such mode)" in (
        next(tmp_path.glob('*/*.log')).read_text()
    )


def test_measuring_the_output_leaves_the_model_as_it_was():
    """A norm that is kept in evaluation mode in training, a buffer that every pass changes, a random number."""

    class Model(BaseModel):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer('calls', torch.zeros(()))

        def forward(self, inputs, mode='tensor'):
            self.calls += 1
            return {'scores': [self.norm(inputs) + torch.rand(3)], 'labels': torch.arange(3)}

    model = Model().train()
    model.norm.eval()
    batch, random = {'inputs': torch.randn(4, 3)}, torch.random.get_rng_state()
    found = PhaseTransitionHook._outputs(None, model, batch)
    assert model.training and not model.norm.training and model.calls == 0
    assert torch.equal(torch.random.get_rng_state(), random)
    assert [tensor.shape for tensor in found['output']] == [(4, 3)]


def test_resumed_without_the_state_of_the_schedulers(repository, tmp_path):
    """An end that is not given is the end of the phase."""
    config = small_config(repository, tmp_path)
    config.default_hooks.checkpoint.save_param_scheduler = False
    run(config)
    config = small_config(
        repository, tmp_path / 'resumed', resume=True, load_from=str(tmp_path / f'epoch_{SWITCH + 1}.pth')
    )
    runner, _ = run(config)
    assert [scheduler.end for scheduler in runner.param_schedulers] == [3, 9]  # iterations of the second phase


def test_a_second_phase_checkpoint_does_not_start_a_first_phase(whole, repository, tmp_path):
    """Loaded, not resumed: an optimizer of convolutions that are gone would train nothing."""
    config = small_config(repository, tmp_path, load_from=str(whole[2] / f'epoch_{EPOCHS}.pth'))
    with pytest.raises(ValueError, match='go on with a checkpoint of the second phase by resume=True'):
        run(config)


def test_a_run_that_ends_before_the_transition_says_so(repository, tmp_path):
    config = small_config(repository, tmp_path, log_level='INFO')
    config.train_cfg.max_epochs = 1
    assert run(config)[0].model.backbone.phase == 'conv'
    assert 'ends after 1 epochs, before the transition to attention after epoch 2' in (
        next(tmp_path.glob('*/*.log')).read_text()
    )


@pytest.mark.parametrize(
    'second_phase, message',
    [
        (dict(optim_wrapper=dict(optimizer=dict(momentum=0.9))), "unexpected keyword argument 'momentum'"),
        (dict(param_scheduler=dict(type='CosineAnnealingLR', begin=EPOCHS - SWITCH)), 'begin=3, end=3'),
    ],
)
def test_mistakes_in_the_second_phase_show_at_once(second_phase, message, repository, tmp_path):
    config = small_config(repository, tmp_path)
    config.custom_hooks[0].update(second_phase)
    with pytest.raises((TypeError, ValueError), match=message):
        run(config)
    assert not list(tmp_path.glob('*.pth'))


@pytest.mark.parametrize('epoch', [-1, 1.5, '3'])
def test_epoch_is_checked(epoch):
    with pytest.raises(ValueError, match=f'epoch={epoch!r} of PhaseTransitionHook'):
        HOOKS.build(dict(type='mmpretrain.PhaseTransitionHook', epoch=epoch))


def test_several_networks(repository, tmp_path):
    """Any model that holds the backbone: here two of them."""
    from mmpretrain.registry import MODELS

    @MODELS.register_module(force=True)
    class Twins(nn.Module):
        def __init__(self, twin):
            super().__init__()
            self.left, self.right = MODELS.build(copy.deepcopy(twin)), MODELS.build(copy.deepcopy(twin))

        @property
        def phase(self):
            return self.left.phase

        def forward(self, x):
            return tuple((a + b) / 2 for a, b in zip(self.left(x), self.right(x)))

        def init_weights(self):
            pass

    config = small_config(repository, tmp_path)
    config.model.backbone = dict(type='Twins', twin=config.model.backbone)
    runner, _ = run(config)
    assert runner.model.backbone.left.phase == runner.model.backbone.right.phase == 'attn'
    config = small_config(
        repository, tmp_path / 'resumed', resume=True, load_from=str(tmp_path / f'epoch_{SWITCH + 1}.pth')
    )
    config.model.backbone = dict(type='Twins', twin=config.model.backbone)
    assert run(config)[1].phases == ['attn'] * 2 * ITERATIONS


def test_mixed_precision(repository, tmp_path, monkeypatch):
    """AmpOptimWrapper, which asks for a GPU, on the CPU: the second phase inherits it."""
    from mmengine.optim.optimizer import amp_optimizer_wrapper

    monkeypatch.setattr(amp_optimizer_wrapper, 'is_cuda_available', lambda: True)
    amp = {'optim_wrapper.type': 'AmpOptimWrapper', 'optim_wrapper.dtype': 'bfloat16'}
    runner, recorder = run(small_config(repository, tmp_path, **amp))
    assert type(runner.optim_wrapper).__name__ == 'AmpOptimWrapper' and recorder.phases[-1] == 'attn'
    again = run(
        small_config(
            repository, tmp_path / 'again', resume=True, load_from=str(tmp_path / f'epoch_{SWITCH + 1}.pth'), **amp
        )
    )[1]
    for name, weight in recorder.weights[EPOCHS].items():
        assert torch.allclose(again.weights[EPOCHS][name], weight, atol=1e-6), name
