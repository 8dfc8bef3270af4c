"""tools/reproduce.py: the trainings of a table, stopped and going on, and its page."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

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
sys.path.insert(0, str(TOOL.parent))
import reproduce  # noqa: E402
from reproduction import estimate  # noqa: E402
from reproduction import runs as runs_module  # noqa: E402
from reproduction.configs import network_config, set_data, set_epochs, set_images  # noqa: E402
from reproduction.page import draw, write_page  # noqa: E402
from reproduction.results import RESULT, build, machine, step_seconds, validation_seconds  # noqa: E402
from reproduction.tables import TABLES, Row, Table  # noqa: E402

# Two rows, the second one from the weights of the first, and networks that train in a second.
SMALL = {
    'train_dataloader.batch_size': 5,
    'model.backbone.arch': dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=16),
    'model.head.in_channels': 16,
}
TABLE = Table(
    'A table',
    'Whether it is written.',
    {20: 2, 40: 3},
    (
        Row('first', 'sa_quadratic', seeds=(0, 1), options=SMALL),
        Row('goes on', 'sa_quadratic', seeds=(0,), share=0.5, start='first', images=(40,), options=SMALL),
    ),
    ('accuracy/top1', 'cross_entropy/mean'),
)


@pytest.mark.parametrize('name', list(TABLES))
def test_tables(name):
    """Rows begin with rows before them, of the same seeds; rows of several tables are the same but for the seeds."""
    seen = {}
    for row in TABLES[name].rows:
        assert row.label not in seen
        if row.start:
            assert set(row.seeds) <= set(seen[row.start].seeds)
        seen[row.label] = row
        namesakes = [other for table in TABLES.values() for other in table.rows if other.label == row.label]
        assert all(dataclasses.replace(other, seeds=row.seeds) == row for other in namesakes)


@pytest.mark.parametrize('name', list(TABLES))
def test_networks(name):
    """All that the rows of a table train can be built, and begins."""
    for row in TABLES[name].rows:
        config = network_config(row.config, row.options)
        set_data(config, 'digits', None)
        set_images(config, 20, seed=1)
        model = build(config)
        model.init_weights()
        assert model.extract_feat(torch.randn(2, 3, 32, 32))[0].isfinite().all(), row.label


def test_equal_schedules():
    """Rows that are compared begin their second phases in the same way."""
    rows = {row.label: row for name in ('L21-1', 'T-CNN') for row in TABLES[name].rows}

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
    schedulers = config if isinstance(config, list) else [config]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    built = [
        PARAM_SCHEDULERS.build(dict(cfg), default_args=dict(optimizer=optimizer, epoch_length=per_epoch))
        for cfg in schedulers
    ]
    found = []
    for _ in range(round(max(cfg['end'] for cfg in schedulers) * per_epoch)):
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
    with pytest.raises(ValueError, match='must have a folder for each class in train, and the same in test'):
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


@pytest.fixture
def tool(monkeypatch, tmp_path, capsys):
    """Runs the tool in this process, its trainings too; gives what it prints and its exit status."""
    monkeypatch.setitem(TABLES, 'small', TABLE)
    trained = []

    def training(run, threads, lock):
        trained.append(run)
        config = Config.fromfile(run.config_file)
        config.work_dir, config.resume = str(run.folder), run.epochs_done > 0
        if config.resume:  # as mmpretrain's tool does
            config.load_from = None
        config.log_level, config.experiment_name = 'ERROR', f'{run.folder}-{len(trained)}'
        Runner.from_cfg(config).train()
        return SimpleNamespace(poll=lambda: 0, terminate=lambda: None, wait=lambda: None)

    monkeypatch.setattr(runs_module, 'start_training', training)

    def run_tool(*options):
        del trained[:]
        command = ['reproduce.py', 'small', '--data', 'digits', '--test-images', '20', '--out', tmp_path, *options]
        monkeypatch.setattr(sys, 'argv', list(map(str, command)))
        status = 0
        handler = signal.getsignal(signal.SIGTERM)
        try:
            reproduce.main()
        except SystemExit as error:
            status = error.code
        finally:
            signal.signal(signal.SIGTERM, handler)
        return list(trained), capsys.readouterr().out, status

    return run_tool


def page_of(folder):
    text = (folder / 'small.md').read_text()
    rows = [line.strip('| ').split(' | ') for line in text.splitlines() if line.startswith('| ')]
    return text, {row[0]: row[1:] for row in rows[2:]}


def test_a_table(tool, tmp_path, monkeypatch):
    """Trained, shown, left alone; results as data, and the page."""
    trained, output, status = tool('--list')
    assert not trained and '0 of 5 trainings are done; the others take about 1 min' in output
    assert not list(tmp_path.iterdir())

    trained, output, status = tool('--seeds', 0, '--jobs', 1)
    assert [(run.label, run.images, run.epochs) for run in trained] == [
        ('first', 20, 2),
        ('first', 40, 3),
        ('goes on', 40, 2),
    ]
    assert status == 0 and '3 of 3 trainings are done\n' in output
    results = json.loads((tmp_path / 'small.json').read_text())
    first, start, goes_on = results
    assert (first['seed'], first['images'], first['epochs'], first['start']) == (0, 20, 2, None)
    assert goes_on['start'] == 'first_40_3_0' and trained[2].start is trained[1]
    weights = [torch.load(run.last_checkpoint, weights_only=True)['state_dict'] for run in trained]
    assert first['parameters'] == sum(value.numel() for value in weights[0].values())
    assert list(first) == list(RESULT)
    assert first['seconds'] > 0 and first['multiply_adds'] > 0
    assert first['versions']['torch'] == torch.__version__ and first['machine']['threads'] == 1
    assert first['config']['randomness']['seed'] == 0 and goes_on['config']['randomness']['seed'] == 1000
    assert goes_on['config']['train_dataloader']['dataset']['seed'] == 0
    assert first['config']['train_dataloader']['batch_size'] == 5
    curve = start['curves']['accuracy/top1']
    assert [step for step, _ in curve] == [3] and curve[-1][1] == start['top1'] == 100 * round(start['top1']) / 100

    assert tool('--seeds', 0, '--data-name', 'a few digits')[0] == []
    assert 'Trained on a few digits: 20 images up to 2 epochs' in page_of(tmp_path)[0]
    assert tool('--seeds', 0)[0] == []
    text, rows = page_of(tmp_path)
    assert (
        tool('--seeds', 0, '--models', 'first', '--images', 20)[0] == [] and page_of(tmp_path)[0] == text
    )  # all of it
    trained, output, status = tool('--list')
    assert '3 of 5 trainings are done' in output and 'first, 20 images, epochs: 2, seed 1: not begun' in output
    assert rows['first'][-1] == '2' and rows['first'][2] == f'{first["top1"]:.1f}, 1 of 2 seeds'
    assert '| minutes with 40 images | seeds |' in text
    assert rows['goes on'][2:4] == ['', f'{goes_on["top1"]:.1f}']
    assert f'Validated with {goes_on["config"]["val_dataloader"]["dataset"]["num_images"]} test images.' in text
    assert 'Missing, 2 of 5 trainings:' in text and '- first, 40 images, epochs: 3, seed 1' in text
    assert (tmp_path / 'small.svg').exists()

    tool()
    text, rows = page_of(tmp_path)
    assert rows['first'][-1] == '2' and ' to ' in rows['first'][2] and 'issing' not in text


def test_what_a_training_begins_with(tool, tmp_path):
    """``--models`` trains the rows that are named, and those that they begin with, whose weights they load."""
    trained, _, _ = tool('--models', 'goes on', '--images', 40, '--cfg-options', 'optim_wrapper.optimizer.lr=0.0')
    assert [run.label for run in trained] == ['first', 'goes on']
    first, goes_on = (torch.load(run.last_checkpoint, weights_only=True)['state_dict'] for run in trained)
    assert all(torch.equal(goes_on[key], value) for key, value in first.items())


def test_a_training_that_fails(tool, tmp_path, monkeypatch):
    """The others train; what begins with it does not; the status says so, and the page."""
    good = runs_module.start_training

    def training(run, threads, lock):
        if run.images == 40:
            return SimpleNamespace(poll=lambda: 1)
        return good(run, threads, lock)

    monkeypatch.setattr(runs_module, 'start_training', training)
    trained, output, status = tool('--seeds', 0)
    assert [run.images for run in trained] == [20] and 'first, 40 images, epochs: 3, seed 0: failed, see' in output
    assert '2 trainings failed or could not begin: first, 40 images' in status and 'goes on, 40' in status
    assert 'Missing, 4 of 5' in page_of(tmp_path)[0]


@pytest.mark.parametrize(
    'options, message',
    [
        (['--models', 'third'], "'third' is no row of small, which has: 'first', 'goes on'"),
        (['--images', 30], r'--images \[30\] needs --epochs: small has epochs for \[20, 40\] images'),
        (['--models', 'goes on', '--images', 20], r"no training has --models \['goes on'\], --images \[20\]"),
        (
            ['--images', 2, '--epochs', 1, '--models', 'first'],
            'first, 2 images, epochs: 1, seed 0: 1 epochs of 1 batch',
        ),
        (['--images', 1400, '--epochs', 1], 'num_images=1400 of BalancedSubset must be at most'),
        (
            ['--cfg-options', 'train_cfg.max_epochs=4'],
            'first, 20 images, epochs: 2, seed 0: --cfg-options makes train_cfg.max_epochs 4, .* has 2: give --epochs',
        ),
        (['--cfg-options', 'randomness.seed=5'], 'makes randomness.seed 5, but the training has 0: give --seeds'),
        (['--cfg-options', 'train_dataloader.dataset.seed=5'], 'makes train_dataloader.dataset.seed 5'),
        (['--cfg-options', 'train_dataloader.dataset.num_images=5'], 'has 20: give --images'),
        (['--cfg-options', 'load_from=weights.pth'], "makes load_from 'weights.pth', but the training has None"),
        (['--cfg-options', 'randomness=None'], 'makes randomness.seed None'),
        (['--cfg-options', 'randomness=3'], 'makes randomness.seed None'),
        (['--cfg-options', 'train_dataloader=3'], '^first, 20 images, epochs: 2, seed 0: '),
        (
            ['--cfg-options', 'train_dataloader.batch_size=0'],
            'batch_size=0 must be a positive integer',
        ),
        (['--cfg-options', 'train_dataloader.batch_size=all'], "batch_size='all' must be a positive integer"),
        (['--cfg-options', 'train_cfg.val_interval=0'], 'train_cfg.val_interval=0 must be a positive integer'),
        (['--cfg-options', 'val_dataloader=None'], 'val_dataloader=None: a table has the accuracy of a validation'),
        (['--cfg-options', 'optim_wrapper.type=None'], '^TypeError: type must be a str or valid type'),
    ],
)
def test_errors(tool, options, message):
    assert re.search(message, tool(*options)[2])


@pytest.mark.parametrize(
    'options, message',
    [
        (['--epochs', 0], "argument --epochs: '0' must be a positive integer"),
        (['--jobs', -1], "argument --jobs: '-1' must be a positive integer"),
        (['--images', 20, '1e3'], "argument --images: '1e3' must be a positive integer"),
        (['--smoke', '--data', 'folder'], '--smoke is for the digits, not for --data folder'),
        (['--data-root', 'images'], '--data-root images is for images in a folder'),
        (['--seeds', -1], "argument --seeds: '-1' must be an integer from 0 to"),
        (['--seeds', 2**32], "argument --seeds: '4294967296' must be an integer from 0 to 4294966295"),
    ],
)
def test_options_that_are_refused(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['reproduce.py', 'C20-1', '--data', 'digits', *map(str, options)])
    with pytest.raises(SystemExit):
        reproduce.main()
    assert message in capsys.readouterr().err


def test_a_folder_of_other_settings(tool, tmp_path):
    """What is there already is not taken for what is asked for."""
    options = ['--images', 20, '--seeds', 0]
    tool(*options)
    lines = (
        r'first_20_2_0 has a training with other settings \(optim_wrapper.optimizer.lr: 0.002 there, 0.5 here\): '
        'give another'
    )
    for further in ([], ['--list']):
        trained, _, status = tool(*options, *further, '--cfg-options', 'optim_wrapper.optimizer.lr=0.5')
        assert not trained and re.search(lines, status)
    assert tool(*options)[2] == 0
    (tmp_path / 'runs/first_20_2_0.json').unlink()  # the result has the settings too
    assert re.search(lines, tool(*options, '--cfg-options', 'optim_wrapper.optimizer.lr=0.5')[2])
    trained, _, status = tool(*options)
    assert not trained and status == 0
    (tmp_path / 'runs/first_20_2_0/result.json').unlink()
    assert re.search(
        r'first_20_2_0 has a training whose settings are not known, for first_20_2_0.json beside', tool(*options)[2]
    )


def test_a_folder_that_was_moved(tool, tmp_path, monkeypatch):
    """And one that is named in another way: trainings that begin with others are the same, and go on."""
    options = ['--images', 40, '--seeds', 0, '--cfg-options', 'default_hooks.checkpoint.max_keep_ckpts=-1']
    trained = tool(*options)[0]
    assert len(trained) == 2
    moved = tmp_path / 'moved'
    moved.mkdir()
    shutil.move(tmp_path / 'runs', moved / 'runs')
    trained, _, status = tool(*options, '--out', moved)
    assert not trained and status == 0
    folder = moved / 'runs/goes_on_40_2_0'
    weights = torch.load(folder / 'epoch_2.pth', weights_only=True)['state_dict']
    (folder / 'result.json').unlink()
    (folder / 'epoch_2.pth').unlink()  # as if stopped after the first epoch
    place = tmp_path / 'runs/goes_on_40_2_0'  # where it was; another training is there now
    place.mkdir(parents=True)
    shutil.copy(moved / 'runs/first_40_3_0/epoch_1.pth', place)
    (folder / 'last_checkpoint').write_text(str(place / 'epoch_1.pth'))
    monkeypatch.chdir(tmp_path)
    trained, _, status = tool(*options, '--out', 'moved')
    assert [run.label for run in trained] == ['goes on'] and status == 0
    again = torch.load(folder / 'epoch_2.pth', weights_only=True)['state_dict']
    assert all(torch.equal(value, weights[name]) for name, value in again.items())
    assert len(list(folder.glob('*/vis_data'))) == 2
    config = json.loads((moved / 'runs/goes_on_40_2_0.json').read_text())
    assert config['load_from'] == str(Path('moved/runs/first_40_3_0/epoch_3.pth'))


def test_the_page_of_a_stop(tool, tmp_path, monkeypatch):
    """It has what was done before."""
    good = runs_module.start_training

    def training(run, threads, lock):
        if run.images == 40:
            raise KeyboardInterrupt
        return good(run, threads, lock)

    monkeypatch.setattr(runs_module, 'start_training', training)
    assert tool('--seeds', 0, '--jobs', 1)[2] == 128 + signal.SIGINT
    assert 'Missing, 4 of 5' in page_of(tmp_path)[0]
    assert [result['images'] for result in json.loads((tmp_path / 'small.json').read_text())] == [20]


def test_images_of_another_size(tool, tmp_path):
    trained, _, status = tool('--cfg-options', 'train_dataloader.dataset.dataset.pipeline.0.scale=28')
    assert not trained and 'the first image of BalancedSubset has the shape (3, 28, 28), but the networks' in status


def test_data_that_cannot_be_downloaded(tool, tmp_path, monkeypatch):
    def fail(url, *args, **kwargs):
        raise URLError('Name or service not known')

    monkeypatch.setattr(mmpretrain.datasets.utils, 'download_url_to_file', fail)
    trained, _, status = tool('--data', 'cifar10', '--data-root', tmp_path / 'data')
    assert not trained and status.startswith(f'CIFAR10 is not in {tmp_path}/data/ and cannot be downloaded (URLError')
    assert status.endswith(', or name another folder: --data-root FOLDER')


def test_files_that_are_cut_off(tool, tmp_path):
    """They are named."""
    options = ['--images', 20, '--seeds', 0]
    tool(*options)
    for name in ('first_20_2_0/result.json', 'first_20_2_0.json'):
        path = tmp_path / 'runs' / name
        text = path.read_text()
        path.write_text(text[:100])
        assert re.search(rf'runs/{name} is broken \(.*\): remove it', tool(*options)[2])
        path.write_text(text)
    (tmp_path / 'runs/first_20_2_0/last_checkpoint').write_text('')
    assert tool(*options, '--list')[2] == 0


def test_epochs_that_are_done(tmp_path):
    """Whatever is in mmengine's ``last_checkpoint``."""
    training = runs_module.Run(tmp_path, 'a', 10, 12, 0, Config)
    assert training.epochs_done == 0
    for name in ('epoch_9.pth', 'epoch_10.pth', 'epoch_11.pth.part', 'best_12.pth'):
        (tmp_path / name).touch()
    assert training.epochs_done == 10


