"""A CNN whose last stage becomes attention in the middle of a training, and right after its weights were loaded."""

import numpy as np
import pytest
import torch
from helpers.two_phases import EPOCHS, ITERATIONS, SWITCH, run, small_config
from mmengine.hooks import EMAHook, Hook
from mmengine.runner import Runner

from attncnn_plugin.analysis import read_centers
from attncnn_plugin.attention import ContentImageAttention, QuadraticImageAttention
from attncnn_plugin.pruning import prunable_heads

LAYER = 'backbone.layer4.0.conv1'
KEYS = [f'{LAYER}.{name}' for name in ('value.weight', 'query.weight', 'key.weight', 'encoding.center')]


def config_of(repository, work_dir, **changes):
    """Plain gradients: AdamW makes steps of the rounding errors in gradients that are zero."""
    sgd = dict(_delete_=True, type='SGD', lr=0.05, momentum=0.9, weight_decay=1e-4)
    narrow = {
        'model.backbone.backbone.stem_channels': 4,
        'model.backbone.backbone.base_channels': 4,
        'model.head.in_channels': 32,
        'optim_wrapper.optimizer': sgd,
    }
    config = small_config(repository, work_dir, name='resnet18_to_attention_digits', **narrow)
    config.custom_hooks[0].optim_wrapper = dict(optimizer=dict(lr=0.01))
    config.merge_from_dict(changes)
    return config


def one_epoch_of_attention(repository, work_dir, **changes):
    config = config_of(repository, work_dir, train_cfg=dict(max_epochs=SWITCH + 1), **changes)
    config.custom_hooks[0].param_scheduler = None
    return config


@pytest.fixture(scope='module')
def whole(tmp_path_factory, repository):
    """A run through both phases, and its work folder."""
    work_dir = tmp_path_factory.mktemp('whole')
    return *run(config_of(repository, work_dir)), work_dir


def test_phases_optimizer_and_rates(whole):
    runner, recorder, _ = whole
    assert recorder.phases == ['conv'] * SWITCH * ITERATIONS + ['attn'] * (EPOCHS - SWITCH) * ITERATIONS
    groups = runner.optim_wrapper.optimizer.param_groups
    assert {id(p) for group in groups for p in group['params']} == {id(p) for p in runner.model.parameters()}
    assert 0 < runner.message_hub.get_info('transition_drift') < 0.05
    assert np.allclose(
        [max(recorder.rates[: SWITCH * ITERATIONS]), max(recorder.rates[SWITCH * ITERATIONS :])], [0.05, 0.01]
    )
    before, after, end = (recorder.weights[epoch] for epoch in (SWITCH, SWITCH + 1, EPOCHS))
    assert f'{LAYER}.weight' in before and f'{LAYER}.weight' not in after
    assert all(not torch.equal(after[key], end[key]) for key in KEYS)
    decays = {id(p): group['weight_decay'] for group in groups for p in group['params']}  # none for positions
    layer = runner.model.get_submodule(LAYER)
    assert isinstance(layer, ContentImageAttention)
    assert decays[id(layer.encoding.center)] == 0 and decays[id(layer.key.weight)] == 1e-4


@pytest.mark.parametrize('epoch', [pytest.param(SWITCH - 1, marks=pytest.mark.slow), SWITCH, SWITCH + 1])
def test_resumed_run_equals_the_whole_one(epoch, whole, repository, tmp_path):
    """From before, at and after the transition."""
    _, recorder, work_dir = whole
    resumed = dict(load_from=str(work_dir / f'epoch_{epoch}.pth'), resume=True)
    _, again = run(config_of(repository, tmp_path, **resumed))
    assert again.start == epoch and again.phases == recorder.phases[epoch * ITERATIONS :]
    assert np.array_equal(again.rates, recorder.rates[epoch * ITERATIONS :])
    assert again.weights[EPOCHS].keys() == recorder.weights[EPOCHS].keys()
    for name, weight in recorder.weights[EPOCHS].items():
        assert torch.allclose(again.weights[EPOCHS][name], weight, atol=1e-6), name


