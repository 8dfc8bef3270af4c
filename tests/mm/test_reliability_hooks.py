"""The hooks for faults of a run in this process; tests/mm/test_faults.py has them in processes that are killed."""

import contextlib
import os
import resource
import shutil
from contextlib import nullcontext

import pytest
import torch
from helpers.digits import SGD, small_config
from mmengine.fileio import put
from mmengine.hooks import Hook
from mmengine.runner import Runner

from attncnn_plugin.mm.reliability import AtomicBackend, EpochSeedHook

EPOCHS, ITERATIONS = 2, 3


class Fault(Hook):
    """Calls a function before one iteration of a run."""

    priority = 'LOWEST'

    def __init__(self, iteration, function):
        self.iteration = iteration
        self.function = function

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.iteration:
            self.function(runner)


def build(repository, work_dir, fault=None, **changes):
    settings = {'optim_wrapper.optimizer': SGD, 'train_cfg.max_epochs': EPOCHS, 'log_level': 'ERROR', **changes}
    runner = Runner.from_cfg(small_config(repository, work_dir, 'sa_quadratic_digits', **settings))
    if fault is not None:
        runner.register_hook(Fault(*fault))
    return runner


def break_weights(runner):
    with torch.no_grad():
        next(runner.model.parameters()).fill_(float('nan'))


@pytest.fixture(scope='module')
def whole(repository, tmp_path_factory):
    """The folder of a run to which nothing happens, and its weights."""
    runner = build(repository, tmp_path_factory.mktemp('whole'))
    runner.train()
    return runner.work_dir, runner.model.state_dict()


def assert_weights(runner, expected):
    assert all(torch.equal(value, expected[name]) for name, value in runner.model.state_dict().items())


def test_weights_that_are_not_finite(repository, tmp_path):
    """They are in no checkpoint: here after the first epoch, of a loss of NaN."""
    runner = build(repository, tmp_path, (ITERATIONS, break_weights))
    said = (
        rf'weight is not finite any more after iteration 6, and is not saved; the last .* is {tmp_path}/epoch_1.pth: '
    )
    with pytest.raises(FloatingPointError, match=said):
        runner.train()
    assert [path.name for path in tmp_path.glob('epoch*')] == ['epoch_1.pth']


def test_resumed_from_the_one_before(repository, tmp_path, whole):
    work_dir = shutil.copytree(whole[0], tmp_path / 'run')
    last, before = work_dir / 'epoch_2.pth', work_dir / 'epoch_1.pth'
    os.truncate(last, 5000)  # other damages: test_which_checkpoint_is_whole
    (work_dir / 'last_checkpoint').write_text(str(last))
    resumed = build(repository, work_dir, resume=True)
    warnings = []
    resumed.logger.warning = warnings.append
    resumed.call_hook('before_run')
    unfit = 'missing, damaged or without an optimizer'
    assert f'{last} is of another folder, {unfit}: resuming from {before} instead' in warnings
    resumed.load_or_resume()
    assert resumed.iter == ITERATIONS
    best = work_dir / next(name for name in os.listdir(work_dir) if name.startswith('best'))
    (work_dir / 'last_checkpoint').write_text(str(best))
    again = build(repository, work_dir, resume=True)
    again.logger.warning = warnings.append
    again.call_hook('before_run')
    assert warnings[-1] == f'{best} is of another folder, {unfit}: resuming from {before} instead'
    before.unlink()
    with pytest.raises(FileNotFoundError, match=f'{best} is {unfit}, and {work_dir} holds no other one'):
        build(repository, work_dir, resume=True).call_hook('before_run')
    (work_dir / 'last_checkpoint').unlink()
    with pytest.raises(FileNotFoundError, match=f'last_checkpoint is {unfit}, and {work_dir} holds no other'):
        build(repository, work_dir, resume=True).call_hook('before_run')


def ready(runner):
    """What a run has built before it loads a checkpoint."""
    runner._train_loop = runner.build_train_loop(runner._train_loop)
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    if runner.param_schedulers is not None:
        runner.param_schedulers = runner.build_param_scheduler(runner.param_schedulers)
    return runner