def test_a_folder_of_other_epochs(tool):
    options = ['--images', 20, '--seeds', 0]
    tool(*options)
    trained, _, status = tool(*options, '--epochs', 3)
    assert not trained and "a training of 'first' with 20 images and 2 epochs, not 3" in status


def test_a_mistake_that_trained_nothing(tool, tmp_path, monkeypatch):
    """Settings of a call that ended before its first checkpoint are no training."""
    good = runs_module.start_training
    with monkeypatch.context() as patch:
        patch.setattr(runs_module, 'start_training', lambda *args: SimpleNamespace(poll=lambda: 1))
        status = tool('--images', 20, '--cfg-options', 'optim_wrapper.optimizer.lr=0.5')[2]
    assert '2 trainings failed' in status and runs_module.start_training is good
    trained, _, status = tool('--images', 20)
    assert len(trained) == 2 and status == 0


def test_a_part_of_a_table(tool, tmp_path):
    """The page of a call for a part has all that is there, of seeds that the table does not have too."""
    tool('--images', 20, '--seeds', 0, 7)
    tool('--images', 40, '--seeds', 0, '--models', 'first')
    text, rows = page_of(tmp_path)
    assert re.fullmatch(r'.* \(.* to .*\), 2 of 3 seeds', rows['first'][2])
    assert re.fullmatch(r'[\d.]+, 1 of 3 seeds', rows['first'][3]) and rows['first'][-1] == '3'
    results = json.loads((tmp_path / 'small.json').read_text())
    assert sorted((result['images'], result['seed']) for result in results) == [(20, 0), (20, 7), (40, 0)]