def test_average(repository, tmp_path):
    """Its function stays as it was, its keys are those of the model, and it is resumed."""
    images = torch.randn(2, 1, 16, 16)

    class Outputs(Hook):
        priority = 'LOWEST'

        def average(self, runner):
            return next(hook for hook in runner.hooks if isinstance(hook, EMAHook)).ema_model

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if runner.iter == SWITCH * ITERATIONS:
                module = self.average(runner).module
                self.after = module.eval()(images)[0]
                assert module.backbone.phase == 'attn' and not any(p.requires_grad for p in module.parameters())
                key = f'{LAYER}.key.weight'
                assert torch.equal(module.state_dict()[key], runner.model.state_dict()[key])

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if runner.iter == SWITCH * ITERATIONS - 1:
                self.before = self.average(runner).module.eval()(images)[0]

        def after_train(self, runner):
            self.end = self.average(runner).state_dict()

    ends = []
    for changes in ({}, dict(resume=True, load_from=str(tmp_path / 'whole' / f'epoch_{SWITCH + 1}.pth'))):
        config = config_of(repository, tmp_path / ('resumed' if changes else 'whole'), **changes)
        config.custom_hooks.append(dict(type='EMAHook', momentum=0.2))
        runner, outputs = Runner.from_cfg(config), Outputs()
        runner.register_hook(outputs)
        runner.train()
        ends.append(outputs.end)
        if not changes:
            assert 0 < (outputs.after - outputs.before).norm() < 0.05 * outputs.before.norm()
    assert f'module.{LAYER}.key.weight' in ends[0]
    for name, value in ends[0].items():
        assert torch.allclose(ends[1][name], value, atol=1e-6), name


def test_accumulation_and_the_log(repository, tmp_path):
    config = one_epoch_of_attention(repository, tmp_path, log_level='INFO')
    config.optim_wrapper.accumulative_counts = 4  # 6 iterations in the first phase

    class Gradients(Hook):
        priority = 'LOWEST'

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if runner.iter == SWITCH * ITERATIONS:
                assert all(p.grad is None for p in runner.model.parameters())

    runner = Runner.from_cfg(config)
    runner.register_hook(Gradients())
    runner.train()
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert 'the gradients of the last 2 are dropped' in log
    assert 'Transition at epoch 2:\nlayer           before           after    parameters' in log
    assert '\nlayer4.0.conv1  3×3 convolution  9 heads ' in log
    assert 'Relative change of the output on the current batch: ' in log


@pytest.mark.slow
def test_compiled_steps(repository, tmp_path):
    results = []
    for changes in (dict(compile=dict(backend='eager')), {}):
        config = one_epoch_of_attention(repository, tmp_path / str(len(changes)), **changes)
        results.append(run(config)[1].weights[SWITCH + 1])
    for name, weight in results[1].items():
        assert torch.allclose(results[0][name], weight, atol=1e-4), name


def from_the_beginning(repository, work_dir, checkpoint, **changes):
    """Attention right after a CNN was loaded, with the run's own schedule."""
    config = config_of(repository, work_dir, load_from=str(checkpoint), train_cfg=dict(max_epochs=2), **changes)
    config.custom_hooks[0] = dict(type='PhaseTransitionHook', epoch=0)
    return config


def test_right_after_loading(whole, repository, tmp_path):
    """Attention of the kernels that were loaded; attention itself is refused, for the optimizer would not have it."""
    checkpoint = whole[2] / f'epoch_{SWITCH}.pth'
    frozen = {'optim_wrapper.optimizer.lr': 0.0, 'optim_wrapper.optimizer.weight_decay': 0.0}
    runner, recorder = run(from_the_beginning(repository, tmp_path / 'frozen', checkpoint, **frozen))
    assert recorder.phases == ['attn'] * 2 * ITERATIONS
    assert runner.message_hub.get_info('transition_drift') < 0.05
    kernel = torch.load(checkpoint)['state_dict'][f'{LAYER}.weight']
    value = recorder.weights[2][f'{LAYER}.value.weight'].unflatten(1, (9, -1))
    assert torch.equal(value, kernel.flatten(2).transpose(1, 2))
    config = from_the_beginning(repository, tmp_path / 'attention', tmp_path / 'frozen/epoch_1.pth')
    with pytest.raises(ValueError, match="in phase='attn' at epoch 0, before epoch=0 of PhaseTransitionHook turns it"):
        run(config)


