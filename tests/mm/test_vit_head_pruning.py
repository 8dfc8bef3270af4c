"""Heads of vision transformers and of CMHSA pruned in the framework's own trainer, by importance and by criteria."""

import pytest
import torch
from helpers import two_phases
from helpers.digits_training import EPOCHS, ITERATIONS, PRUNE_AT, average_of, small_config
from mmengine.runner import Runner

from attncnn_plugin.pruning import prunable_heads

ARCH = dict(embed_dims=16, num_layers=2, num_heads=4, feedforward_channels=24)
BACKBONES = {
    'VisionTransformer': dict(type='VisionTransformer', arch=ARCH, img_size=16, patch_size=4, in_channels=1),
    'BEiTViT': dict(type='BEiTViT', arch=ARCH, img_size=16, patch_size=4, in_channels=1),
    'CMHSA': dict(
        type='CMHSA',
        phase='attn',
        img_size=16,
        patch_size=4,
        num_layers=2,
        feedforward_channels=24,
        head_dim='exact',
        in_channels=1,
    ),
}
KEEP_FIVE = dict(type='importance', keep=5)


def config_of(name, repository, folder, hook=None, **changes):
    config = small_config(repository, folder, hook=hook, **changes)
    config.model.backbone = BACKBONES[name]
    if name == 'CMHSA':
        config.model.neck = dict(type='GlobalAveragePooling')
    config.custom_hooks.append(dict(type='EMAHook', momentum=0.2))
    return config


def train(config):
    """The runner after its training, and the weights after each epoch."""
    runner = Runner.from_cfg(config)
    runner.train()
    weights = {}
    for epoch in range(1, EPOCHS + 1):
        path = f'{config.work_dir}/epoch_{epoch}.pth'
        try:
            weights[epoch] = torch.load(path)['state_dict']
        except FileNotFoundError:  # before the run was resumed
            continue
    return runner, weights


def numbers(model):
    return [layer.num_heads for layer in prunable_heads(model).values()]


@pytest.mark.parametrize('name', BACKBONES)
def test_by_importance(name, repository, tmp_path):
    """Optimizer and average go on with what is left, and a resumed run is the same."""
    hook = dict(epochs=[PRUNE_AT], criteria=[KEEP_FIVE], num_batches=2)
    runner, weights = train(config_of(name, repository, tmp_path, hook))
    assert sum(numbers(runner.model)) == 5 and min(numbers(runner.model)) >= 1
    assert numbers(average_of(runner).module) == numbers(runner.model)
    optimizer = runner.optim_wrapper.optimizer
    assert {id(p) for g in optimizer.param_groups for p in g['params']} == {id(p) for p in runner.model.parameters()}
    for parameter, state in optimizer.state.items():
        assert state['exp_avg'].shape == parameter.shape and state['step'] == EPOCHS * ITERATIONS
    for epoch in (PRUNE_AT, PRUNE_AT + 1):
        folder = tmp_path / f'resumed{epoch}'
        start = str(tmp_path / f'epoch_{epoch}.pth')
        again, resumed = train(config_of(name, repository, folder, hook, load_from=start, resume=True))
        assert min(resumed) == epoch + 1
        for at, expected in ((at, weights[at]) for at in resumed):
            for key, value in expected.items():
                assert torch.allclose(resumed[at][key], value, atol=1e-6), (at, key)
        for key, value in average_of(again).state_dict().items():
            assert torch.allclose(value.float(), average_of(runner).state_dict()[key].float(), atol=1e-6), key


@pytest.mark.parametrize('criteria', [None, [dict(type='importance', multiply_adds=0.95)]])
def test_after_a_transition(criteria, repository, tmp_path):
    """Criteria that turn out not to be for the attention that convolutions became are left, with a warning."""
    config = two_phases.small_config(repository, tmp_path)
    hook = dict(type='HeadPruningHook', epochs=[two_phases.SWITCH + 1], num_batches=1)
    config.custom_hooks.append(hook if criteria is None else dict(hook, criteria=criteria))
    runner, _ = two_phases.run(config)
    (log,) = tmp_path.glob('*/*.log')
    heads = sum(numbers(runner.model))
    if criteria is None:
        assert f'removes no heads at epoch {two_phases.SWITCH + 1}: backbone.blocks.0.attn' in log.read_text()
        assert heads == sum(layer.built_heads for layer in prunable_heads(runner.model).values())
    else:
        assert heads < sum(layer.built_heads for layer in prunable_heads(runner.model).values())
        assert runner.message_hub.get_info('multiply_adds_before_pruning') > 0


