"""tools/reproduce.py: the trainings of a table, stopped and resumed, and its page."""

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

import numpy as np
import pytest
import torch

mmpretrain, matplotlib = pytest.importorskip('mmpretrain'), pytest.importorskip('matplotlib')
import reproduce  # noqa: E402
from helpers.images import write_images  # noqa: E402
from helpers.processes import environment, run  # noqa: E402
from helpers.schedules import phases_of, rates, warm_up_and_cosine  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmengine.runner import Runner  # noqa: E402
from mmpretrain.registry import DATASETS  # noqa: E402
from reproduction import results as results_module  # noqa: E402
from reproduction.configs import build, network_config, set_data, set_epochs, set_images  # noqa: E402
from reproduction.page import write_page  # noqa: E402
from reproduction.results import Run, cost, write_json  # noqa: E402
from reproduction.tables import COSINE, PRUNED, TABLES, Row, Table  # noqa: E402

from attncnn_plugin.pruning import least_important, prunable_heads, prune_heads  # noqa: E402

TOOL = Path(__file__).parents[2] / 'tools/reproduce.py'
TABLES_OF_DOCS = TOOL.parents[1] / 'docs/tables'
CONFIGS = sorted(path.stem for path in TOOL.parents[1].glob('configs/small/*.py'))
# Two rows, the second one from the weights of the first, and networks that train in a second.
SMALL = {
    'train_dataloader.batch_size': 5,
    'model.backbone.arch': dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=16),
    'model.head.in_channels': 16,
}
TABLE = Table(
    title='A table',
    about='Whether it is written.',
    images=40,
    epochs=3,
    rows={
        'first': Row('sa_quadratic', SMALL, seeds=(0, 1)),
        'goes on': Row('sa_quadratic', SMALL, seeds=(0,), share=0.5, start='first'),
    },
)


@pytest.fixture
def images(tmp_path):
    """A folder of random images, one of each of ten classes, for training and for tests."""
    for split in ('train', 'test'):
        write_images(tmp_path / split, count=1)
    return tmp_path


def config_of(table, label):
    row = TABLES[table].rows[label]
    return network_config(row.config, row.options)


# Heads that are left; which ones go makes no difference to the costs.
LEFT = {'pruned': 32, 'pruned, biases corrected': 32, **{label: int(label.split()[0]) for label in PRUNED}}


@pytest.mark.parametrize('name', list(TABLES))
def test_tables(name):
    """All that the rows train can be built and begins, from rows before them; rows of several tables are the same.

    The committed tables have the parameters and multiply-adds of today's code.
    """
    seen = {}
    runs = json.loads((TABLES_OF_DOCS / f'{name}.json').read_text())
    for label, row in TABLES[name].rows.items():
        assert row.start is None or set(row.seeds) <= set(seen[row.start].seeds)
        seen[label] = row
        namesakes = [table.rows[label] for table in TABLES.values() if label in table.rows]
        assert all(dataclasses.replace(other, seeds=row.seeds) == row for other in namesakes)
        config = config_of(name, label)
        set_data(config, 'digits', None)
        set_images(config, 20, seed=1)
        model = build(config)
        model.init_weights()
        assert model.extract_feat(torch.randn(2, 3, 32, 32))[0].isfinite().all(), label
        if any(hook.type == 'PhaseTransitionHook' for hook in config.get('custom_hooks', [])):
            model.backbone.to_attention()
        if label in LEFT:
            layers = {name: torch.arange(layer.num_heads) for name, layer in prunable_heads(model).items()}
            prune_heads(model, least_important(layers, keep=LEFT[label]))
        found = {(run['parameters'], run['multiply_adds']) for run in runs if run['label'] == label}
        assert found == {cost(model)}, label


def test_every_config_is_in_a_table():
    used = {row.config for table in TABLES.values() for row in table.rows.values()}
    assert sorted(used) == CONFIGS