@pytest.mark.slow
def test_resumed_after_a_transition_right_after_loading(whole, repository, tmp_path):
    checkpoint = whole[2] / f'epoch_{SWITCH}.pth'
    _, recorder = run(from_the_beginning(repository, tmp_path / 'whole', checkpoint))
    expected, _ = run(config_of(repository, tmp_path / 'rates', train_cfg=dict(max_epochs=2)))
    assert np.array_equal(recorder.rates, expected.message_hub.get_scalar('train/lr').data[0])
    resumed = from_the_beginning(repository, tmp_path / 'again', tmp_path / 'whole/epoch_1.pth', resume=True)
    _, again = run(resumed)
    assert again.start == 1 and again.phases == ['attn'] * ITERATIONS
    for name, weight in recorder.weights[2].items():
        assert torch.allclose(again.weights[2][name], weight, atol=1e-6), name


@pytest.mark.slow
def test_attention_at_once(whole, repository, tmp_path):
    """``phase='attn'`` without the hook: a checkpoint of the CNN is converted, one of attention taken as it is."""
    for epoch in (SWITCH, EPOCHS):
        config = config_of(repository, tmp_path / str(epoch), load_from=str(whole[2] / f'epoch_{epoch}.pth'))
        config.model.backbone.phase = 'attn'
        config.custom_hooks = []
        config.train_cfg.max_epochs = 1
        runner, recorder = run(config)
        assert recorder.phases == ['attn'] * ITERATIONS
        trained = {id(p) for group in runner.optim_wrapper.optimizer.param_groups for p in group['params']}
        assert trained == {id(p) for p in runner.model.parameters()}


def test_positions_alone(repository, tmp_path):
    config = one_epoch_of_attention(repository, tmp_path)
    config.model.backbone.content = None
    runner, _ = run(config)
    assert isinstance(runner.model.get_submodule(LAYER), QuadraticImageAttention)


def test_a_layer_that_cannot_be_replaced_any_more(repository, tmp_path):
    class Late(Hook):
        def before_train_epoch(self, runner):
            runner.model.get_submodule(LAYER).register_forward_hook(lambda *args: None)

    runner = Runner.from_cfg(config_of(repository, tmp_path))
    runner.register_hook(Late())
    with pytest.raises(ValueError, match='layer4.0.conv1 has hooks'):
        runner.train()


def degenerate(repository, work_dir, **changes):
    """A second phase by positions alone, and the hook that prunes heads an epoch after the transition."""
    config = config_of(repository, work_dir, log_level='INFO', **changes)
    config.model.backbone.content = None
    config.optim_wrapper.paramwise_cfg.custom_keys['encoding'] = dict(lr_mult=0.0, decay_mult=0.0)
    config.custom_hooks.insert(0, dict(type='HeadPruningHook', epochs=[SWITCH + 1], criteria=['uniform', 'duplicate']))
    return config


class Degenerate(Hook):
    """After the transition the second head is uniform, the third looks as the first."""

    priority = 'LOWEST'

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == SWITCH * ITERATIONS:
            encoding = runner.model.get_submodule(LAYER).encoding
            with torch.no_grad():
                encoding.sqrt_precision[1] = 0
                encoding.center[2] = encoding.center[0]


