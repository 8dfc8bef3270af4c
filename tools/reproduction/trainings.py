"""Which trainings a table needs: by its rows, by the options, and by what is there already."""

import argparse
import copy
import dataclasses
import sys
from functools import partial, reduce
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmpretrain.registry import DATASETS

from attncnn_plugin.utils.errors import one_line

from .configs import network_config, set_data, set_epochs, set_images
from .results import IMAGE, check_result
from .runs import Run, folder_name, read_json
from .tables import TABLES, Row, Table, epochs_of, smoke

SEEDS_OF_STARTED = 1000
KEY = ('label', 'images', 'epochs', 'seed')
BATCH_SIZE = 'train_dataloader.batch_size'
# Settings that make the training the one that its row says, and what changes them.
OWN = {
    'train_cfg.max_epochs': 'give --epochs, which stretches the schedule too',
    'train_dataloader.dataset.num_images': 'give --images',
    'train_dataloader.dataset.seed': 'give --seeds',
    'randomness.seed': 'give --seeds',
    'load_from': 'the table says what it begins with',
}


def table_of(args: argparse.Namespace) -> Table:
    """The whole table, with the sizes and seeds that the options add."""
    table = smoke(TABLES[args.table]) if args.smoke else TABLES[args.table]
    labels = [row.label for row in table.rows]
    unknown = sorted(set(args.models or []) - set(labels))
    if unknown:
        sys.exit(f'--models {unknown[0]!r} is no row of {args.table}, which has: {", ".join(map(repr, labels))}')
    epochs = {number: args.epochs or table.epochs.get(number) for number in [*table.epochs, *(args.images or [])]}
    if None in epochs.values():
        sys.exit(f'--images {args.images} needs --epochs: {args.table} has epochs for {list(table.epochs)} images')
    rows = [dataclasses.replace(row, seeds=tuple(sorted({*row.seeds, *(args.seeds or ())}))) for row in table.rows]
    return dataclasses.replace(table, epochs=epochs, rows=tuple(rows))


def results_in(out: Path) -> List[dict]:
    """What came of all trainings in a folder, of other tables too."""
    return [read_json(path) for path in sorted(out.glob('runs/*/result.json'))]


def results_of_files(paths: Sequence[Path]) -> List[dict]:
    """Those of other machines.

    Raises:
        OSError: A file cannot be read.
        ValueError: It is none that this tool has written.
    """
    results = []
    for path in paths:
        of_file = read_json(path, advice='')
        if not isinstance(of_file, list) or not all(isinstance(result, dict) for result in of_file):
            raise ValueError(f'--results {path} is no list of results, as TABLE.json is')
        for result in of_file:
            check_result(result, f'--results {path}')
        results += of_file
    return results


def with_results(table: Table, results: Sequence[dict], out: Path) -> Table:
    """The table with the seeds of all its trainings that are done, and of what they begin with.

    Args:
        table (Table): The table.
        results (Sequence[dict]): What came of trainings, those of other tables too.
        out (Path): Where they are.

    Raises:
        ValueError: One of them has another number of epochs.
    """
    rows = []
    for row in table.rows:
        seeds = set(row.seeds)
        labels = {row.label, *(other.label for other in table.rows if other.start == row.label)}
        for result in results:
            if result['label'] not in labels or result['images'] not in table.epochs:
                continue
            epochs = epochs_of(row, table.epochs[result['images']])
            if result['label'] == row.label and result['epochs'] != epochs:
                raise ValueError(
                    f'{out} has, or --results, a training of {row.label!r} with {result["images"]:,} images and '
                    f'{result["epochs"]} epochs, not {epochs}, which is for another table: give another folder by --out'
                )
            seeds.add(result['seed'])
        rows.append(dataclasses.replace(row, seeds=tuple(sorted(seeds))))
    return dataclasses.replace(table, rows=tuple(rows))


def runs_of(table: Table, args: argparse.Namespace) -> List[Run]:
    """All trainings of a table, the first seed first."""
    runs: Dict[tuple, Run] = {}
    for seed in sorted({seed for row in table.rows for seed in row.seeds}):
        for images, epochs in table.epochs.items():
            for row in table.rows:
                if seed not in row.seeds or row.images is not None and images not in row.images:
                    continue
                start = runs[row.start, images, seed] if row.start else None
                of_row = epochs_of(row, epochs)
                folder = args.out / 'runs' / folder_name(row.label, images, of_row, seed)
                config = partial(run_config, row, images, of_row, seed, start, args)
                runs[row.label, images, seed] = Run(folder, row.label, images, of_row, seed, config, start)
    return list(runs.values())