@pytest.mark.parametrize('name', list(TABLES))
def test_styles_of_curves(name, tmp_path, monkeypatch):
    """A row has one style in all panels, where others are missing too; the legend has all rows that are shown."""
    figures = []
    monkeypatch.setattr(Figure, 'savefig', lambda figure, *args, **options: figures.append(figure))
    table = dataclasses.replace(TABLES[name], epochs={20: 2, 40: 2})
    results = [
        dict(label=row.label, images=images, curves={metric: [[1, i], [2, i]] for metric in table.curves})
        for images in table.epochs
        for i, row in enumerate(table.rows)
        if not (images == 20 and i == 0)
    ]
    draw(tmp_path / 'figure.svg', table, results)
    (figure,) = figures
    styles = {}

    def style(line):
        return line.get_color(), line.get_linestyle()

    for axis in figure.axes:
        for line in axis.lines:
            styles.setdefault(table.rows[int(line.get_ydata()[0])].label, set()).add(style(line))
    assert all(len(of_row) == 1 for of_row in styles.values())
    assert len(set.union(*styles.values())) == len(table.rows)
    (legend,) = figure.legends
    handles = {text.get_text(): style(line) for text, line in zip(legend.get_texts(), legend.get_lines())}
    assert handles == {label: of_row for label, (of_row,) in styles.items()}


