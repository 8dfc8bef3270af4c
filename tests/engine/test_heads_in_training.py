"""Merged and narrow heads of CMHSA in the framework's own trainer: transition, resuming, mmpretrain's converter."""

import os

import mmpretrain
import pytest
import torch
from helpers.convolutions import relative_error
from helpers.processes import run
from helpers.two_phases import EPOCHS, SWITCH, small_config
from helpers.two_phases import run as train

# The settings of the heads, and a parameter of theirs.
HEADS = {
    'merged': (dict(merge_heads=True), 'query_key.weight'),
    'narrow': (dict(head_dim='exact', qk_dim=8, num_heads=10), 'query.weight'),
}


def config_with(heads, repository, work_dir, **changes):
    config = small_config(repository, work_dir, **changes)
    config.model.backbone.update(attn_bias_init=40.0, **HEADS[heads][0])
    config.custom_hooks.append(dict(type='EMAHook', momentum=0.2))
    return config


@pytest.mark.parametrize('heads', HEADS)
def test_both_phases_in_one_run(heads, repository, tmp_path):
    """The transition, the average, and resuming from before and after it."""
    runner, recorder = train(config_with(heads, repository, tmp_path))
    assert recorder.phases[-1] == 'attn' and runner.model.backbone.merged == (heads == 'merged')
    assert runner.message_hub.get_info('transition_drift') < 1e-5
    trained = {id(p) for group in runner.optim_wrapper.optimizer.param_groups for p in group['params']}
    assert trained == {id(p) for p in runner.model.parameters()}
    name = f'backbone.blocks.1.attn.{HEADS[heads][1]}'
    assert name not in recorder.weights[SWITCH] and recorder.weights[EPOCHS][name].abs().max() > 0
    saved = torch.load(tmp_path / f'epoch_{EPOCHS}.pth')['ema_state_dict']
    for epoch in (SWITCH, SWITCH + 1):
        work_dir = tmp_path / f'resumed{epoch}'
        checkpoint = str(tmp_path / f'epoch_{epoch}.pth')
        again = train(config_with(heads, repository, work_dir, load_from=checkpoint, resume=True))[1]
        for key, value in recorder.weights[EPOCHS].items():
            assert torch.allclose(again.weights[EPOCHS][key], value, atol=1e-6), key
        averaged = torch.load(work_dir / f'epoch_{EPOCHS}.pth')['ema_state_dict']
        for key, value in saved.items():
            assert torch.allclose(averaged[key].float(), value.float(), atol=1e-6), key


@pytest.mark.parametrize(
    'saved, now, phase',
    [
        (dict(), dict(merge_heads=True), 'conv'),
        (dict(merge_heads=True), dict(), 'attn'),
        (dict(head_dim='exact', qk_dim=8), dict(), 'conv'),
        (dict(head_dim='exact', qk_dim=8), dict(head_dim=4), 'attn'),
    ],
)
def test_a_checkpoint_resumes_with_the_heads_that_it_was_saved_with(saved, now, phase, repository, tmp_path):
    """Whatever the config says by now: the optimizer's state is of those parameters."""

    def config(work_dir, heads, **changes):
        config = small_config(repository, work_dir, **changes)
        config.train_cfg.max_epochs = SWITCH + 2
        config.model.backbone.update(heads)
        return config

    recorder = train(config(tmp_path, saved))[1]
    resumed = config(tmp_path / 'resumed', now, load_from=str(tmp_path / f'epoch_{SWITCH + 1}.pth'), resume=True)
    resumed.model.backbone.phase = phase
    runner, again = train(resumed)
    assert runner.model.backbone.merged == saved.get('merge_heads', False)
    for name, value in recorder.weights[SWITCH + 2].items():
        assert torch.allclose(again.weights[SWITCH + 2][name], value, atol=1e-6), name


def test_mmpretrains_converter(repository, tmp_path):
    """A trained checkpoint becomes one of two matrices a head, for the config that made it."""
    config = small_config(repository, tmp_path)
    config.custom_hooks = []
    config.model.backbone.update(phase='attn')
    config.train_cfg.max_epochs = 1
    train(config)
    path, checkpoint, out = tmp_path / 'config.py', tmp_path / 'epoch_1.pth', tmp_path / 'deployed/model.pth'
    config.custom_imports = dict(imports=['attncnn_plugin.mm.safe_loading'], allow_failed_imports=False)
    config.dump(path)
    tool = os.path.join(os.path.dirname(mmpretrain.__file__), '.mim/tools/model_converters/reparameterize_model.py')
    run('python', tool, path, checkpoint, out, folder=tmp_path)
    saved = torch.load(out)['state_dict']
    assert 'backbone.blocks.0.attn.query_key.weight' in saved and 'backbone.blocks.0.attn.key.weight' not in saved
    before, after = (mmpretrain.get_model(str(path), pretrained=str(file)) for file in (checkpoint, out))
    x = torch.randn(2, 1, 32, 32)
    assert after.backbone.merged and not before.backbone.merged
    assert relative_error(after(x), before(x)) < 1e-5
    assert all(torch.equal(value, saved[name]) for name, value in after.state_dict().items())
