"""tools/reproduce.py: the trainings of a table, stopped and going on, and its page."""

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import matplotlib
import numpy as np
import pytest
import torch

mmpretrain = pytest.importorskip('mmpretrain')
from helpers.processes import environment, run  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmengine.runner import Runner  # noqa: E402
from mmpretrain.registry import DATASETS, PARAM_SCHEDULERS  # noqa: E402

TOOL = Path(__file__).parents[2] / 'tools/reproduce.py'
TABLES_OF_DOCS = Path(__file__).parents[2] / 'docs/tables'
sys.path.insert(0, str(TOOL.parent))
import reproduce  # noqa: E402
from reproduction import results as results_module  # noqa: E402
from reproduction.configs import network_config, set_data, set_epochs, set_images  # noqa: E402
from reproduction.page import draw, write_page  # noqa: E402
from reproduction.results import Run, build, write_json  # noqa: E402
from reproduction.tables import TABLES, Row, Table  # noqa: E402

# Two rows, the second one from the weights of the first, and networks that train in a second.
SMALL = {
    'train_dataloader.batch_size': 5,
    'model.backbone.arch': dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=16),
    'model.head.in_channels': 16,
}
TABLE = Table(
    title='A table',
    about='Whether it is written.',
    epochs={20: 2, 40: 3},
    rows={
        'first': Row('sa_quadratic', SMALL, seeds=(0, 1)),
        'goes on': Row('sa_quadratic', SMALL, seeds=(0,), share=0.5, start='first', images=(40,)),
    },
    curves=('accuracy/top1', 'cross_entropy/mean'),
)


@pytest.mark.parametrize('name', list(TABLES))
def test_tables(name):
    """Rows begin with rows before them, of the same seeds; rows of several tables are the same but for the seeds."""
    seen = {}
    for label, row in TABLES[name].rows.items():
        if row.start:
            assert set(row.seeds) <= set(seen[row.start].seeds)
        seen[label] = row
        namesakes = [table.rows[label] for table in TABLES.values() if label in table.rows]
        assert all(dataclasses.replace(other, seeds=row.seeds) == row for other in namesakes)


@pytest.mark.parametrize('name', list(TABLES))
def test_networks(name):
    """All that the rows of a table train can be built, and begins."""
    for label, row in TABLES[name].rows.items():
        config = network_config(row.config, row.options)
        set_data(config, 'digits', None)
        set_images(config, 20, seed=1)
        model = build(config)
        model.init_weights()
        assert model.extract_feat(torch.randn(2, 3, 32, 32))[0].isfinite().all(), label


@pytest.mark.parametrize('path', sorted(TABLES_OF_DOCS.glob('*.json')), ids=lambda path: path.stem)
def test_the_pages_of_the_documentation(path, tmp_path):
    """They are what the tool writes from the results beside them, byte by byte."""
    name, table = path.stem, TABLES[path.stem]
    runs = reproduce.runs_of(table, argparse.Namespace(out=tmp_path))
    by_key = {(run.label, run.images, run.epochs, run.seed): run for run in runs}
    for result in json.loads(path.read_text()):
        run = by_key[tuple(result[key] for key in ('label', 'images', 'epochs', 'seed'))]
        write_json(run.folder / 'result.json', result)
    write_json(tmp_path / f'{name}.json', [run.result for run in runs if run.result])
    write_page(tmp_path, name, table, runs, 'copies of CIFAR-10 in JPEG at quality 75')
    figure = path.with_suffix('.svg')
    drawn_here = f'Matplotlib v{matplotlib.__version__},' in figure.read_text()  # other versions draw other bytes
    for committed in [path, path.with_suffix('.md'), *[figure] * drawn_here]:
        assert (tmp_path / committed.name).read_bytes() == committed.read_bytes()


