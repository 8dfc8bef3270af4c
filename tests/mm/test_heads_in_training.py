"""Narrow heads of CMHSA in the framework's own trainer: transition and resuming."""

import pytest
import torch
from helpers.two_phases import EPOCHS, SWITCH, small_config
from helpers.two_phases import run as train

HEADS = dict(head_dim='exact', qk_dim=8)


def config_with_heads(repository, work_dir, **changes):
    config = small_config(repository, work_dir, **changes)
    config.model.backbone.update(attn_bias_init=40.0, **HEADS)
    config.custom_hooks.append(dict(type='EMAHook', momentum=0.2))
    return config


def test_both_phases_in_one_run(repository, tmp_path):
    """The transition, the average, and resuming from before and after it."""
    runner, recorder = train(config_with_heads(repository, tmp_path))
    assert recorder.phases[-1] == 'attn'
    assert runner.message_hub.get_info('transition_drift') < 1e-5
    trained = {id(p) for group in runner.optim_wrapper.optimizer.param_groups for p in group['params']}
    assert trained == {id(p) for p in runner.model.parameters()}
    name = 'backbone.blocks.1.attn.query.weight'
    assert name not in recorder.weights[SWITCH] and recorder.weights[EPOCHS][name].abs().max() > 0
    saved = torch.load(tmp_path / f'epoch_{EPOCHS}.pth')['ema_state_dict']
    for epoch in (SWITCH, SWITCH + 1):
        work_dir = tmp_path / f'resumed{epoch}'
        checkpoint = str(tmp_path / f'epoch_{epoch}.pth')
        again = train(config_with_heads(repository, work_dir, load_from=checkpoint, resume=True))[1]
        for key, value in recorder.weights[EPOCHS].items():
            assert torch.allclose(again.weights[EPOCHS][key], value, atol=1e-6), key
        averaged = torch.load(work_dir / f'epoch_{EPOCHS}.pth')['ema_state_dict']
        for key, value in saved.items():
            assert torch.allclose(averaged[key].float(), value.float(), atol=1e-6), key


@pytest.mark.parametrize(
    'saved, now, phase',
    [
        (dict(head_dim='exact', qk_dim=8), dict(), 'conv'),
        (dict(head_dim='exact', qk_dim=8), dict(), 'attn'),
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
    for name, value in recorder.weights[SWITCH + 2].items():
        assert torch.allclose(again.weights[SWITCH + 2][name], value, atol=1e-6), name