@pytest.mark.parametrize('name', list(TABLES))
def test_the_page_of_a_smoke_run_says_so(name, tmp_path):
    """Its title, and no answer that other trainings gave."""
    table = TABLES[name].smoke()
    runs = reproduce.runs_of(table, argparse.Namespace(out=tmp_path))
    assert {(run.label, run.images, run.seed) for run in runs} == {(label, 200, 0) for label in TABLES[name].rows}
    assert max(run.epochs for run in runs) <= 5
    write_page(tmp_path, name, table, runs, 'digits')
    text = (tmp_path / f'{name}.md').read_text()
    assert text.startswith(f'# Smoke run: {TABLES[name].title}\n') and 'accuracies say nothing' in text
    assert 'answer' not in text and 'CIFAR' not in text


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
    write_page(tmp_path, name, table, runs, '[CIFAR-10-J](../glossary.md#cifar-10-j)')
    figure = path.with_suffix('.svg')
    drawn_here = f'Matplotlib v{matplotlib.__version__},' in figure.read_text()  # other versions draw other bytes
    for committed in [path, path.with_suffix('.md'), *[figure] * drawn_here]:
        assert (tmp_path / committed.name).read_bytes() == committed.read_bytes()


def test_rows_that_are_compared():
    """They begin their second phases in the same way."""

    def second_phase(table, label):
        config = config_of(table, label)
        set_epochs(config, round(TABLES[table].rows[label].share * 30), 10000)
        optim_wrapper, schedulers, _ = phases_of(config)[-1]
        return optim_wrapper.optimizer.lr, [dict(scheduler) for scheduler in schedulers]

    for label in ('additive attention', 'gated attention'):
        assert second_phase('T-CNN', label) == second_phase('T-CNN', 'ResNet, trained on')