def test_no_deit_recipe():
    """These rows differ from those with the recipe in what the ViT of the table does without, and in nothing else."""
    rows = {row.label: row for row in TABLES['L21-1'].rows}
    vit = network_config('vit', {})
    plain = [row for row in rows.values() if row.label.endswith(', no DeiT recipe')]
    assert len(plain) == 3
    for row in plain:
        config, with_recipe = (network_config(r.config, r.options) for r in (row, rows[row.label.split(',')[0]]))
        assert config.train_dataloader == vit.train_dataloader
        assert config.model.head.loss.type == vit.model.head.loss.type and not config.model.train_cfg
        assert config.model.backbone.pop('drop_path_rate') == 0 < with_recipe.model.backbone.pop('drop_path_rate')
        for part in (config, with_recipe):
            part.train_dataloader.dataset.pop('pipeline')
            part.model.head.pop('loss')
            part.model.pop('train_cfg')
        assert config.to_dict() == with_recipe.to_dict()


def test_what_another_training_began_with_is_gone(tool, tmp_path):
    """It is missing on the page; what began with it stays there."""
    tool('--images', 40, '--seeds', 7)
    shutil.rmtree(tmp_path / 'runs/first_40_3_7')
    _, output, status = tool('--list')
    assert 'goes on, 40 images, epochs: 2, seed 7: done' in output and status == 0
    assert 'first, 40 images, epochs: 3, seed 7: not begun' in output