def run_config(row: Row, images: int, epochs: int, seed: int, start: Optional[Run], args: argparse.Namespace) -> Config:
    """The config of a training."""
    config = network_config(row.config, row.options)
    set_data(config, args.data, args.data_root, args.test_images)
    set_images(config, images, seed)
    batch_size = args.cfg_options.get(BATCH_SIZE, config.train_dataloader.batch_size)
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f'--cfg-options {BATCH_SIZE}={batch_size!r} must be a positive integer')
    config.train_dataloader.batch_size = batch_size
    set_epochs(config, epochs, images)
    if start:  # with other random numbers than those that it has seen
        config.randomness.seed += SEEDS_OF_STARTED
    config.load_from = str(start.last_checkpoint) if start else None
    own = _own_settings(config)
    config.merge_from_dict(args.cfg_options)
    interval = config.to_dict()['train_cfg']['val_interval']
    if type(interval) is not int or interval < 1:
        raise ValueError(f'--cfg-options train_cfg.val_interval={interval!r} must be a positive integer')
    if not config.get('val_dataloader'):
        raise ValueError('--cfg-options val_dataloader=None: a table has the accuracy of a validation')
    for name, value in _own_settings(config).items():
        if value != own[name]:
            raise ValueError(f'--cfg-options makes {name} {value!r}, but the training has {own[name]!r}: {OWN[name]}')
    return config


def _own_settings(config: Config) -> Dict[str, Any]:
    """What the table and the options make of a training, by the names of the settings."""
    plain = config.to_dict()

    def value(part: Any, key: str) -> Any:
        return part.get(key) if isinstance(part, dict) else None

    return {name: reduce(value, name.split('.'), plain) for name in OWN}


def number_of_test_images(config: Config) -> int:
    """How many images a training is validated with; nothing is downloaded."""
    dataset = config.val_dataloader.dataset
    if 'num_images' in dataset:
        return dataset.num_images
    if dataset.type in ('CIFAR10', 'CIFAR100'):
        return 10000
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        return len(DATASETS.build(copy.deepcopy(dataset)))


def chosen(runs: Sequence[Run], args: argparse.Namespace) -> List[Run]:
    """The trainings that the options name, and those that they begin with."""
    choices = (('label', args.models), ('images', args.images), ('seed', args.seeds))
    wanted = [run for run in runs if all(names is None or getattr(run, key) in names for key, names in choices)]
    needed = {run.start for run in wanted}
    if not wanted:
        raise ValueError(f'no training has --models {args.models}, --images {args.images} and --seeds {args.seeds}')
    return [run for run in runs if run in wanted or run in needed]


def take_over(runs: Sequence[Run], results: Sequence[dict]) -> None:
    """Takes results of another machine for those of trainings that are not done.

    Raises:
        ValueError: One of them is of no training of the table, or of one with other settings.
    """
    by_key = {tuple(getattr(run, name) for name in KEY): run for run in runs}
    for result in results:
        key = tuple(result[name] for name in KEY)
        if key not in by_key:
            label, images, epochs, seed = key
            raise ValueError(
                f'--results has a training of {label!r} with {images:,} images, {epochs} epochs and seed {seed}, which '
                'is none of this table with these options'
            )
        by_key[key].check_settings(result['config'], '--results')
    for result in results:
        run = by_key[tuple(result[name] for name in KEY)]
        if run.result is None:
            run.check_folder()  # it may have begun here, with other settings
            run.write_config()
            run.write_result(result)


def check_images(runs: Sequence[Run]) -> None:
    """Loads the images of the largest training once, before several processes do so or download them.

    Raises:
        OSError: They cannot be downloaded.
        RuntimeError: They are not there, and are not to be downloaded.
        ValueError: There are fewer of them, the first one cannot be loaded, or it has another size.
    """
    if not runs:
        return
    largest = max(runs, key=lambda run: run.images).config
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        for loader in (largest.train_dataloader, largest.val_dataloader):
            dataset = DATASETS.build(copy.deepcopy(loader.dataset))
            try:
                shape = tuple(dataset[0]['inputs'].shape)
            except Exception as error:
                raise ValueError(
                    f'the first image of {type(dataset).__name__} cannot be loaded ({one_line(error)})'
                ) from error
            if shape != IMAGE:
                raise ValueError(
                    f'the first image of {type(dataset).__name__} has the shape {shape}, but the networks of the '
                    f'tables are for {IMAGE}, colours, rows and columns: give a folder of such images'
                )