def test_a_share_of_the_multiply_adds(repository, tmp_path):
    """Of those that there were at first: nothing more goes at the next epochs, nor in a run that is resumed."""
    hook = dict(begin=1, interval=1, criteria=[dict(type='importance', multiply_adds=0.85)], num_batches=1)
    runner, weights = train(config_of('VisionTransformer', repository, tmp_path, hook))
    assert weights[1]['backbone.layers.0.attn.proj.weight'].shape[1] == 16
    heads = numbers(runner.model)
    for epoch in range(2, EPOCHS + 1):
        widths = [weights[epoch][f'backbone.layers.{i}.attn.proj.weight'].shape[1] // 4 for i in range(2)]
        assert widths == heads and sum(heads) < 8
    start = str(tmp_path / 'epoch_3.pth')
    again, _ = train(config_of('VisionTransformer', repository, tmp_path / 'on', hook, load_from=start, resume=True))
    assert numbers(again.model) == heads


def test_pruned_checkpoint_in_a_config_that_never_prunes(repository, tmp_path):
    hook = dict(epochs=[0], criteria=[KEEP_FIVE], num_batches=1)
    config = config_of('VisionTransformer', repository, tmp_path, hook)
    config.train_cfg.max_epochs = 1
    config.param_scheduler = None
    train(config)
    for resume in (False, True):
        later = config_of('VisionTransformer', repository, tmp_path / str(resume), resume=resume)
        later.load_from = str(tmp_path / 'epoch_1.pth')
        later.custom_hooks.append(dict(type='FollowStateDictHook'))
        later.train_cfg.max_epochs = 2
        later.param_scheduler = None
        runner, weights = train(later)
        assert sum(numbers(runner.model)) == 5
        before = torch.load(tmp_path / 'epoch_1.pth')['state_dict']
        moved = {key for key, value in weights[2].items() if not torch.equal(value, before[key])}
        assert moved == set(before)


@pytest.mark.parametrize('name', ['VisionTransformer', 'CMHSA'])
def test_by_what_heads_attend_to(name, repository, tmp_path):
    """A head without queries is uniform, in means over training images; its output, here a constant, stays."""
    config = config_of(name, repository, tmp_path, dict(epochs=[0], criteria=['entropy'], num_batches=2))
    config.train_cfg.max_epochs = 1
    config.optim_wrapper.optimizer.update(lr=0.0, weight_decay=0.0)
    runner = Runner.from_cfg(config)
    images = torch.randn(4, 1, 16, 16)
    with torch.no_grad():
        for parameter in runner.model.backbone.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
        if name == 'CMHSA':
            attention = runner.model.backbone.blocks[0].attn
            attention.query.weight[attention.qk_dim : 2 * attention.qk_dim] = 0
            attention.value.weight.split(attention.head_dims)[1].zero_()
            attention.position.table[1] = 0
        else:
            attention = runner.model.backbone.layers[0].attn
            attention.qkv.weight.view(3, 4, 4, 16)[[0, 2], 1] = 0  # queries and values of the second head
            attention.qkv.bias[4:8] = 0
    expected, before = runner.model.eval()(images), numbers(runner.model)[0]
    torch.save(dict(state_dict=runner.model.state_dict(), meta={}), tmp_path / 'start.pth')
    config.load_from = str(tmp_path / 'start.pth')
    runner, _ = train(config)
    assert numbers(runner.model)[0] == before - 1
    torch.testing.assert_close(runner.model.eval()(images), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    'name, settings, error, message',
    [
        ('VisionTransformer', dict(), TypeError, "layers.0.attn: the criterion 'stripe' is for Gaussian heads"),
        ('CMHSA', dict(), TypeError, "layers='\\*' can leave it out"),
        ('VisionTransformer', dict(criteria=['entropy'], reset=True), TypeError, 'whose heads cannot begin anew'),
        ('VisionTransformer', dict(criteria=['entropy'], layers='x*'), ValueError, "no attention with layers='x\\*'"),
        ('VisionTransformer', dict(criteria=[dict(type='importance', keep=1)]), ValueError, 'one of each of the 2'),
        (
            'VisionTransformer',
            dict(criteria=[dict(type='importance', multiply_adds=0.5)]),
            ValueError,
            'multiply_adds=0.5 cannot be reached',
        ),
        ('VisionTransformer', dict(criteria=['importance']), ValueError, 'nothing says how many heads go'),
        ('VisionTransformer', dict(criteria=[dict(type='importance', kept=3)]), ValueError, 'unknown settings'),
        ('VisionTransformer', dict(criteria=[KEEP_FIVE, KEEP_FIVE]), ValueError, "'importance' 2 times"),
    ],
)
def test_refused_at_once(name, settings, error, message, repository, tmp_path):
    with pytest.raises(error, match=message):
        train(config_of(name, repository, tmp_path, dict(epochs=[EPOCHS - 1], **settings)))
    assert not list(tmp_path.glob('*.pth'))