def test_equal_schedules():
    """Rows that are compared begin their second phases in the same way."""
    rows = {**TABLES['L21-1'].rows, **TABLES['T-CNN'].rows}

    def second_phase(label):
        row = rows[label]
        config = network_config(row.config, row.options)
        set_epochs(config, round(row.share * 30), 10000)
        hooks = config.get('custom_hooks') or []
        found = hooks[0] if hooks else config
        return found.optim_wrapper.optimizer.lr, [dict(scheduler) for scheduler in found.param_scheduler]

    assert second_phase('two phases') == second_phase('second phase from a random start')
    without = second_phase('two phases, no warm-up')
    assert without == second_phase('second phase from a random start, no warm-up')
    assert len(without[1]) == 1 and without[0] == second_phase('two phases')[0]
    for label in ('additive', 'gated', 'positions alone'):
        assert second_phase(label) == second_phase('ResNet goes on')


def rates(config, per_epoch):
    """The learning rate at each iteration of a phase, as a share of the largest one."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    built = [
        PARAM_SCHEDULERS.build(dict(cfg), default_args=dict(optimizer=optimizer, epoch_length=per_epoch))
        for cfg in config
    ]
    found = []
    for _ in range(round(max(cfg['end'] for cfg in config) * per_epoch)):
        found.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        for scheduler in built:
            scheduler.step()
    return np.array(found)


def expected(warm_up, total):
    linear = 1e-3 + (1 - 1e-3) * np.arange(warm_up) / max(warm_up - 1, 1)
    return np.concatenate([linear, (1 + np.cos(np.pi * np.arange(total - warm_up) / (total - warm_up))) / 2])


@pytest.mark.parametrize(
    'name, epochs, images, phases',
    [
        ('vit', 100, 500, [(50, 1000)]),  # 10 iterations an epoch; iterations of warm-up, and all
        ('vit', 1, 200, [(2, 4)]),
        ('sa_generalized_pruned', 7, 20000, [(140, 2800)]),
        ('cmhsa', 100, 500, [(33, 600), (33, 400)]),
        ('cmhsa', 2, 200, [(2, 4), (2, 4)]),
        ('cmhsa_narrow_nowarmup', 5, 500, [(2, 30), (0, 20)]),
    ],
)
def test_a_schedule_of_other_epochs(name, epochs, images, phases):
    config = network_config(name, {})
    set_epochs(config, epochs, images)
    per_epoch, hooks = images // 50, [h for h in config.get('custom_hooks', []) if h.type == 'PhaseTransitionHook']
    schedulers = [config.param_scheduler, *(hook.param_scheduler for hook in hooks)]
    assert config.train_cfg.max_epochs == epochs and sum(total for _, total in phases) == epochs * per_epoch
    assert [hook.epoch * per_epoch for hook in hooks] == [total for _, total in phases[:-1]]
    for scheduler, (warm_up, total) in zip(schedulers, phases):
        found = rates(scheduler, per_epoch)
        assert len(found) == total and np.allclose(found, expected(warm_up, total), atol=1e-6)


def test_too_few_epochs_for_two_phases():
    with pytest.raises(ValueError, match='epochs=1 must be at least 2 for a training in two phases'):
        set_epochs(network_config('cmhsa', {}), 1, 100)


def test_too_few_iterations_for_a_warm_up():
    with pytest.raises(ValueError, match='2 epochs of 1 batches are too few for a warm-up of 2 iterations'):
        set_epochs(network_config('vit', {}), 2, 50)


def test_a_folder_of_images(images):
    """What the network does with CIFAR's images follows what loads those of the folder; the subset is balanced."""
    config = network_config('deit', {})
    set_data(config, 'folder', images, test_images=10)
    set_images(config, 10, seed=1)
    steps = [step.type for step in config.train_dataloader.dataset.dataset.pipeline]
    assert steps == ['LoadImageFromFile', 'RandAugment', 'RandomErasing', 'PackInputs']
    for loader in (config.train_dataloader, config.val_dataloader):
        dataset = DATASETS.build(loader.dataset)
        assert sorted(dataset.get_gt_labels()) == list(range(10)) and dataset[0]['inputs'].shape == (3, 32, 32)
    assert config.data_preprocessor.to_rgb and config.data_preprocessor.type == 'FlipAndShift'
    augment, erase = config.train_dataloader.dataset.dataset.pipeline[1:3]  # of images that are blue first
    assert augment.hparams.pad_val == [114, 123, 125] and erase.fill_color == [113.8575, 122.961, 125.307]
    assert erase.fill_std == [51.255, 50.847, 51.5865]