def test_heads_are_pruned(repository, tmp_path):
    """Really smaller, in the model, its average and its optimizer; resumed from there with both hooks."""

    def train(work_dir, **changes):
        config = degenerate(repository, work_dir, **changes)
        config.custom_hooks.append(dict(type='EMAHook', momentum=0.2))
        runner = Runner.from_cfg(config)
        runner.register_hook(Degenerate())
        runner.train()
        return runner

    runner = train(tmp_path / 'whole')
    layer = runner.model.get_submodule(LAYER)
    assert layer.num_heads == 7 and layer.value.weight.shape == (32, 7 * 16)
    groups = runner.optim_wrapper.optimizer.param_groups
    assert {id(p) for group in groups for p in group['params']} == {id(p) for p in runner.model.parameters()}
    average = next(hook for hook in runner.hooks if isinstance(hook, EMAHook)).ema_model.module
    assert average.get_submodule(LAYER).num_heads == 7
    log = next((tmp_path / 'whole').glob('*/*.log')).read_text()
    assert f'{LAYER} at epoch 3: 2 of 9 heads degenerate' in log and 'duplicate  distance 0 < 0.01 from head 0' in log
    assert f'{LAYER} of the model have no bias: nothing makes up for their heads that go, besides duplicates' in log

    again = train(tmp_path / 'again', resume=True, load_from=str(tmp_path / 'whole' / f'epoch_{SWITCH + 2}.pth'))
    assert again.model.get_submodule(LAYER).num_heads == 7
    for name, weight in runner.model.state_dict().items():
        assert torch.allclose(again.model.state_dict()[name], weight, atol=1e-6), name


def test_heads_by_content_are_pruned(repository, tmp_path):
    """By importance, and by what they attend to on images; criteria of Gaussian heads alone are refused."""
    config = degenerate(repository, tmp_path / 'both')
    config.model.backbone.content = 'gated'
    config.custom_hooks[0]['criteria'] = ['uniform', 'duplicate', dict(type='importance', keep=10)]
    runner, _ = run(config)
    layers = prunable_heads(runner.model)
    assert LAYER in layers and len(layers) > 1
    assert sum(layer.num_heads for layer in layers.values()) == 10
    log = next((tmp_path / 'both').glob('*/*.log')).read_text()
    assert f'{LAYER} at epoch 3: ' in log and 'importance  importance' in log
    assert 'Removed heads' in log

    config = config_of(repository, tmp_path)
    config.model.backbone.phase = 'attn'
    config.custom_hooks = [dict(type='HeadPruningHook', epochs=[1])]
    with pytest.raises(TypeError, match=f"{LAYER}: the criterion 'stripe' is for Gaussian heads"):
        run(config)


def test_pruning_refuses_attention_that_the_optimizer_does_not_have(whole, repository, tmp_path):
    """A checkpoint of the second phase in a CNN, without the hook that turns it."""
    for resume in (False, True):
        changes = dict(load_from=str(whole[2] / f'epoch_{EPOCHS}.pth'), resume=resume)
        config = config_of(repository, tmp_path / str(resume), **changes)
        config.custom_hooks = [dict(type='HeadPruningHook')]
        with pytest.raises(ValueError, match=rf"built before .* such as {LAYER}\.value.weight: .* phase='attn' of"):
            run(config)


def test_heads_are_shown_from_the_transition_on(repository, tmp_path):
    """Before it there are no heads, which the log says once."""
    config = one_epoch_of_attention(repository, tmp_path, log_level='INFO')
    config.custom_hooks.append(dict(type='AttentionVisualizationHook', interval=1, num_images=2))
    runner, _ = run(config)
    pictures = sorted(path.stem for path in tmp_path.glob('*/vis_data/vis_image/*'))
    assert pictures == [f'attention_{kind}_{SWITCH + 1}' for kind in ('centers', 'probs')]
    centers = read_centers(tmp_path)
    layers = [name for name, module in runner.model.named_modules() if isinstance(module, ContentImageAttention)]
    assert LAYER in layers and list(centers) == layers
    assert all(head[:, 0].tolist() == [SWITCH + 1] for layer in centers.values() for head in layer.values())
    assert {len(layer) for layer in centers.values()} == {9}
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert log.count('AttentionVisualizationHook has nothing to show before the convolutions turn into attention') == 1


def test_heads_of_convolutions_do_not_begin_anew(repository, tmp_path):
    config = config_of(repository, tmp_path)
    config.model.backbone.update(phase='attn', content=None)
    config.custom_hooks = [dict(type='HeadPruningHook', epochs=[1], reset=True)]
    with pytest.raises(
        TypeError, match=f'{LAYER} is attention in the place of a convolution, whose heads cannot begin'
    ):
        run(config)
