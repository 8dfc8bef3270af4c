"""Both phases in a run that counts iterations, as mmsegmentation's do, and what the log says of models of all kinds."""

import numpy as np
import pytest
import torch
from helpers.two_phases import run, small_config
from mmengine.registry import HOOKS
from mmpretrain.models import ImageClassifier
from mmpretrain.registry import MODELS

from attncnn_plugin.mm.runner import images_of_one_size

BEGIN, END = 2, 6  # of the second phase
RATES = np.array([2e-3, 0, *np.linspace(5e-4, 1e-4, END - BEGIN)])  # each phase to the end of its line


def config_of(repository, work_dir, **changes):
    """Iterations of 8 of the digits, whose rates fall in a line in each phase."""
    config = small_config(repository, work_dir, log_level='INFO')
    config.train_cfg = dict(type='IterBasedTrainLoop', max_iters=END, val_interval=END)
    config.train_dataloader.sampler = dict(type='InfiniteSampler', shuffle=True)
    config.default_hooks.checkpoint.update(by_epoch=False, interval=1)
    config.log_processor = dict(by_epoch=False)
    first, second = (dict(type='PolyLR', power=1, begin=0, by_epoch=False) for _ in range(2))
    config.param_scheduler = [dict(first, end=BEGIN)]
    config.custom_hooks[0] = dict(
        type='PhaseTransitionHook',
        iter=BEGIN,
        optim_wrapper=dict(optimizer=dict(lr=5e-4)),
        param_scheduler=[dict(second, eta_min=1e-4)],  # its end is that of the run
    )
    config.model.backbone.attn_bias_init = 40.0
    config.merge_from_dict(changes)
    return config


@pytest.fixture(scope='module')
def whole(tmp_path_factory, repository):
    work_dir = tmp_path_factory.mktemp('whole')
    return *run(config_of(repository, work_dir)), work_dir


def log_of(work_dir):
    return next(work_dir.glob('*/*.log')).read_text()


def test_phases_and_rates(whole):
    runner, recorder, work_dir = whole
    assert recorder.phases == ['conv'] * BEGIN + ['attn'] * (END - BEGIN)
    assert np.allclose(recorder.rates, RATES)
    assert runner.message_hub.get_info('transition_drift') < 1e-5
    log = log_of(work_dir)
    assert 'Transition at iter 2:\n' in log and '3×3 kernel  9 heads' in log
    assert 'Relative change of the features on the current batch: ' in log


@pytest.mark.parametrize('at', [1, BEGIN, BEGIN + 1])
def test_resumed_run_equals_the_whole_one(at, whole, repository, tmp_path):
    runner, recorder, work_dir = whole
    resumed, again = run(config_of(repository, tmp_path, load_from=str(work_dir / f'iter_{at}.pth'), resume=True))
    assert again.phases == recorder.phases[at:] and np.allclose(again.rates, RATES[at:])
    expected = runner.model.state_dict()
    for name, weight in resumed.model.state_dict().items():
        assert torch.allclose(weight, expected[name], atol=1e-6), name


def test_right_after_loading(repository, tmp_path):
    """The optimizer and the schedule of the run are those of the attention."""
    config = config_of(repository, tmp_path)
    config.custom_hooks[0] = dict(type='PhaseTransitionHook', iter=0)
    config.train_cfg.max_iters = 2
    _, recorder = run(config)
    assert recorder.phases == ['attn', 'attn'] and np.allclose(recorder.rates, RATES[:2])


@pytest.mark.parametrize(
    'settings, error, message',
    [
        (dict(iter=BEGIN, param_scheduler=dict(type='PolyLR')), ValueError, r"'PolyLR'.* counts epochs, but the loop"),
        (dict(iter=BEGIN, param_scheduler=dict(type='PolyLR', by_epoch=False, begin=4)), ValueError, 'begin=4, end=4'),
        (
            dict(epoch=1),
            TypeError,
            'epoch=1 of PhaseTransitionHook counts epochs, but the loop is a IterBased',
        ),
    ],
)
def test_mistakes_show_at_once(settings, error, message, repository, tmp_path):
    config = config_of(repository, tmp_path)
    config.custom_hooks[0] = dict(type='PhaseTransitionHook', **settings)
    with pytest.raises(error, match=message):
        run(config)
    assert not list(tmp_path.glob('*.pth'))


def test_iterations_of_a_loop_that_counts_epochs(repository, tmp_path):
    config = small_config(repository, tmp_path)
    config.custom_hooks[0] = dict(type='PhaseTransitionHook', iter=3)
    with pytest.raises(TypeError, match='iter=3 of PhaseTransitionHook counts iterations, but the loop is a Epoch'):
        run(config)


@pytest.mark.parametrize('settings', [dict(), dict(epoch=1, iter=2)])
def test_one_of_the_two(settings):
    with pytest.raises(ValueError, match='of PhaseTransitionHook: give one of them, the length of the first phase'):
        HOOKS.build(dict(type='mmpretrain.PhaseTransitionHook', **settings))


@pytest.mark.parametrize('iteration', [-1, 1.5, '3'])
def test_iter_is_checked(iteration):
    with pytest.raises(ValueError, match=f'iter={iteration!r} of PhaseTransitionHook must be the number of iterations'):
        HOOKS.build(dict(type='mmpretrain.PhaseTransitionHook', iter=iteration))


def test_outputs_that_cannot_be_compared(repository, tmp_path):
    """A detector may choose other boxes after the transition, and more of them: its features are compared."""

    @MODELS.register_module(force=True)
    class Chooses(ImageClassifier):
        def forward(self, inputs, data_samples=None, mode='tensor'):
            found = super().forward(inputs, data_samples, mode)
            return found[: 3 if self.backbone.phase == 'conv' else 4] if mode == 'tensor' else found

    config = config_of(repository, tmp_path)
    config.model.type = 'Chooses'
    runner, recorder = run(config)
    assert recorder.phases[-1] == 'attn'
    assert runner.message_hub.get_info('transition_drift_of_features') < 1e-5
    assert 'transition_drift' not in runner.message_hub.runtime_info
    assert 'The output on the current batch has 40 numbers, and had 30: its relative change is not known' in (
        log_of(tmp_path)
    )


def test_images_of_one_size():
    """Those of the first one's size, with what belongs to them; other batches as they are."""
    small, large = torch.zeros(3, 4, 4), torch.zeros(3, 4, 8)
    batch = dict(inputs=[small, large, small], data_samples=['a', 'b', 'c'])
    chosen = images_of_one_size(batch)
    assert chosen['data_samples'] == ['a', 'c'] and all(image is small for image in chosen['inputs'])
    for other in (dict(inputs=torch.zeros(2, 3, 4, 4)), dict(inputs=[[small], [large]]), [small, large]):
        assert images_of_one_size(other) is other