@pytest.mark.parametrize(
    'lost, changes, said',
    [
        (['optimizer', 'param_schedulers'], {}, 'no optimizer and no param_schedulers'),  # a best one
        (['param_schedulers'], {}, 'no param_schedulers, which a run needs to resume: resume from {last}, or start '),
        (['optimizer'], {}, 'no optimizer, which a run needs to resume: resume from {last}, or start from its weights'),
        ([], {'param_scheduler': []}, 'the state of 2 param_schedulers, but the run has 0: give the config that it wa'),
        (['ema_state_dict'], {'custom_hooks': [dict(type='EMAHook')]}, None),  # mmengine says that it starts anew
        ([], {'average': True}, 'averages of an EMAHook in place of the trained weights: resume with'),
        (['param_schedulers'], {'param_scheduler': None}, None),
    ],
)
def test_what_a_checkpoint_to_resume_from_must_have(lost, changes, said, repository, tmp_path, whole):
    """In a file, and where it comes from elsewhere."""
    last, path, changes = f'{whole[0]}/epoch_2.pth', f'{whole[0]}/other.pth', dict(changes)
    checkpoint = torch.load(last)
    if changes.pop('average', False):
        checkpoint['ema_state_dict'] = {}
    torch.save({key: value for key, value in checkpoint.items() if key not in lost}, path)
    for name in (path, 'attncnn://elsewhere'):
        runner = ready(build(repository, tmp_path, resume=True, load_from=name, **changes))
        with pytest.raises(ValueError, match=f'{name} has {said.format(last=last)}') if said else nullcontext():
            runner.call_hook('before_run')
            runner.call_hook('after_load_checkpoint', checkpoint=torch.load(path))
        said = said and said.split(', which')[0]  # no other file is beside it
    os.remove(path)


@pytest.mark.parametrize('batch, number', [(8, 0), (4, 2)])
def test_a_schedule_that_would_end_elsewhere_now(batch, number, repository, tmp_path, whole):
    """It stays that of the checkpoint, as mmengine has it; the run says so."""
    changes = {'load_from': f'{whole[0]}/epoch_2.pth', 'train_dataloader.batch_size': batch}
    runner, warnings = ready(build(repository, tmp_path, resume=True, **changes)), []
    runner.logger.warning = warnings.append
    runner.call_hook('after_load_checkpoint', checkpoint=torch.load(runner._load_from))
    said = [f'CosineAnnealingLR ends at {5 * ITERATIONS}, as in the checkpoint, and not at {10 * ITERATIONS}, as it wo']
    assert len(warnings) == number and [text[: len(said[0])] for text in warnings[1:]] == said[: number - 1]


FLIP = dict(type='RandomFlip', prob=0.5, direction='horizontal')


def test_seeds_of_epochs(repository, tmp_path):
    """Workers draw other numbers in each epoch, and the same when it comes again."""
    config = small_config(repository, tmp_path, 'sa_quadratic_digits', log_level='ERROR')
    config.train_dataloader.update(num_workers=1, sampler=dict(type='DefaultSampler', shuffle=False))
    config.train_dataloader.dataset.pipeline.insert(-1, FLIP)
    runner, hook, epochs = ready(Runner.from_cfg(config)), EpochSeedHook(), []
    hook.before_train(runner)
    for epoch in (0, 1, 0):
        runner.train_loop._epoch = epoch
        hook.before_train_epoch(runner)
        epochs.append([image for batch in runner.train_dataloader for image in batch['inputs']])
    first, second, again = map(torch.stack, epochs)
    assert torch.equal(first, again) and not torch.equal(first, second)
    config.train_dataloader.persistent_workers = True
    with pytest.raises(ValueError, match='needs persistent_workers=False in train_dataloader'):
        hook.before_train(ready(Runner.from_cfg(config)))