def test_results_of_another_machine(tool, tmp_path):
    """They are taken over, with other paths of the images; what begins with their weights is refused without these."""
    tool('--seeds', 0, '--cfg-options', 'train_dataloader.dataset.dataset.data_root=elsewhere')
    shutil.move(tmp_path / 'small.json', tmp_path / 'theirs.json')
    theirs = json.loads((tmp_path / 'theirs.json').read_text())
    shutil.rmtree(tmp_path / 'runs')
    trained, output, status = tool('--seeds', 0, 1, '--models', 'first', '--results', tmp_path / 'theirs.json')
    assert [(run.label, run.images, run.seed) for run in trained] == [('first', 20, 1), ('first', 40, 1)]
    ours = json.loads((tmp_path / 'small.json').read_text())
    assert [result for result in ours if result['seed'] == 0] == theirs and len(ours) == 5 and status == 0
    cells = page_of(tmp_path)[1]['goes on']
    assert cells[3].endswith(', 1 of 2 seeds') and cells[-1] == '2'
    assert tool('--seeds', 0)[0] == []  # without the file too

    shutil.rmtree(tmp_path / 'runs/goes_on_40_2_0')
    trained, _, status = tool('--seeds', 0)
    assert not trained and re.search(r'goes on.* begins with .*first_40_3_0/epoch_3.pth, which is not there', status)
    assert "first_40_3_0/result.json, and 'first' is trained again" in status