@pytest.mark.parametrize(
    'name, options, epochs, images, phases',
    [
        ('vit', {}, 100, 500, [(50, 1000)]),  # 10 iterations an epoch; iterations of warm-up, and all
        ('vit', {}, 1, 200, [(2, 4)]),
        ('sa_generalized_pruned', {}, 7, 20000, [(140, 2800)]),
        ('cmhsa_two_phases', {}, 100, 500, [(33, 600), (33, 400)]),
        ('cmhsa_two_phases', {}, 2, 200, [(2, 4), (2, 4)]),
        ('cmhsa_narrow', {'custom_hooks.0.param_scheduler': [dict(COSINE, begin=0)]}, 5, 500, [(2, 30), (0, 20)]),
    ],
)
def test_a_schedule_of_other_epochs(name, options, epochs, images, phases):
    config = network_config(name, options)
    set_epochs(config, epochs, images)
    assert config.train_cfg.max_epochs == epochs
    peaks = [optim_wrapper.optimizer.lr for optim_wrapper, *_ in phases_of(config)]
    expected = [warm_up_and_cosine(1e-3 * peak, peak, 0, *phase) for peak, phase in zip(peaks, phases)]
    assert len(peaks) == len(phases)
    assert np.allclose(rates(config, images // 50), np.concatenate(expected), atol=1e-8)
    with pytest.raises(
        ValueError, match='epochs=1 must be at least 2|2 epochs of 1 batches are too few for a warm-up of 2'
    ):
        set_epochs(network_config(name, options), *((1, 100) if len(phases) > 1 else (2, 50)))


def test_a_folder_of_images(images):
    """What the network does with CIFAR's images follows what loads those of the folder; the subset is balanced."""
    config = network_config('deit', {})
    set_data(config, 'folder', images, test_images=10)
    set_images(config, 10, seed=1)
    steps = [step.type for step in config.train_dataloader.dataset.dataset.pipeline]
    assert steps == ['LoadImageFromFile', 'RandomFlip', 'RandomCrop', 'RandAugment', 'RandomErasing', 'PackInputs']
    for loader in (config.train_dataloader, config.val_dataloader):
        dataset = DATASETS.build(loader.dataset)
        assert sorted(dataset.get_gt_labels()) == list(range(10)) and dataset[0]['inputs'].shape == (3, 32, 32)
    augment, erase = config.train_dataloader.dataset.dataset.pipeline[3:5]  # of images that are blue first
    assert config.data_preprocessor.to_rgb and augment.hparams.pad_val == [114, 123, 125]
    assert (erase.fill_color, erase.fill_std) == ([113.8575, 122.961, 125.307], [51.255, 50.847, 51.5865])
    (images / 'train/10').mkdir()
    with pytest.raises(ValueError, match=r'/train and .*/test must have a folder for each class: '):
        set_data(network_config('vit', {}), 'folder', images)
    shutil.rmtree(images / 'train')
    shutil.copytree(images / 'test', images / 'train')
    for label in range(3, 10):
        for split in ('train', 'test'):
            shutil.rmtree(images / split / str(label))
    config = network_config('vit', {})
    set_data(config, 'folder', images)
    assert config.model.head.num_classes == config.data_preprocessor.num_classes == 3
    assert config.val_evaluator[0].topk == config.test_evaluator[0].topk == (1,)


@pytest.mark.parametrize(
    'data, classes, pad_val', [('cifar10', 10, [125, 123, 114]), ('cifar100', 100, [129, 124, 112])]
)
def test_cifar(data, classes, pad_val):
    """What an augmentation leaves empty has the mean of the images, as the preprocessor has it."""
    config = network_config('deit', {})
    set_data(config, data, Path('elsewhere'))
    flip, crop, augment, erase, _ = config.train_dataloader.dataset.pipeline
    assert (flip.prob, flip.direction, crop.crop_size, crop.padding) == (0.5, 'horizontal', 32, 4)
    assert augment.hparams.pad_val == pad_val and erase.fill_color == config.data_preprocessor.mean
    assert config.model.head.num_classes == config.data_preprocessor.num_classes == classes
    dataset = config.val_dataloader.dataset
    assert (dataset.type, dataset.data_root, dataset.split) == (data.upper(), 'elsewhere', 'test')


def test_the_seed_draws_the_start():
    config = network_config('vit_convolutional', {})
    set_images(config, 10, seed=5)
    assert config.model.backbone.init_cfg[1].seed == config.randomness.seed == 5


@pytest.fixture
def tool(monkeypatch, tmp_path, capsys):
    """Runs the tool with trainings that are files alone, or networks in this process where ``tool.trains`` is true.

    Gives what began, what it prints and its exit status, or what it says of its options.
    """
    monkeypatch.setitem(TABLES, 'small', TABLE)
    begun, start, collect_networks = [], subprocess.Popen, Run.collect

    def popen(command, **kwargs):
        """A training that has ended at once; one that is in ``failing``, with an error."""
        if command[1] != TOOL.parent / 'train.py':
            return start(command, **kwargs)
        folder, resumed = Path(command[4]), '--resume' in command
        begun.append(folder.name + ' again' * resumed)
        lock = (folder.parents[1] / 'lock').stat()  # a training that outlives the tool keeps it
        assert os.path.samestat(os.fstat(kwargs['pass_fds'][0]), lock)
        if folder.name in run_tool.stops:
            raise KeyboardInterrupt
        if folder.name not in run_tool.failing:
            train(folder, resumed)
        return SimpleNamespace(
            poll=lambda: 0, terminate=lambda: 0, wait=lambda: 0, returncode=int(folder.name in run_tool.failing)
        )

    def train(folder, resumed):
        if not run_tool.trains:
            return (folder / f'epoch_{folder.name.split("_")[-2]}.pth').touch()
        config = Config.fromfile(folder.with_suffix('.json'))
        config.work_dir, config.resume = str(folder), resumed
        if resumed:  # as mmpretrain's tool does
            config.load_from = None
        config.log_level, config.experiment_name = 'ERROR', f'{folder}-{time.time()}'
        Runner.from_cfg(config).train()

    def collect(run, threads):
        if run_tool.trains:
            return collect_networks(run, threads)
        machine = dict(processor='a processor', gpu=None, threads=threads)
        curves = {'accuracy/top1': [[run.epochs, 10.0 + run.seed]]}
        result = dict(label=run.label, images=run.images, epochs=run.epochs, seed=run.seed, top1=10.0 + run.seed)
        result.update(seconds=60.0, parameters=1000, multiply_adds=7, curves=curves, machine=machine, parts=run.parts)
        write_json(run.folder / 'result.json', dict(result, versions=dict(torch='2'), config=run.config.to_dict()))
        return 'well'

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
        said = capsys.readouterr()
        return list(begun), said.out, said.err if status == 2 else status

    run_tool.failing = run_tool.stops = ()
    run_tool.trains = False
    monkeypatch.setattr(results_module.subprocess, 'Popen', popen)
    monkeypatch.setattr(reproduce.time, 'sleep', lambda seconds: None)
    monkeypatch.setattr(Run, 'collect', collect)
    return run_tool


def page_of(folder):
    text = (folder / 'small.md').read_text()
    rows = [line.strip('| ').split(' | ') for line in text.splitlines() if line.startswith('| ')]
    return text, {row[0]: row[1:] for row in rows[2:]}


def weights_of(path):
    return torch.load(path, weights_only=True)['state_dict']


def test_which_tables_there_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['reproduce.py', '--list'])
    reproduce.main()
    assert capsys.readouterr().out.startswith('C20-1: Heads by position and a CNN in equal epochs\nC20-E: ')
    monkeypatch.setattr(sys, 'argv', ['reproduce.py'])
    with pytest.raises(SystemExit):
        reproduce.main()
    assert 'TABLE is needed, one of C20-1, C20-E, ' in capsys.readouterr().err


@pytest.mark.slow
def test_a_table(tool, tmp_path):
    """Trained, shown, left alone; results as data, and the page."""
    tool.trains = True
    begun, output, status = tool('--list')
    assert not begun and '0 of 3 trainings are done' in output and status == 0
    assert 'goes on, 40 images, epochs: 2, seed 0: 0 epochs done' in output
    assert not list(tmp_path.iterdir())

    still = ['--cfg-options', 'optim_wrapper.optimizer.lr=0.0']
    begun, output, status = tool('--seeds', 0, '--jobs', 1, *still)
    assert begun == ['first_40_3_0', 'goes_on_40_2_0']
    assert status == 0 and '2 of 2 trainings are done\n' in output
    first, goes_on = json.loads((tmp_path / 'small.json').read_text())
    assert (first['seed'], first['images'], first['epochs'], first['start']) == (0, 40, 3, None)
    assert goes_on['start'] == 'first_40_3_0'
    paths = ('first_40_3_0/epoch_3', 'goes_on_40_2_0/epoch_2')
    before, after = (weights_of(tmp_path / f'runs/{path}.pth') for path in paths)
    assert all(torch.equal(after[key], value) for key, value in before.items())  # what it begins with
    assert first['parameters'] == sum(value.numel() for value in before.values())
    assert first['seconds'] > 0 and first['multiply_adds'] > 0
    assert first['versions']['torch'] == torch.__version__ and first['machine']['threads'] == 1
    assert first['config']['randomness']['seed'] == 0 and goes_on['config']['randomness']['seed'] == 1000
    assert goes_on['config']['train_dataloader']['dataset']['seed'] == 0
    ((step, last),) = first['curves']['accuracy/top1']
    assert step == 3 and last == first['top1'] == 100 * round(first['top1']) / 100

    text, rows = page_of(tmp_path)
    assert tool('--seeds', 0, '--models', 'first', *still)[::2] == ([], 0)
    assert page_of(tmp_path)[0] == text  # all of the table
    assert rows['first'][-1] == '2' and rows['first'][2] == f'{first["top1"]:.1f}, 1 of 2 seeds'
    assert rows['goes on'][2] == f'{goes_on["top1"]:.1f}'
    assert 'Validated with 20 test images.' in text and (tmp_path / 'small.svg').exists()
    assert 'Missing, 1 of 3 trainings:' in text and '- first, 40 images, epochs: 3, seed 1' in text


def test_a_training_that_goes_on_elsewhere(tool, tmp_path, monkeypatch):
    """Each machine that trained an epoch, in the results and on the page; not one where none was finished."""
    options, folder = ['--models', 'first', '--seeds', 0], tmp_path / 'runs/first_40_3_0'
    for gpu, epochs in (('a GPU', 1), ('a broken GPU', 1), ('a GPU', 2), ('another GPU', 3)):
        here = dict(processor='a CPU', cores=2, gpu=gpu)
        monkeypatch.setattr(results_module, 'machine', lambda here=here: here)
        tool.stops = [folder.name] if epochs < 3 else ()
        assert tool(*options)[2] == (130 if epochs < 3 else 0)
        (folder / f'epoch_{epochs}.pth').touch()
    (result,) = json.loads((tmp_path / 'small.json').read_text())
    found = [(part['machine']['gpu'], part['epochs_before']) for part in result['parts']]
    assert found == [('a GPU', 0), ('another GPU', 2)]
    place = f'one thread per training, PyTorch {torch.__version__}'
    assert f'a GPU, {place}, then another GPU, {place}. Validated' in page_of(tmp_path)[0]


def test_means_and_ranges_of_a_folder_that_was_moved(tool, tmp_path):
    """First of a row that is named, and of what it begins with."""
    assert tool('--models', 'goes on')[::2] == (['first_40_3_0', 'goes_on_40_2_0'], 0)
    assert len(tool()[0]) == 1
    shutil.move(tmp_path / 'runs', tmp_path / 'moved/runs')
    assert tool('--data-name', 'a few digits', '--out', tmp_path / 'moved')[::2] == ([], 0)
    text, rows = page_of(tmp_path / 'moved')
    assert 'Trained on a few digits: 40 images for 2 or 3 epochs.' in text
    assert rows['first'] == ['1,000', '7', '10.5 (10.0 to 11.0)', '1.0', '2']
    assert rows['goes on'] == ['1,000', '7', '10.0', '1.0', '1'] and 'issing' not in text


@pytest.mark.slow
def test_trainings_that_fail(tool, tmp_path, monkeypatch):
    """The others train; what begins with one does not; the status says so, and the page; the next call trains them."""
    tool.failing = ('first_40_3_0',)
    wrong = ['--cfg-options', 'optim_wrapper.optimizer.lr=0.5']  # nothing is there yet that could differ from it
    begun, output, status = tool('--models', 'goes on', *wrong)
    assert begun == ['first_40_3_0'] and '2 trainings failed or could not begin: first, 40 images' in status
    begun, output, status = tool()
    assert begun == ['first_40_3_0', 'first_40_3_1']
    assert 'first, 40 images, epochs: 3, seed 0: failed (ValueError: it ended with an error), see' in output
    assert '2 trainings failed or could not begin: first, 40 images' in status and 'goes on, 40' in status
    assert 'Missing, 2 of 3' in page_of(tmp_path)[0]
    tool.failing, tool.stops = (), ('goes_on_40_2_0',)
    assert tool('--seeds', 0)[::2] == (['first_40_3_0', 'goes_on_40_2_0'], 128 + signal.SIGINT)
    assert 'Missing, 1 of 3' in page_of(tmp_path)[0]
    tool.stops = ()
    tool.trains = True  # of what ends well and says nothing there is no result, and the others train
    monkeypatch.setattr(Runner, 'train', lambda runner: None)
    begun, output, status = tool()
    assert begun == ['goes_on_40_2_0'] and 'failed (FileNotFoundError: ' in output and '1 trainings failed' in status


@pytest.mark.parametrize(
    'options, message',
    [
        (['--models', 'third'], r"small has no .* label of \['third'\]; in all it has \['first', 'goes on'\]"),
        (['--models', 'goes on', '--seeds', 1], r"for each label of \['goes on'\]"),
        (['--seeds', 0, 7], r'for each seed of \[0, 7\]; in all it has \[0, 1\]'),
        (['--cfg-options', 'train_dataloader.batch_size=50'], 'seed 0: ValueError: 2 epochs of 1 batches are too few'),
        (['--cfg-options', 'train_dataloader.batch_size=all'], '^first, 40 images, epochs: 3, seed 0: TypeError'),
        (['--test-images', 0], 'the images cannot be used: ValueError: num_images=0 of BalancedSubset must be'),
        (
            ['--cfg-options', 'val_dataloader.dataset.dataset.pipeline.0.scale=28'],
            r'the images cannot be used: ValueError: they have the shape \(3, 28, 28\), but the networks are for',
        ),
        (['--data-root', 'images'], '--data-root images is for images in a folder'),
        (['--jobs', '0'], '--jobs 0 and --threads 1 must be at least 1'),
        (['--cfg-options', 'train_cfg.max_epochs=4'], 'train_cfg.max_epochs=… would make the training another one'),
        (['--cfg-options', 'train_dataloader=3'], 'train_dataloader=…'),
    ],
)
def test_errors(tool, options, message):
    begun, _, status = tool(*options)
    assert not begun and re.search(message, status)


def test_a_folder_of_other_settings(tool, tmp_path):
    """What is there already is not taken for what is asked for, done or begun; the settings that differ are named."""
    options, other = ['--models', 'first', '--seeds', 0], ['--cfg-options', 'optim_wrapper.optimizer.lr=0.5']
    tool(*options)
    folder, text = tmp_path / 'runs/first_40_3_0', page_of(tmp_path)[0]
    lines = (
        r'first_40_3_0 has a training with other settings \(optim_wrapper.optimizer.lr: 0.002 there, 0.5 here\): '
        'give another folder by --out, or remove this one and first_40_3_0.json beside it'
    )
    for further in ([], ['--list'], ['--models', 'goes on']):  # its result would be on the page
        begun, _, status = tool(*options, *further, *other)
        assert not begun and re.search(lines, status)
    for path in (folder / 'result.json', folder.with_suffix('.json')):  # cut off, they are named
        whole = path.read_text()
        path.write_text(whole[:100])
        assert re.search(rf'{path} is broken \(.*\): remove it', tool(*options)[2])
        path.write_text(whole)
    (folder / 'result.json').unlink()
    assert re.search(lines, tool(*options, *other)[2])
    assert tool(*options)[::2] == (['first_40_3_0 again'], 0) and page_of(tmp_path)[0] == text
    shutil.rmtree(folder)
    assert tool(*options, *other)[::2] == (['first_40_3_0'], 0)


def test_data_that_cannot_be_used(tool, images, tmp_path, monkeypatch):
    def fail(url, *args, **kwargs):
        raise URLError('Name or service not known')

    monkeypatch.setattr(mmpretrain.datasets.utils, 'download_url_to_file', fail)
    begun, _, status = tool('--data', 'cifar10', '--data-root', tmp_path / 'data')
    assert not begun and 'a data set is not there and cannot be downloaded (URLError' in status
    assert status.endswith(': name its folder: --data-root FOLDER')
    for path in images.glob('t*/*/*'):
        path.write_bytes(b'none')
    begun, _, status = tool('--test-images', 10, '--data', 'folder', '--data-root', images)
    assert not begun and status.startswith('the images cannot be used: ')


def test_a_folder_in_use(tool, tmp_path):
    """Also by a training that was left, which has the lock as its own."""
    with (tmp_path / 'lock').open('w') as lock:
        reproduce.fcntl.flock(lock, reproduce.fcntl.LOCK_EX)
        begun, _, status = tool()
        assert not begun and 'is in use by another call, or by a training that one has left' in status
    assert tool('--models', 'first', '--seeds', 0)[2] == 0


@pytest.mark.slow
def test_killed_twice(tmp_path):
    """The tool and its training, killed in the middle of epochs: the results are those of a run that was not."""
    tool = [TOOL, 'starts', '--smoke', '--models', 'as it comes']
    tool += ['--cfg-options', 'train_cfg.val_interval=1', 'default_hooks.logger.interval=1', '--out']
    run('python', *tool, tmp_path / 'whole', folder=tmp_path)
    stopped = [sys.executable, *map(str, tool), str(tmp_path / 'stopped')]
    folder = tmp_path / 'stopped/runs/as_it_comes_200_2_0'
    for epoch in (1, 2):
        process = subprocess.Popen(stopped, env=environment(tmp_path), start_new_session=True)
        while not any(f'Epoch(train) [{epoch}][2/4]' in log.read_text() for log in folder.glob('*/*.log')):
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        with (tmp_path / 'stopped/lock').open() as lock:  # the training, killed too, may hold it for another moment
            reproduce.fcntl.flock(lock, reproduce.fcntl.LOCK_EX)
    run('python', *tool, tmp_path / 'stopped', folder=tmp_path)
    whole, again = (json.loads((tmp_path / name / 'starts.json').read_text()) for name in ('whole', 'stopped'))
    assert len(whole) == 1 and len(list(folder.glob('*/vis_data'))) == 3
    assert whole[0]['curves'] == again[0]['curves'] and len(whole[0]['curves']['accuracy/top1']) == 2
    one, other = (weights_of(tmp_path / of / 'runs/as_it_comes_200_2_0/epoch_2.pth') for of in ('whole', 'stopped'))
    assert one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


SMOKE = {
    'T-CNN': ['gated attention'],
    'pruning': ['12 heads, at random'],
    'starts': ['random embedding', 'Gaussian'],
}


@pytest.mark.slow
@pytest.mark.parametrize('name, rows', SMOKE.items())
def test_smoke(name, rows, tmp_path):
    """A row of each kind of a table, and what it begins with, on the digits."""
    options = ['--smoke', '--test-images', 50, '--out', tmp_path]
    run('python', TOOL, name, *options, '--models', *rows, folder=tmp_path)
    lines = (tmp_path / f'{name}.md').read_text().splitlines()
    assert lines[0] == f'# Smoke run: {TABLES[name].title}'
    assert [
        row for row in rows if not any(line.startswith(f'| {row} | ') and 'missing' not in line for line in lines)
    ] == []