def test_a_resumed_run_has_the_seed_of_its_checkpoint(repository, tmp_path):
    """The order of images too, which samplers draw."""
    hooks = {'default_hooks.epoch_seed': dict(type='EpochSeedHook')}
    first, second = (dict(hooks, randomness=dict(seed=seed)) for seed in (1, 2))
    runner = build(repository, tmp_path / 'first', **first)
    runner.train()
    resumed = build(repository, tmp_path, resume=True, load_from=f'{tmp_path}/first/epoch_1.pth', **second)
    resumed.train()
    assert_weights(resumed, runner.model.state_dict())


def test_a_command_with_load_from_is_repeated(repository, tmp_path, whole):
    """The error names the last checkpoint of the run, not the weights that it began with."""
    last, start = shutil.copy(f'{whole[0]}/epoch_2.pth', tmp_path), tmp_path / 'start/weights.pth'
    start.parent.mkdir()
    torch.save(dict(state_dict=torch.load(last)['state_dict']), start)
    with pytest.raises(ValueError, match=f'{start} has no .*which a run needs to resume: resume from {last}, or'):
        build(repository, tmp_path, resume=True, load_from=str(start)).call_hook('before_run')


def test_a_checkpoint_of_another_model(repository, tmp_path):
    torch.save(dict(weight=torch.zeros(2)), tmp_path / 'weights.pth')
    load_from = dict(load_from=str(tmp_path / 'weights.pth'))
    with pytest.raises(ValueError, match='weights.pth has no meta and no message_hub and no optimizer and no param_'):
        build(repository, tmp_path, resume=True, **load_from).call_hook('before_run')
    with pytest.raises(ValueError, match='weights.pth is of another model: 0 of the 32 weights of this one are in it '):
        build(repository, tmp_path, **load_from).call_hook('before_run')
    runner = build(repository, tmp_path, **load_from)
    weights = runner.model.state_dict()
    for fitting in (3, 4):  # a tenth is enough
        torch.save({name: weights[name] for name in [*weights][:fitting]}, tmp_path / 'weights.pth')
        with pytest.raises(ValueError, match='3 of the 32 weights') if fitting == 3 else contextlib.nullcontext():
            runner.call_hook('before_run')


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


TWO = {'val_evaluator': dict(type='Accuracy', topk=(1, 3))}
TWO['default_hooks.checkpoint.save_best'] = ['accuracy/top1', 'accuracy/top3']
PUBLISHED = {'default_hooks.checkpoint.published_keys': ['meta', 'state_dict']}


@pytest.mark.slow
@pytest.mark.parametrize(
    'place, changes, better',
    [
        ('other', {}, True),
        ('other', PUBLISHED, False),
        ('copied', TWO, True),
        ('renamed', TWO, True),
        ('linked', {}, True),
        ('links', {}, True),
    ],
)
def test_nothing_outside_of_a_runs_folder_is_written_or_removed(place, changes, better, repository, tmp_path):
    """A run resumes elsewhere, and has a better score or not; its own best checkpoints are replaced."""
    first, second = tmp_path / 'first', tmp_path / 'second'
    build(repository, first, **changes, **{'train_cfg.max_epochs': 1}).train()
    checkpoint = torch.load(first / 'epoch_1.pth')
    info = checkpoint['message_hub']['runtime_info']
    info.update({key: -1.0 if better else 101.0 for key in info if key.startswith('best_score')})
    torch.save(checkpoint, first / 'epoch_1.pth')
    for config in first.glob('*.py'):
        config.unlink()  # mmengine writes it before there are any hooks
    before = files_of(first)
    if place in ('copied', 'links'):
        shutil.copytree(first, second, copy_function=shutil.copy2 if place == 'copied' else os.symlink)
    elif place == 'renamed':
        first.rename(second)
    elif place == 'linked':
        second.symlink_to(first)
    resume = dict(resume=True, load_from=str(first / 'epoch_1.pth') if place == 'other' else None)
    resumed = build(repository, second, **resume, **changes)
    resumed.train()
    if place in ('other', 'copied', 'links'):
        assert files_of(first) == before
    scores = ['top1', 'top3'] if changes is TWO else ['top1'] if better else []
    assert sorted(path.name for path in second.glob('best*')) == [
        f'best_accuracy_{name}_epoch_2.pth' for name in scores
    ]
    own = [path for key, path in resumed.message_hub.runtime_info.items() if '_ckpt' in key and '_ids' not in key]
    assert len(own) == 1 + len(scores) and {os.path.dirname(path) for path in own} == {str(second)}