@pytest.mark.parametrize(
    'change, message',
    [
        (
            dict(seed=3),
            r'seed 3 with other settings \(train_dataloader.dataset.seed: 0 there, 3 here; ',
        ),  # its config is that of another seed
        (dict(label='third'), "--results has a training of 'third' with 20 images, 2 epochs and seed 0, which is none"),
        (dict(images=30), 'with 30 images, 2 epochs and seed 0, which is none of this table with these options'),
        (dict(epochs=5), "a training of 'first' with 20 images and 5 epochs, not 2"),
        (dict(config={}), r'seed 0 with other settings \(.*: not set there, .* here; .*; \d+ more\)'),
    ],
)
def test_results_of_another_table(tool, tmp_path, change, message):
    tool('--seeds', 0, '--images', 20)
    results = json.loads((tmp_path / 'small.json').read_text())
    (tmp_path / 'theirs.json').write_text(json.dumps([{**results[0], **change}]))
    shutil.rmtree(tmp_path / 'runs')
    trained, _, status = tool('--list', '--results', tmp_path / 'theirs.json')
    assert not trained
    assert re.search(message, status)
    assert not list(tmp_path.glob('runs/*/result.json'))


@pytest.mark.parametrize(
    'text, message',
    [
        ('{', r'theirs.json is broken \(Expecting'),
        ('3', 'is no list of results'),
        ('{"label": 3}', 'is no list of results'),
        ('[{}]', "--results .*theirs.json has a result without 'label'"),
    ],
)
def test_no_results(tool, tmp_path, text, message):
    (tmp_path / 'theirs.json').write_text(text)
    assert re.search(message, tool('--list', '--results', tmp_path / 'theirs.json')[2])
    assert 'remove' not in tool('--list', '--results', tmp_path / 'theirs.json')[2]  # it is none of ours
    assert 'No such file' in tool('--list', '--results', tmp_path / 'none.json')[2]


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(config=None), "has a result whose 'config' is None"),
        (dict(top1='high'), "has a result whose 'top1' is high"),
        (dict(seed=True), "has a result whose 'seed' is True"),
        (dict(machine=dict(processor='a', gpu=None)), "has a result without machine: 'threads'"),
        (dict(versions={}), "has a result without versions: 'torch'"),
        (dict(curves={}), "has a result without curves: 'accuracy/top1'"),
        (
            dict(curves={'accuracy/top1': [], 'cross_entropy/mean': [[1, 2.0]]}),
            "curves: 'accuracy/top1' is no list of epochs and values",
        ),
    ],
)
def test_results_of_other_types(tool, tmp_path, change, message):
    curves = {'accuracy/top1': [[2, 10.0]], 'cross_entropy/mean': [[2, 2.0]]}
    result = dict(label='first', images=20, epochs=2, seed=0, start=None, top1=10.0, seconds=1.0, parameters=1)
    where = dict(versions=dict(torch='2'), machine=dict(processor='a', gpu=None, threads=1))
    whole = dict(result, multiply_adds=1, curves=curves, **where, config={})
    (tmp_path / 'theirs.json').write_text(json.dumps([{**whole, **change}]))
    assert message in tool('--list', '--results', tmp_path / 'theirs.json')[2]


def test_results_for_a_training_that_has_begun(tool, tmp_path):
    """With other settings: its config stays, and so does what it has trained."""
    options = ['--images', 20, '--seeds', 0]
    tool(*options)
    shutil.move(tmp_path / 'small.json', tmp_path / 'theirs.json')
    shutil.rmtree(tmp_path / 'runs')
    tool(*options, '--cfg-options', 'optim_wrapper.optimizer.lr=0.5')
    (tmp_path / 'runs/first_20_2_0/result.json').unlink()
    before = (tmp_path / 'runs/first_20_2_0.json').read_text()
    for _ in range(2):
        trained, _, status = tool(*options, '--results', tmp_path / 'theirs.json')
        assert not trained and 'has a training with other settings (optim_wrapper.optimizer.lr: 0.5 there' in status
    assert (tmp_path / 'runs/first_20_2_0.json').read_text() == before


def test_a_folder_of_images_in_two_words(tool, tmp_path, monkeypatch, images):
    """A relative path and the whole one are the same images; another folder has others."""
    monkeypatch.chdir(images.parent)
    shutil.copytree(images, tmp_path / 'others')
    options = ['--images', 10, '--epochs', 2, '--seeds', 0, '--data', 'folder', '--test-images', 10]
    options += ['--models', 'first', '--out', tmp_path / 'out']
    assert len(tool(*options, '--data-root', images.name)[0]) == 1
    assert tool(*options, '--data-root', images)[::2] == ([], 0)
    assert 'dataset.dataset.data_root: ' in tool(*options, '--data-root', tmp_path / 'others')[2]


def test_a_page_that_cannot_be_written(tool, tmp_path, monkeypatch):
    """The trainings go on; that it is not there is said at the end."""
    (tmp_path / 'small.md').mkdir()
    trained, output, status = tool('--seeds', 0, '--jobs', 1)
    assert len(trained) == 3 and output.count('the page was not written (') == 3
    assert 'small.md' in status and 'could not be written' in status
    assert len(json.loads((tmp_path / 'small.json').read_text())) == 3