@pytest.mark.parametrize('data, pad_val', [('cifar10', [125, 123, 114]), ('cifar100', [129, 124, 112])])
def test_colours_of_an_augmentation(data, pad_val):
    """What it leaves empty has the mean of the images, as the preprocessor has it."""
    config = network_config('deit', {})
    set_data(config, data, None)
    augment, erase, _ = config.train_dataloader.dataset.pipeline
    assert augment.hparams.pad_val == pad_val and erase.fill_color == config.data_preprocessor.mean
    assert erase.fill_std == config.data_preprocessor.std


def test_a_folder_of_few_classes(images):
    for label in range(3, 10):
        for split in ('train', 'test'):
            shutil.rmtree(images / split / str(label))
    config = network_config('vit', {})
    set_data(config, 'folder', images)
    assert config.model.head.num_classes == 3 and config.val_evaluator[0].topk == config.test_evaluator[0].topk == (1,)


def test_classes_of_a_folder(images):
    (images / 'train/10').mkdir()
    with pytest.raises(ValueError, match=r'/train and .*/test must have a folder for each class: '):
        set_data(network_config('vit', {}), 'folder', images)
    (images / 'test/10').mkdir()
    config = network_config('vit', {})
    set_data(config, 'folder', images)
    assert config.model.head.num_classes == config.data_preprocessor.num_classes == 11


def test_cifar100():
    config = network_config('sa_quadratic', {})
    set_data(config, 'cifar100', Path('elsewhere'))
    assert config.model.head.num_classes == config.data_preprocessor.num_classes == 100
    dataset = config.val_dataloader.dataset
    assert (dataset.type, dataset.data_root, dataset.split) == ('CIFAR100', 'elsewhere', 'test')


def test_the_seed_draws_the_start():
    config = network_config('vit_convolutional', {})
    set_images(config, 10, seed=5)
    assert config.model.backbone.init_cfg[1].seed == config.randomness.seed == 5


def test_no_deit_recipe():
    """These rows differ from those with the recipe in what the ViT of the table does without, and in nothing else."""
    rows = TABLES['L21-1'].rows
    vit = network_config('vit', {})
    plain = [label for label in rows if label.endswith(', no DeiT recipe')]
    assert len(plain) == 3
    for label in plain:
        pair = (rows[label], rows[label.split(',')[0]])
        config, with_recipe = (network_config(row.config, row.options) for row in pair)
        assert config.train_dataloader == vit.train_dataloader
        assert config.model.head.loss.type == vit.model.head.loss.type and not config.model.train_cfg
        assert config.model.backbone.pop('drop_path_rate') == 0 < with_recipe.model.backbone.pop('drop_path_rate')
        for part in (config, with_recipe):
            part.train_dataloader.dataset.pop('pipeline')
            part.model.head.pop('loss')
            part.model.pop('train_cfg')
        assert config.to_dict() == with_recipe.to_dict()


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """Runs the tool with trainings that are files alone; gives what they are, what it prints and its exit status."""
    monkeypatch.setitem(TABLES, 'small', TABLE)
    begun, start = [], subprocess.Popen

    def popen(command, **kwargs):
        """A training that has ended at once; one that is in ``failing``, with an error."""
        if command[1] != TOOL.parent / 'train.py':
            return start(command, **kwargs)
        folder, resumed = Path(command[4]), '--resume' in command
        begun.append(folder.name + ' again' * resumed)
        lock = (folder.parents[1] / 'lock').stat()  # a training that outlives the tool keeps it
        assert os.path.samestat(os.fstat(kwargs['pass_fds'][0]), lock)
        if folder.name not in run_tool.failing:
            run_tool.train(folder, resumed)
        return SimpleNamespace(poll=lambda: 0, returncode=int(folder.name in run_tool.failing))

    def run_tool(*options):
        del begun[:]
        command = ['reproduce.py', 'small', '--data', 'digits', '--test-images', '20', '--out', tmp_path, *options]
        monkeypatch.setattr(sys, 'argv', list(map(str, command)))
        status, handler = 0, signal.getsignal(signal.SIGTERM)
        try:
            reproduce.main()
        except SystemExit as error:
            status = error.code
        finally:
            signal.signal(signal.SIGTERM, handler)
        return list(begun), capsys.readouterr().out, status

    def collect(run, threads):
        machine = dict(processor='a processor', gpu=None, threads=threads)
        curves = {metric: [[run.epochs, 10.0 + run.seed]] for metric in TABLE.curves}
        result = dict(label=run.label, images=run.images, epochs=run.epochs, seed=run.seed, top1=10.0 + run.seed)
        result.update(seconds=60.0, parameters=1000, multiply_adds=7, curves=curves, machine=machine)
        write_json(run.folder / 'result.json', dict(result, versions=dict(torch='2'), config=run.config.to_dict()))
        return 'well'

    run_tool.failing = ()
    run_tool.train = lambda folder, resumed: (folder / f'epoch_{folder.name.split("_")[-2]}.pth').touch()
    run_tool.collect = Run.collect
    monkeypatch.setattr(results_module.subprocess, 'Popen', popen)
    monkeypatch.setattr(reproduce.time, 'sleep', lambda seconds: None)
    monkeypatch.setattr(Run, 'collect', collect)
    return run_tool


