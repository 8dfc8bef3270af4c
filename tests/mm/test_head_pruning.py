"""Heads pruned in the framework's own trainer: optimizer, schedule, average, bias, resuming."""

import copy

import numpy as np
import pytest
import torch
from helpers.digits_training import EPOCHS, ITERATIONS, PRUNE_AT, average_of, small_config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

NAMES = [f'backbone.blocks.{i}.attn' for i in range(2)]


def degenerate_weights(repository):
    """A model whose second head of the first layer is uniform, and whose third of the second is a stripe."""
    torch.manual_seed(0)
    model = Runner.from_cfg(small_config(repository, 'unused', work_dir='/tmp')).model
    with torch.no_grad():
        model.backbone.blocks[0].attn.encoding.sqrt_precision[1] = 0
        model.backbone.blocks[1].attn.encoding.sqrt_precision[2] = torch.tensor([[3.0, 0.0], [0.0, 1e-6]])
    return model.state_dict()


@HOOKS.register_module()
class PruningRecorder(Hook):
    """What the loop sees at every iteration, and the weights at the end of every epoch."""

    priority = 'LOWEST'

    def before_run(self, runner):
        self.rates, self.heads, self.weights, self.start = [], [], {}, None

    def before_train(self, runner):
        self.start = runner.epoch

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.rates.append(runner.optim_wrapper.optimizer.param_groups[0]['lr'])
        self.heads.append([block.attn.num_heads for block in runner.model.backbone.blocks])

    def after_train_epoch(self, runner):
        self.weights[runner.epoch + 1] = copy.deepcopy(runner.model.state_dict())


def run(config):
    runner = Runner.from_cfg(config)
    recorder = PruningRecorder()
    runner.register_hook(recorder)
    runner.train()
    return runner, recorder


@pytest.fixture(scope='module')
def start(tmp_path_factory, repository):
    """A checkpoint with two degenerate heads."""
    path = tmp_path_factory.mktemp('start') / 'start.pth'
    torch.save(dict(state_dict=degenerate_weights(repository), meta={}), path)
    return str(path)