def test_a_stop_before_the_first_training(tool, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, 'progress', stop)
    for options in ([], ['--list']):
        assert tool(*options)[2] == 128 + signal.SIGINT


def test_an_image_that_is_broken(tool, images):
    for path in images.glob('t*/*/*'):
        path.write_bytes(b'none')
    options = ['--images', 10, '--epochs', 2, '--test-images', 10, '--data', 'folder', '--data-root', images]
    trained, _, status = tool(*options)
    assert not trained and status.startswith('the first image of BalancedSubset cannot be loaded (')


def test_a_folder_that_is_a_file(tool, tmp_path):
    (tmp_path / 'file').touch()
    assert 'file' in tool('--out', tmp_path / 'file')[2]


def test_start_weights_that_are_needed_no_more(tool, tmp_path):
    """What has begun goes on without them."""
    options = ['--images', 40, '--seeds', 0, '--cfg-options', 'default_hooks.checkpoint.max_keep_ckpts=-1']
    tool(*options)
    (tmp_path / 'runs/first_40_3_0/epoch_3.pth').unlink()
    (tmp_path / 'runs/goes_on_40_2_0/result.json').unlink()
    (tmp_path / 'runs/goes_on_40_2_0/epoch_2.pth').unlink()
    trained, _, status = tool(*options)
    assert [run.label for run in trained] == ['goes on'] and status == 0


def test_a_training_without_a_result(tool, tmp_path, monkeypatch):
    """What ends well and says nothing does not stop the others."""
    good = runs_module.start_training

    def training(run, threads, lock):
        return SimpleNamespace(poll=lambda: 0) if run.seed == 1 else good(run, threads, lock)

    monkeypatch.setattr(runs_module, 'start_training', training)
    trained, output, status = tool('--images', 20)
    assert len(trained) == 1 and 'seed 1: has ended, but has no result (' in output
    assert '1 trainings failed or could not begin: first, 20 images, epochs: 2, seed 1' in status
    assert page_of(tmp_path)[1]['first'][2] != 'missing' and '20 images, epochs: 2, seed 1' in page_of(tmp_path)[0]


def test_what_is_left(monkeypatch):
    """By the trainings of the row that are done, the other seeds'; by a step, of batches of 50, where there is none."""
    measured = []
    monkeypatch.setattr(estimate, 'step_seconds', lambda config: measured.append(config) or 5.0)
    monkeypatch.setattr(estimate, 'validation_seconds', lambda config: 2.5)  # for 50 images
    monkeypatch.setattr(estimate, 'number_of_test_images', lambda config: 40)  # 2 seconds in all
    here = dict(machine(), threads=torch.get_num_threads())

    class State(runs_module.Run):
        def __init__(self, label, images, epochs, epochs_done=0, seconds=None, start=None, machine=here):
            config = partial(network_config, 'vit', {'train_cfg.val_interval': 3})
            super().__init__(Path(), label, images, epochs, 0, config, start)
            self.__dict__.update(done=epochs_done, of_result=seconds and dict(seconds=seconds, machine=machine))

        epochs_done = property(lambda self: self.done)
        result = property(lambda self: self.of_result)

    runs = [
        State('a', 100, 4, 4, 200.0),
        State('a', 100, 4, 4, 600.0),
        State('a', 100, 4, 4, 9e9, machine=dict(here, processor='another')),
        State('a', 100, 4, 1),  # 1 second an image; validations after epochs 3 and 4
        State('b', 1000, 2),  # 0.1; one validation
    ]
    assert estimate.seconds_left(runs, jobs=1) == pytest.approx(300 + 4 + 200 + 2)
    assert estimate.seconds_left(runs, jobs=2) == pytest.approx(304)  # one of them is no shorter with two processes
    assert estimate.progress(runs, jobs=2) == '3 of 5 trainings are done; the others take about 5 min'
    runs.append(State('a', 100, 1, start=runs[3]))
    assert estimate.seconds_left(runs, jobs=2) == pytest.approx(304 + 102)  # one after the other
    assert len(measured) == 1
    runs[4] = State('b', 1000, 2)  # of another seed
    assert estimate.seconds_left(runs, jobs=2) == pytest.approx(304 + 102) and len(measured) == 1
    assert [estimate.in_words(seconds) for seconds in (1, 3599, 3700)] == ['1 min', '1 h 0 min', '1 h 2 min']