@pytest.fixture
def tool(call, monkeypatch):
    """The same with trainings of networks, in this process."""

    def train(folder, resumed):
        config = Config.fromfile(folder.with_suffix('.json'))
        config.work_dir, config.resume = str(folder), resumed
        if resumed:  # as mmpretrain's tool does
            config.load_from = None
        config.log_level, config.experiment_name = 'ERROR', f'{folder}-{time.time()}'
        Runner.from_cfg(config).train()

    call.train = train
    monkeypatch.setattr(Run, 'collect', call.collect)
    return call


def page_of(folder):
    text = (folder / 'small.md').read_text()
    rows = [line.strip('| ').split(' | ') for line in text.splitlines() if line.startswith('| ')]
    return text, {row[0]: row[1:] for row in rows[2:]}


def weights_of(path):
    return torch.load(path, weights_only=True)['state_dict']


def test_a_table(tool, tmp_path):
    """Trained, shown, left alone; results as data, and the page."""
    begun, output, status = tool('--list')
    assert not begun and '0 of 5 trainings are done' in output and status == 0
    assert 'goes on, 40 images, epochs: 2, seed 0: 0 epochs done' in output
    assert not list(tmp_path.iterdir())

    begun, output, status = tool('--seeds', 0, '--jobs', 1)
    assert begun == ['first_20_2_0', 'first_40_3_0', 'goes_on_40_2_0']
    assert status == 0 and '3 of 3 trainings are done\n' in output
    first, start, goes_on = json.loads((tmp_path / 'small.json').read_text())
    assert (first['seed'], first['images'], first['epochs'], first['start']) == (0, 20, 2, None)
    assert goes_on['start'] == 'first_40_3_0'
    state = weights_of(tmp_path / 'runs/first_20_2_0/epoch_2.pth')
    assert first['parameters'] == sum(value.numel() for value in state.values())
    assert first['seconds'] > 0 and first['multiply_adds'] > 0
    assert first['versions']['torch'] == torch.__version__ and first['machine']['threads'] == 1
    assert first['config']['randomness']['seed'] == 0 and goes_on['config']['randomness']['seed'] == 1000
    assert goes_on['config']['train_dataloader']['dataset']['seed'] == 0
    assert first['config']['train_dataloader']['batch_size'] == 5
    ((step, last),) = start['curves']['accuracy/top1']
    assert step == 3 and last == start['top1'] == 100 * round(start['top1']) / 100

    text, rows = page_of(tmp_path)
    assert tool('--seeds', 0, '--models', 'first', '--images', 20)[::2] == ([], 0)
    assert page_of(tmp_path)[0] == text  # all of the table
    assert rows['first'][-1] == '2' and rows['first'][2] == f'{first["top1"]:.1f}, 1 of 2 seeds'
    assert rows['goes on'][2:4] == ['', f'{goes_on["top1"]:.1f}']
    assert '| minutes with 40 images | seeds |' in text and 'Validated with 20 test images.' in text
    assert 'Missing, 2 of 5 trainings:' in text and '- first, 40 images, epochs: 3, seed 1' in text
    assert (tmp_path / 'small.svg').exists()

    begun, _, status = tool('--data-name', 'a few digits')
    assert begun == ['first_20_2_1', 'first_40_3_1'] and status == 0
    text, rows = page_of(tmp_path)
    assert 'Trained on a few digits: 20 images up to 2 epochs' in text
    low, high = sorted(result['top1'] for result in json.loads((tmp_path / 'small.json').read_text())[::3])
    expected = f'{(low + high) / 2:.1f} ({low:.1f} to {high:.1f})' if low < high else f'{low:.1f}'
    assert rows['first'][2] == expected and 'issing' not in text