SECOND = [
    dict(type='LinearLR', start_factor=0.5, begin=0, end=1, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', begin=1, convert_to_iter_based=True),
]


@pytest.fixture(scope='module', params=['own schedulers', 'second schedulers'])
def whole(request, tmp_path_factory, repository, start):
    """A run that prunes, with an average: the hook's settings, runner, recorder, work folder."""
    folder = tmp_path_factory.mktemp('whole')
    hook = dict(epochs=[PRUNE_AT], lr_scale=0.1, num_batches=2)
    if request.param == 'second schedulers':
        hook['param_scheduler'] = SECOND
    config = small_config(repository, folder, hook=hook, load_from=start)
    config.custom_hooks.append(dict(type='EMAHook', momentum=0.2))
    return hook, *run(config), folder


def test_heads_and_optimizer(whole):
    _, runner, recorder, _ = whole
    before, after = [3, 3], [2, 2]
    assert recorder.heads == [before] * PRUNE_AT * ITERATIONS + [after] * (EPOCHS - PRUNE_AT) * ITERATIONS
    optimizer = runner.optim_wrapper.optimizer
    assert {id(p) for g in optimizer.param_groups for p in g['params']} == {id(p) for p in runner.model.parameters()}
    assert set(optimizer.state) == set(runner.model.parameters())
    for parameter, state in optimizer.state.items():
        assert state['exp_avg'].shape == parameter.shape
        assert state['step'] == EPOCHS * ITERATIONS  # on, not anew
    decays = {
        group['weight_decay']
        for group in optimizer.param_groups
        if any(p is runner.model.backbone.blocks[0].attn.encoding.center for p in group['params'])
    }
    assert decays == {0.0}
    for name, value in average_of(runner).module.state_dict().items():
        assert value.shape == runner.model.state_dict()[name].shape


def test_learning_rate(whole, repository, tmp_path):
    hook, _, recorder, _ = whole
    plain = run(small_config(repository, tmp_path))[1].rates
    switch = PRUNE_AT * ITERATIONS
    assert np.allclose(recorder.rates[:switch], plain[:switch])
    if 'param_scheduler' not in hook:
        assert np.allclose(recorder.rates[switch:], 0.1 * np.array(plain[switch:]))
    else:
        peak, total = 0.1 * 3e-3, (EPOCHS - PRUNE_AT - 1) * ITERATIONS
        assert np.isclose(recorder.rates[switch], peak / 2)
        cosine = peak / 2 * (1 + np.cos(np.pi * np.arange(total) / total))
        assert np.allclose(recorder.rates[switch + ITERATIONS :], cosine)


@pytest.mark.parametrize('epoch', range(1, EPOCHS))
def test_resumed_run_equals_the_whole_one(epoch, whole, repository, tmp_path):
    hook, runner, recorder, folder = whole
    config = small_config(repository, tmp_path, hook=hook, load_from=str(folder / f'epoch_{epoch}.pth'), resume=True)
    config.custom_hooks.append(dict(type='EMAHook', momentum=0.2))
    resumed, again = run(config)
    assert again.start == epoch
    assert again.heads == recorder.heads[epoch * ITERATIONS :]
    assert np.allclose(again.rates, recorder.rates[epoch * ITERATIONS :], rtol=1e-12)
    for at in range(epoch + 1, EPOCHS + 1):
        for name, weight in recorder.weights[at].items():
            assert torch.allclose(again.weights[at][name], weight, atol=1e-6), (at, name)
    for name, value in average_of(resumed).state_dict().items():
        assert torch.allclose(value, average_of(runner).state_dict()[name], atol=1e-6), name


def test_pruned_checkpoint_in_a_config_that_never_prunes(whole, repository, tmp_path):
    """load_from and resume: the optimizer trains what is there."""
    folder = whole[3]
    for resume in (False, True):
        config = small_config(repository, tmp_path / str(resume), load_from=str(folder / f'epoch_{PRUNE_AT + 1}.pth'))
        config.resume = resume
        runner, recorder = run(config)
        assert set(map(tuple, recorder.heads)) == {(2, 2)}
        start = torch.load(folder / f'epoch_{PRUNE_AT + 1}.pth')['state_dict']
        moved = {name for name, value in runner.model.state_dict().items() if not torch.equal(value, start[name])}
        assert {f'{name}.value.weight' for name in NAMES} | {f'{name}.encoding.center' for name in NAMES} <= moved


def test_bias_correction(repository, tmp_path, start):
    """The output of the pruned network before it is trained on: nearer to that of the whole one with the correction."""
    images = torch.randn(4, 1, 16, 16)
    whole = Runner.from_cfg(small_config(repository, tmp_path)).model
    whole.load_state_dict(torch.load(start)['state_dict'])
    expected, change = whole.eval()(images), {}
    for correction in (True, False):
        config = small_config(
            repository,
            tmp_path / str(correction),
            load_from=start,
            hook=dict(epochs=[0], criteria=['uniform'], bias_correction=correction),
        )
        config.train_cfg.max_epochs = 1
        config.optim_wrapper.optimizer.update(lr=0.0, weight_decay=0.0)
        runner, _ = run(config)
        change[correction] = (runner.model.eval()(images) - expected).norm() / expected.norm()
        assert [block.attn.num_heads for block in runner.model.backbone.blocks] == [2, 3]
    assert change[True] < 0.5 * change[False]


@pytest.mark.parametrize('allow_empty, heads', [(False, [1, 1]), (True, [0, 0])])
def test_never_without_heads_unless_allowed(allow_empty, heads, repository, tmp_path):
    everything = dict(type='entropy', threshold=0)
    config = small_config(repository, tmp_path)
    config.train_cfg.max_epochs = 2
    config.param_scheduler = None
    runner = Runner.from_cfg(config)
    runner.register_hook(
        HOOKS.get('mmpretrain.HeadPruningHook')(begin=0, interval=1, criteria=[everything], allow_empty=allow_empty)
    )
    runner.train()
    assert [block.attn.num_heads for block in runner.model.backbone.blocks] == heads
    kept = Runner.from_cfg(small_config(repository, tmp_path / 'kept')).model
    kept.load_state_dict(runner.model.state_dict())


def test_heads_begin_anew(repository, tmp_path, start):
    config = small_config(repository, tmp_path, load_from=start, hook=dict(epochs=[0, PRUNE_AT], reset=True))
    config.train_cfg.max_epochs = 1
    runner, recorder = run(config)
    assert recorder.heads == [[3, 3]] * ITERATIONS
    encoding = runner.model.backbone.blocks[0].attn.encoding
    assert torch.linalg.matrix_norm(encoding.sqrt_precision[1] - torch.eye(2)) < 0.2
    values = runner.model.backbone.blocks[0].attn.value.weight
    loaded = torch.load(start)['state_dict']['backbone.blocks.0.attn.value.weight']
    moved = (values - loaded).unflatten(1, (3, 16)).abs().amax((0, 2))
    assert moved[1] > 3 * moved[[0, 2]].max()
    torch.save(torch.load(start)['state_dict'], tmp_path / 'bare.pth')  # without a dict around
    again = run(
        small_config(
            repository,
            tmp_path / 'again',
            load_from=str(tmp_path / 'bare.pth'),
            hook=dict(epochs=[0], reset=True),
            **{'train_cfg.max_epochs': 1},
        )
    )[0]
    assert torch.equal(again.model.backbone.blocks[0].attn.encoding.center, encoding.center)


def test_heads_begin_anew_without_momentum(repository, tmp_path, start):
    config = small_config(repository, tmp_path, load_from=start, hook=dict(epochs=[1], reset=True))
    config.train_cfg.max_epochs = 2
    config.optim_wrapper.optimizer.update(lr=0.0, weight_decay=0.0)  # the degenerate heads stay so until then
    config.param_scheduler = None
    config.custom_hooks.append(dict(type='EMAHook', momentum=0.2))
    runner = Runner.from_cfg(config)
    found = {}

    class AfterReset(Hook):
        priority = 'LOWEST'

        def before_train_epoch(self, runner):
            if runner.epoch == 1:
                layer = runner.model.backbone.blocks[0].attn
                averaged = average_of(runner).module.backbone.blocks[0].attn
                for name, parameter in layer.named_parameters():
                    if name in layer.head_parameters():
                        assert torch.allclose(averaged.get_parameter(name), parameter, atol=1e-5), name
                        state = runner.optim_wrapper.optimizer.state[parameter]['exp_avg_sq'].clone()
                        found[name] = state.unflatten(1, (3, 16)).transpose(0, 1) if name == 'value.weight' else state

    runner.register_hook(AfterReset())
    runner.train()
    assert found.keys() == {'encoding.center', 'encoding.sqrt_precision', 'value.weight'}
    for state in found.values():
        assert not state[1].any() and state[0].all() and state[2].all()


def test_penalty(repository, tmp_path):
    weights = {}
    for penalty in (0.0, 0.5):
        config = small_config(repository, tmp_path / str(penalty), hook=dict(singular_penalty=penalty))
        config.train_cfg.max_epochs = 1
        runner = Runner.from_cfg(config)
        with torch.no_grad():
            runner.model.backbone.blocks[0].attn.encoding.sqrt_precision[1] = torch.tensor([[1.0, 0.0], [0.0, 1e-3]])
        runner.train()
        weights[penalty] = runner.model.backbone.blocks[0].attn.encoding.sqrt_precision[1]
        logged = 'train/loss_singular' in runner.message_hub.log_scalars
        assert logged == (penalty > 0)
    condition = {penalty: torch.linalg.cond(matrix) for penalty, matrix in weights.items()}
    assert condition[0.5] < condition[0.0]


def test_gradient_accumulation(repository, tmp_path, start):
    """What is accumulated goes along: one step of four batches, two of them before the heads go."""
    config = small_config(repository, tmp_path, load_from=start, hook=dict(epochs=[PRUNE_AT]))
    config.optim_wrapper.accumulative_counts = 4

    class Gradients(Hook):
        priority = 'LOWEST'

        def after_train_epoch(self, runner):
            if runner.epoch == PRUNE_AT - 1:
                self.before = runner.model.backbone.blocks[0].attn.value.weight.grad.clone()

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if runner.iter == PRUNE_AT * ITERATIONS:
                after = runner.model.backbone.blocks[0].attn.value.weight.grad
                assert torch.equal(after, torch.cat([self.before[:, :16], self.before[:, 32:]], 1))

    runner = Runner.from_cfg(config)
    runner.register_hook(Gradients())
    runner.train()


@pytest.mark.parametrize(
    'settings, message',
    [
        (dict(epochs=[-1]), r'epochs=\[-1\] of HeadPruningHook must be epochs'),
        (dict(begin=1), 'begin=1 and interval=None of HeadPruningHook go together'),
        (dict(begin=1, interval=0), 'begin=1 and interval=0'),
        (dict(lr_scale=0), 'lr_scale=0 of HeadPruningHook must be above 0'),
        (dict(num_batches=0), 'num_batches=0'),
        (dict(reset=True, lr_scale=0.1), 'lr_scale=0.1, .* leave them out with reset=True'),
        (dict(reset=True, param_scheduler=[]), 'leave them out with reset=True'),
        (dict(reset=True, allow_empty=True), 'leave them out with reset=True'),
        (dict(singular_penalty=-1.0), 'singular_penalty=-1.0 at least 0'),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        HOOKS.build(dict(type='mmpretrain.HeadPruningHook', **settings))


@pytest.mark.parametrize(
    'backbone, criteria, error, message',
    [
        ('SAGeneralized', ['ugly'], ValueError, "criterion 'ugly' is unknown"),
        ('SALearned', ['uniform'], TypeError, "'entropy'"),
    ],
)
def test_criteria_are_checked_at_once(backbone, criteria, error, message, repository, tmp_path):
    config = small_config(repository, tmp_path, hook=dict(epochs=[EPOCHS - 1], criteria=criteria))
    config.model.backbone.type = backbone
    with pytest.raises(error, match=message):
        run(config)
    assert not list(tmp_path.glob('*.pth'))


def test_models_without_such_heads(repository, tmp_path):
    config = small_config(repository, tmp_path, hook=dict(epochs=[0]))
    config.model.backbone.update(type='SALearned', content=True)
    with pytest.raises(TypeError, match="blocks.0.attn: the criterion 'stripe' is for Gaussian heads"):
        run(config)


def test_mixed_precision(repository, tmp_path, start, monkeypatch):
    """AmpOptimWrapper, which asks for a GPU, on the CPU; the state of what is left goes on."""
    from mmengine.optim.optimizer import amp_optimizer_wrapper

    monkeypatch.setattr(amp_optimizer_wrapper, 'is_cuda_available', lambda: True)
    config = small_config(repository, tmp_path, load_from=start, hook=dict(epochs=[PRUNE_AT]))
    config.optim_wrapper.update(type='AmpOptimWrapper', dtype='bfloat16')
    runner, recorder = run(config)
    assert type(runner.optim_wrapper).__name__ == 'AmpOptimWrapper'
    assert recorder.heads[-1] == [2, 2]
    for parameter, state in runner.optim_wrapper.optimizer.state.items():
        assert state['exp_avg'].shape == parameter.shape and state['step'] == EPOCHS * ITERATIONS
    again = run(
        small_config(
            repository,
            tmp_path / 'again',
            hook=dict(epochs=[PRUNE_AT]),
            resume=True,
            load_from=str(tmp_path / f'epoch_{PRUNE_AT + 1}.pth'),
            **{'optim_wrapper.type': 'AmpOptimWrapper', 'optim_wrapper.dtype': 'bfloat16'},
        )
    )[1]
    for name, weight in recorder.weights[EPOCHS].items():
        assert torch.allclose(again.weights[EPOCHS][name], weight, atol=1e-6), name