def test_costs_and_times_of_a_page(tmp_path):
    """Pruned networks differ by the seed; the time is that of the table's largest size alone."""
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
    recipe = dict(val_dataloader=dict(dataset={}), optim_wrapper={})
    for training in runs:
        if training.result:
            where = dict(machine=dict(gpu='a GPU', threads=1), versions=dict(torch='2'), config=recipe)
            curves = {'accuracy/top1': [[2, 10.0]]}
            training.result.update(where, label=training.label, images=training.images, curves=curves)
    table = Table(
        'A table', '', {20: 2, 40: 2}, tuple(Row(label, 'vit') for label in ('pruned', 'small alone', 'none yet'))
    )
    write_page(tmp_path, 'small', table, runs, 'digits')
    figure = (tmp_path / 'small.svg').read_bytes()
    write_page(tmp_path, 'small', table, runs, 'digits')
    assert (tmp_path / 'small.svg').read_bytes() == figure  # nothing in it is drawn at random
    rows = page_of(tmp_path)[1]
    assert rows['pruned'] == ['1,200 (1,000 to 1,400)', '7', '30.0', '45.0 (40.0 to 50.0)', '1.5 (1.0 to 2.0)', '2']
    assert rows['small alone'] == ['5', '7', '10.0', '', '', '1']
    assert rows['none yet'] == ['missing', 'missing', '', 'missing', 'missing', '1']


def test_where_curves_begin(tmp_path, monkeypatch):
    """At the end of the training that a row begins with, there or not, or at the share of the epochs that it names."""
    rows = (Row('first', 'vit'), Row('goes on', 'vit', start='first'), Row('at random', 'vit', begins=0.5))
    table = Table('A table', '', {100: 2}, rows)
    curve = {'accuracy/top1': [[1, 10.0], [2, 20.0]]}
    figures = []
    monkeypatch.setattr(Figure, 'savefig', lambda figure, *args, **kwargs: figures.append(figure))
    path = tmp_path / 'figure.svg'
    assert draw(path, table, [dict(label=row.label, images=100, curves=curve) for row in rows])
    assert draw(path, table, [dict(label=row.label, images=100, curves=curve) for row in rows[1:]])
    all_of_them, others = (
        {line.get_label(): list(line.get_xdata()) for line in figure.axes[0].lines} for figure in figures
    )
    assert all_of_them == {'first': [1, 2], **others} and others == {'goes on': [3, 4], 'at random': [2, 3]}


@pytest.mark.parametrize('options', [{}, {'optim_wrapper.type': 'BFloat16OptimWrapper'}])
def test_the_time_of_a_step(options):
    config = network_config('cmhsa', options)
    assert step_seconds(config) > validation_seconds(config) > 0


def test_a_folder_in_use(tool, tmp_path):
    with runs_module.locked(tmp_path):
        assert 'is in use by another call, or by a training that one has left' in tool()[2]
    assert tool('--images', 20, '--seeds', 0)[2] == 0


def command(out, *options):
    words = [sys.executable, TOOL, 'ViT-starts', '--smoke', '--out', out, '--models', 'ViT', '--jobs', 1, *options]
    return [str(word) for word in words]


@pytest.mark.slow
def test_killed_twice(repository, tmp_path):
    """The tool and its training, killed in the middle of epochs: the results are those of a run that was not."""
    options = ['--epochs', 3, '--cfg-options', 'train_cfg.val_interval=1', 'default_hooks.logger.interval=1']
    variables = environment(tmp_path)
    subprocess.run(command(tmp_path / 'whole', *options), env=variables, check=True, cwd=tmp_path)
    stopped, kills = tmp_path / 'stopped', []
    folder = stopped / 'runs/ViT_200_3_0'
    for epoch in (1, 2):
        process = subprocess.Popen(command(stopped, *options), env=variables, start_new_session=True, cwd=tmp_path)
        while not any(f'Epoch(train) [{epoch + 1}][2/4]' in log.read_text() for log in folder.glob('*/*.log')):
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        kills.append(process.wait())
    subprocess.run(command(stopped, *options), env=variables, check=True, cwd=tmp_path)
    assert kills == [-signal.SIGKILL] * 2
    whole, again = (json.loads((tmp_path / name / 'ViT-starts.json').read_text()) for name in ('whole', 'stopped'))
    assert len(whole) == 1 and len(list(folder.glob('*/vis_data'))) == 3
    assert whole[0]['curves'] == again[0]['curves'] and len(whole[0]['curves']['accuracy/top1']) == 3
    one, other = (
        torch.load(tmp_path / of / 'runs/ViT_200_3_0/epoch_3.pth')['state_dict'] for of in ('whole', 'stopped')
    )
    assert one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.slow
@pytest.mark.parametrize('name', ['C20-E', 'L21-1', 'T-CNN'])
def test_smoke(name, tmp_path):
    """The whole of a table on the digits."""
    run('python', TOOL, name, '--smoke', '--out', tmp_path, folder=tmp_path, WARM_CHILDREN='1')
    text = (tmp_path / f'{name}.md').read_text()
    assert 'issing' not in text and all(f'| {row.label} | ' in text for row in TABLES[name].rows)