def test_what_a_training_begins_with(tool, tmp_path):
    """``--models`` trains the rows that are named, and those that they begin with, whose weights they load."""
    begun, _, _ = tool('--models', 'goes on', '--images', 40, '--cfg-options', 'optim_wrapper.optimizer.lr=0.0')
    assert begun == ['first_40_3_0', 'goes_on_40_2_0']
    first, goes_on = weights_of(tmp_path / 'runs' / begun[0] / 'epoch_3.pth'), tmp_path / 'runs' / begun[1]
    goes_on = weights_of(goes_on / 'epoch_2.pth')
    assert all(torch.equal(goes_on[key], value) for key, value in first.items())


def test_a_folder_that_was_moved(tool, tmp_path, monkeypatch):
    """And one that is named in another way: trainings that begin with others are the same, and go on."""
    options = ['--images', 40, '--seeds', 0, '--cfg-options', 'default_hooks.checkpoint.max_keep_ckpts=-1']
    assert len(tool(*options)[0]) == 2
    moved = tmp_path / 'moved'
    moved.mkdir()
    shutil.move(tmp_path / 'runs', moved / 'runs')
    assert tool(*options, '--out', moved)[::2] == ([], 0)
    folder = moved / 'runs/goes_on_40_2_0'
    weights = weights_of(folder / 'epoch_2.pth')
    (folder / 'result.json').unlink()
    (folder / 'epoch_2.pth').unlink()  # as if stopped after the first epoch
    (moved / 'runs/first_40_3_0/epoch_3.pth').unlink()  # what has begun does not need them
    place = tmp_path / 'runs/goes_on_40_2_0'  # where it was; another training is there now
    place.mkdir(parents=True)
    shutil.copy(moved / 'runs/first_40_3_0/epoch_1.pth', place)
    (folder / 'last_checkpoint').write_text(str(place / 'epoch_1.pth'))
    monkeypatch.chdir(tmp_path)
    assert tool(*options, '--out', 'moved')[::2] == (['goes_on_40_2_0 again'], 0)
    again = weights_of(folder / 'epoch_2.pth')
    assert all(torch.equal(value, weights[name]) for name, value in again.items())
    assert len(list(folder.glob('*/vis_data'))) == 2
    config = json.loads((moved / 'runs/goes_on_40_2_0.json').read_text())
    assert config['load_from'] == str(Path('moved/runs/first_40_3_0/epoch_3.pth'))


def test_trainings_that_fail(call, tmp_path):
    """The others train; what begins with one does not; the status says so, and the page; the next call trains them."""
    call.failing = ('first_40_3_0',)
    begun, output, status = call('--seeds', 0)
    assert begun == ['first_20_2_0', 'first_40_3_0']
    assert 'first, 40 images, epochs: 3, seed 0: failed (ValueError: it ended with an error), see' in output
    assert '2 trainings failed or could not begin: first, 40 images' in status and 'goes on, 40' in status
    assert 'Missing, 4 of 5' in page_of(tmp_path)[0]
    call.failing = ()
    assert call('--seeds', 0)[::2] == (['first_40_3_0', 'goes_on_40_2_0'], 0)


def test_a_training_without_a_result(call, tmp_path, monkeypatch):
    """What ends well and says nothing does not stop the others."""
    monkeypatch.setattr(Run, 'collect', call.collect)
    begun, output, status = call('--images', 20)
    assert len(begun) == 2 and 'seed 1: failed (FileNotFoundError: ' in output
    assert '2 trainings failed or could not begin: first, 20 images, epochs: 2, seed 0; first' in status