def test_files_are_complete_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / 'folder/file'
    put(b'before', str(path), backend_args=dict(backend='atomic'))

    def fail(descriptor):
        raise OSError('no space left on device')

    with monkeypatch.context() as patched, pytest.raises(OSError, match=r'file \(10,000 bytes\) could not be written'):
        patched.setattr(os, 'fsync', fail)
        AtomicBackend().put(bytes(10_000), path)
    assert path.read_bytes() == b'before' and os.listdir(path.parent) == ['file']
    (tmp_path / 'folder/file.part').write_bytes(b'left by a killed process')
    put(b'after', str(path), backend_args=dict(backend='atomic'))
    assert path.read_bytes() == b'after' and os.listdir(path.parent) == ['file']


def test_disk_full(repository, tmp_path, whole):
    """The error says what to do; the checkpoint before stays, even if it is to be the only one, and is resumed."""
    only, limits = {'default_hooks.checkpoint.max_keep_ckpts': 1}, resource.getrlimit(resource.RLIMIT_FSIZE)
    fault = ITERATIONS, lambda runner: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OSError, match=rf'{tmp_path}/epoch_2.pth \(.* could not be written .*: make room, then'):
            build(repository, tmp_path, fault, **only).train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / 'last_checkpoint').read_text() == str(tmp_path / 'epoch_1.pth')
    assert [path.name for path in tmp_path.glob('epoch*')] == ['epoch_1.pth']
    resumed = build(repository, tmp_path, resume=True, **only)
    resumed.train()
    assert_weights(resumed, whole[1])
    assert [path.name for path in tmp_path.glob('epoch*')] == ['epoch_2.pth']


class Rising(Hook):
    """Each epoch is better than the one before."""

    priority = 'HIGHEST'

    def after_val_epoch(self, runner, metrics=None):
        metrics['accuracy/top1'] = runner.epoch


def test_the_best_checkpoint_stays_until_the_next_one_is_there(repository, tmp_path):
    runner = build(repository, tmp_path, **{'train_cfg.max_epochs': 3})
    runner.register_hook(Rising())
    save = runner.save_checkpoint

    def fail(out_dir, filename, *args, **kwargs):
        if filename.startswith('best') and runner.epoch == 3:
            raise OSError('no space left on device')
        save(out_dir, filename, *args, **kwargs)

    runner.save_checkpoint = fail
    with pytest.raises(OSError, match='no space left'):
        runner.train()
    assert [path.name for path in tmp_path.glob('best*')] == ['best_accuracy_top1_epoch_2.pth']


class Stop(Hook):
    """Stops a run in the validation after an epoch."""

    def __init__(self, epoch):
        self.epoch = epoch

    def before_val(self, runner):
        if runner.epoch == self.epoch:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize('interval, stop', [(1, 1), (1, 2), (5, 2)])
def test_a_validation_that_was_left_out(interval, stop, repository, tmp_path):
    """After the last epoch too, which is validated whatever the interval is."""
    changes = {'train_cfg.val_interval': interval, 'custom_hooks': [dict(type='ResumedValidationHook')]}
    wanted = [epoch for epoch in range(1, EPOCHS + 1) if epoch % interval == 0 or epoch == EPOCHS]
    runner = build(repository, tmp_path, **changes)
    runner.register_hook(Stop(stop))
    with pytest.raises(KeyboardInterrupt):
        runner.train()
    resumed = build(repository, tmp_path, resume=True, **changes)
    validated, validate = [], resumed.val_loop.run
    resumed.val_loop.run = lambda: validated.append(resumed.epoch) or validate()
    resumed.train()
    assert validated == [epoch for epoch in wanted if epoch >= stop]