@pytest.mark.parametrize(
    'options, message',
    [
        (
            ['--models', 'first', 'third'],
            r"small has no .* label of \['first', 'third'\]; in all it has \['first', 'go",
        ),
        (['--images', 30], r'small has no such trainings for each images of \[30\]; in all it has \[20, 40\]'),
        (
            ['--models', 'goes on', 'first', '--images', 20],
            r"no such trainings for each label of \['goes on', 'first'\]",
        ),
        (['--seeds', 0, 7], r'for each seed of \[0, 7\]; in all it has \[0, 1\]'),
        (['--cfg-options', 'train_dataloader.batch_size=50'], 'seed 0: ValueError: 2 epochs of 1 batches are too few'),
        (['--cfg-options', 'train_dataloader.batch_size=0'], 'seed 0: ZeroDivisionError'),
        (['--cfg-options', 'train_dataloader.batch_size=all'], '^first, 20 images, epochs: 2, seed 0: TypeError'),
        (['--test-images', 0], 'the images cannot be used: ValueError: num_images=0 of BalancedSubset must be'),
        (
            ['--cfg-options', 'train_dataloader.dataset.dataset.pipeline.0.scale=28'],
            r'the images cannot be used: ValueError: they have the shape \(3, 28, 28\), but the networks are for',
        ),
    ],
)
def test_errors(call, options, message):
    begun, _, status = call(*options)
    assert not begun and re.search(message, status)


@pytest.mark.parametrize(
    'options, message',
    [
        (['--jobs', -1], '--jobs -1 and --threads 1 must be at least 1'),
        (['--data-root', 'images'], '--data-root images is for images in a folder'),
        (['--cfg-options', 'train_cfg.max_epochs=4'], 'train_cfg.max_epochs=… would make the training another one'),
        (['--cfg-options', 'randomness=None'], 'randomness=… would make the training another one'),
        (['--cfg-options', 'train_dataloader.dataset.seed=5'], 'train_dataloader.dataset.seed=…'),
        (['--cfg-options', 'train_dataloader=3'], 'train_dataloader=…'),
        (['--cfg-options', 'load_from=weights.pth'], 'load_from=…'),
    ],
)
def test_options_that_are_refused(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['reproduce.py', 'C20-1', '--data', 'digits', *map(str, options)])
    with pytest.raises(SystemExit):
        reproduce.main()
    assert message in capsys.readouterr().err


def test_a_folder_of_other_settings(call, tmp_path):
    """What is there already is not taken for what is asked for, done or begun; the settings that differ are named."""
    options, other = ['--images', 20, '--seeds', 0], ['--cfg-options', 'optim_wrapper.optimizer.lr=0.5']
    call(*options)
    folder, text = tmp_path / 'runs/first_20_2_0', page_of(tmp_path)[0]
    lines = (
        r'first_20_2_0 has a training with other settings \(optim_wrapper.optimizer.lr: 0.002 there, 0.5 here\): '
        'give another folder by --out, or remove this one and first_20_2_0.json beside it'
    )
    for further in ([], ['--list'], ['--models', 'goes on', '--images', 40]):  # its result would be on the page
        begun, _, status = call(*options, *further, *other)
        assert not begun and re.search(lines, status)
    (folder / 'result.json').unlink()
    assert re.search(lines, call(*options, *other)[2])
    assert call(*options)[::2] == (['first_20_2_0 again'], 0) and page_of(tmp_path)[0] == text
    (tmp_path / 'runs/first_20_2_0.json').unlink()
    assert "No such file or directory: '" in call(*options)[2]
    shutil.rmtree(folder)
    assert call(*options, *other)[::2] == (['first_20_2_0'], 0)


def test_a_mistake_that_trained_nothing(call):
    """Settings of a call that ended before its first checkpoint are no training."""
    call.failing = ('first_20_2_0',)
    options = ['--images', 20, '--seeds', 0]
    assert '1 trainings failed' in call(*options, '--cfg-options', 'optim_wrapper.optimizer.lr=0.5')[2]
    call.failing = ()
    assert call(*options)[::2] == (['first_20_2_0'], 0)


def test_the_page_of_a_stop(call, tmp_path):
    """It has what was done before."""

    def train(folder, resumed):
        if '40' in folder.name:
            raise KeyboardInterrupt

    call.train = train
    assert call('--seeds', 0, '--jobs', 1)[2] == 128 + signal.SIGINT
    assert 'Missing, 4 of 5' in page_of(tmp_path)[0]
    assert [result['images'] for result in json.loads((tmp_path / 'small.json').read_text())] == [20]


def test_data_that_cannot_be_downloaded(call, tmp_path, monkeypatch):
    def fail(url, *args, **kwargs):
        raise URLError('Name or service not known')

    monkeypatch.setattr(mmpretrain.datasets.utils, 'download_url_to_file', fail)
    begun, _, status = call('--data', 'cifar10', '--data-root', tmp_path / 'data')
    assert not begun and f'CIFAR10 is not in {tmp_path}/data/ and cannot be downloaded (URLError' in status
    assert status.endswith(', or name another folder: --data-root FOLDER')


def test_an_image_that_is_broken(call, images):
    for path in images.glob('t*/*/*'):
        path.write_bytes(b'none')
    begun, _, status = call('--test-images', 10, '--data', 'folder', '--data-root', images)
    assert not begun and status.startswith('the images cannot be used: ')


def test_files_that_are_cut_off(call, tmp_path):
    """They are named."""
    options = ['--images', 20, '--seeds', 0]
    call(*options)
    for name in ('first_20_2_0/result.json', 'first_20_2_0.json'):
        path = tmp_path / 'runs' / name
        text = path.read_text()
        path.write_text(text[:100])
        assert re.search(rf'runs/{name} is broken \(.*\): remove it', call(*options)[2])
        path.write_text(text)


def test_epochs_that_are_done(tmp_path):
    """Whatever is in mmengine's ``last_checkpoint``."""
    training = Run(tmp_path, 'a', 10, 12, 0, None, Config)
    assert training.epochs_done == 0
    for name in ('epoch_9.pth', 'epoch_10.pth', 'epoch_11.pth.part', 'best_12.pth'):
        (tmp_path / name).touch()
    assert training.epochs_done == 10


def test_a_folder_in_use(call, tmp_path):
    """Also by a training that was left, which has the lock as its own."""
    with (tmp_path / 'lock').open('w') as lock:
        reproduce.fcntl.flock(lock, reproduce.fcntl.LOCK_EX)
        begun, _, status = call()
        assert not begun and 'is in use by another call, or by a training that one has left' in status
    assert call('--images', 20, '--seeds', 0)[2] == 0


@pytest.mark.parametrize('name', list(TABLES))
def test_styles_of_curves(name, monkeypatch):
    """A row has one style in all panels, where others are missing too; the legend has all rows that are shown."""
    figures = []
    monkeypatch.setattr(Figure, 'savefig', lambda figure, *args, **options: figures.append(figure))
    table = dataclasses.replace(TABLES[name], epochs={20: 2, 40: 2})
    labels = list(table.rows)
    results = [
        dict(label=label, images=images, curves={metric: [[1, i], [2, i]] for metric in table.curves})
        for images in table.epochs
        for i, label in enumerate(labels)
        if not (images == 20 and i == 0)
    ]
    draw('figure', table, results)
    (figure,) = figures
    styles = {}

    def style(line):
        return line.get_color(), line.get_linestyle()

    for axis in figure.axes:
        for line in axis.lines:
            styles.setdefault(labels[int(line.get_ydata()[0])], set()).add(style(line))
    assert all(len(of_row) == 1 for of_row in styles.values())
    assert len(set.union(*styles.values())) == len(labels)
    (legend,) = figure.legends
    handles = {text.get_text(): style(line) for text, line in zip(legend.get_texts(), legend.get_lines())}
    assert list(handles) == labels and handles == {label: of_row for label, (of_row,) in styles.items()}


def test_where_curves_begin(monkeypatch):
    """At the end of the training that a row begins with, there or not, or at the share of the epochs that it names."""
    rows = {'first': Row('vit'), 'goes on': Row('vit', start='first'), 'at random': Row('vit', begins=0.5)}
    table = Table('A table', '', {100: 2}, rows)
    curve = {'accuracy/top1': [[1, 10.0], [2, 20.0]]}
    figures = []
    monkeypatch.setattr(Figure, 'savefig', lambda figure, *args, **kwargs: figures.append(figure))
    for labels in (list(rows), list(rows)[1:]):
        draw('figure', table, [dict(label=label, images=100, curves=curve) for label in labels])
    all_of_them, others = (
        {line.get_label(): list(line.get_xdata()) for line in figure.axes[0].lines} for figure in figures
    )
    assert all_of_them == {'first': [1, 2], **others} and others == {'goes on': [3, 4], 'at random': [2, 3]}


def test_costs_and_times_of_a_page(tmp_path):
    """Pruned networks differ by the seed; the time is that of the table's largest size alone."""
    recipe = dict(val_dataloader=dict(dataset={}), optim_wrapper={})
    where = dict(machine=dict(gpu='a GPU', threads=2), versions=dict(torch='2'), config=recipe)
    runs = [
        SimpleNamespace(label=label, images=images, epochs=2, seed=seed, result=result)
        for label, images, seed, result in [
            ('pruned', 20, 0, dict(parameters=1000, multiply_adds=7, top1=30.0, seconds=6.0)),
            ('pruned', 40, 0, dict(parameters=1200, multiply_adds=7, top1=40.0, seconds=60.0)),
            ('pruned', 40, 1, dict(parameters=1400, multiply_adds=7, top1=50.0, seconds=120.0)),
            ('small alone', 20, 0, dict(parameters=5, multiply_adds=7, top1=10.0, seconds=6.0)),
            ('none yet', 40, 0, None),
        ]
    ]
    for training in runs[:-1]:
        curves = {'accuracy/top1': [[2, 10.0]]}
        training.result.update(where, label=training.label, images=training.images, curves=curves)
    table = Table('A table', '', {20: 2, 40: 2}, {label: Row('vit') for label in ('pruned', 'small alone', 'none yet')})
    write_page(tmp_path, 'small', table, runs, 'digits')
    text, rows = page_of(tmp_path)
    assert 'a GPU, 2 threads a training, PyTorch 2. Validated with all test images.' in text
    assert rows['pruned'] == ['1,200 (1,000 to 1,400)', '7', '30.0', '45.0 (40.0 to 50.0)', '1.5 (1.0 to 2.0)', '2']
    assert rows['small alone'] == ['5', '7', '10.0', '', '', '1']
    assert rows['none yet'] == ['missing', 'missing', '', 'missing', 'missing', '1']


@pytest.mark.slow
def test_killed_twice(tmp_path):
    """The tool and its training, killed in the middle of epochs: the results are those of a run that was not."""
    variables = environment(tmp_path)

    def command(name):
        words = [sys.executable, TOOL, 'ViT-starts', '--smoke', '--out', tmp_path / name, '--models', 'ViT']
        options = ['--cfg-options', 'train_cfg.val_interval=1', 'default_hooks.logger.interval=1']
        return dict(args=[str(word) for word in words + options], env=variables, cwd=tmp_path)

    subprocess.run(**command('whole'), check=True)
    folder = tmp_path / 'stopped/runs/ViT_200_2_0'
    for epoch in (1, 2):
        process = subprocess.Popen(**command('stopped'), start_new_session=True)
        while not any(f'Epoch(train) [{epoch}][2/4]' in log.read_text() for log in folder.glob('*/*.log')):
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    subprocess.run(**command('stopped'), check=True)
    whole, again = (json.loads((tmp_path / name / 'ViT-starts.json').read_text()) for name in ('whole', 'stopped'))
    assert len(whole) == 1 and len(list(folder.glob('*/vis_data'))) == 3
    assert whole[0]['curves'] == again[0]['curves'] and len(whole[0]['curves']['accuracy/top1']) == 2
    one, other = (weights_of(tmp_path / of / 'runs/ViT_200_2_0/epoch_2.pth') for of in ('whole', 'stopped'))
    assert one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.slow
@pytest.mark.parametrize('name', ['C20-E', 'L21-1', 'T-CNN'])
def test_smoke(name, tmp_path):
    """The whole of a table on the digits."""
    run('python', TOOL, name, '--smoke', '--out', tmp_path, folder=tmp_path, WARM_CHILDREN='1')
    text = (tmp_path / f'{name}.md').read_text()
    assert 'issing' not in text and all(f'| {label} | ' in text for label in TABLES[name].rows)
