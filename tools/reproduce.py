#!/usr/bin/env python
"""Trains what a table of the documentation needs, and writes its page.

  reproduce.py C20-1 --data cifar10 --data-root data/cifar10
  reproduce.py L21-1 --data folder --data-root data/images --models ViT 'two phases' --seeds 0 --images 500 2000
  reproduce.py C20-1 --list       # what is done, what is left, and about how long it takes; trains nothing
  reproduce.py T-CNN --smoke      # the whole table on scikit-learn's digits, in a few minutes

Every training has a folder of its own below OUT/runs. Run the command again after a stop: what is done is left alone,
and the rest goes on from the last epoch, to the same weights as without the stop. Results are in OUT/TABLE.json, the
page is OUT/TABLE.md, its figure OUT/TABLE.svg.
"""

import argparse
import copy
import dataclasses
import json
import os
import re
import signal
import sys
import warnings
from functools import cache, partial
from pathlib import Path
from typing import Dict, List, Optional, Sequence

import torch
from mmengine.config import Config, DictAction
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope
from mmpretrain.registry import DATASETS

import attncnn_plugin  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))  # for those who import this file
from reproduction.configs import DATA, network_config, set_data, set_epochs, set_images  # noqa: E402
from reproduction.page import write_page  # noqa: E402
from reproduction.results import step_seconds  # noqa: E402
from reproduction.runs import Run, locked, train  # noqa: E402
from reproduction.tables import TABLES, Row, Table, smoke  # noqa: E402

WORDS = dict(cifar10='CIFAR-10', cifar100='CIFAR-100', folder='images of a folder', digits="scikit-learn's digits")
SMOKE_TEST_IMAGES = 100
SEEDS_OF_STARTED = 1000


def positive(text: str) -> int:
    """An option that is a positive integer."""
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise argparse.ArgumentTypeError(f'{text!r} must be a positive integer')
    return int(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('table', choices=list(TABLES), metavar='TABLE', help=', '.join(TABLES))
    parser.add_argument('--models', nargs='+', metavar='ROW', help='rows of the table (default: all)')
    parser.add_argument('--seeds', nargs='+', type=int, help='of each training (default: those of the table)')
    parser.add_argument('--images', nargs='+', type=positive, help='numbers of training images (default: the table’s)')
    parser.add_argument('--epochs', type=positive, help='of a training (default: those of the table)')
    parser.add_argument('--data', choices=DATA, help='default: cifar10, with --smoke the digits')
    parser.add_argument('--data-root', type=Path, help='folder of the images (default: data/cifar10 and the like)')
    parser.add_argument('--data-name', metavar='WORDS', help='what the page calls the images, such as Flowers-102')
    parser.add_argument('--test-images', type=positive, help='how many are validated with (default: all)')
    parser.add_argument('--out', type=Path, help='folder of the results (default: work_dirs/reproduce/DATA)')
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    jobs = 1 if torch.cuda.is_available() else cores
    parser.add_argument('--jobs', type=positive, default=jobs, help=f'trainings at a time (default here: {jobs})')
    parser.add_argument('--threads', type=positive, default=1, help='of each training (default: 1)')
    parser.add_argument('--list', action='store_true', help='train nothing')
    parser.add_argument('--smoke', action='store_true', help='few digits, two epochs, one seed')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, default={}, help='settings of all configs: k=v')
    args = parser.parse_args()
    args.data = args.data or ('digits' if args.smoke else 'cifar10')
    if args.smoke and args.data != 'digits':
        parser.error(f'--smoke is for the digits, not for --data {args.data}')
    if args.data == 'digits' and args.data_root is not None:
        parser.error(f'--data-root {args.data_root} is for images in a folder: the digits come with scikit-learn')
    if args.cfg_options.get('train_cfg.max_epochs') is not None:
        parser.error('--cfg-options train_cfg.max_epochs leaves the schedules as they are: give --epochs')
    if args.smoke and args.test_images is None:
        args.test_images = SMOKE_TEST_IMAGES
    args.out = args.out or Path('work_dirs/reproduce') / (f'{args.data}_smoke' if args.smoke else args.data)
    return args


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
    return with_results(dataclasses.replace(table, epochs=epochs, rows=tuple(rows)), args.out)


def with_results(table: Table, out: Path) -> Table:
    """The table with the seeds of all its trainings that are done, and of what they begin with.

    Raises:
        ValueError: One of them has another number of epochs.
    """
    results = [json.loads(path.read_text()) for path in sorted(out.glob('runs/*/result.json'))]
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
                    f'{out} has a training of {row.label!r} with {result["images"]:,} images and {result["epochs"]} '
                    f'epochs, not {epochs}, which is for another table: give another folder by --out'
                )
            seeds.add(result['seed'])
        rows.append(dataclasses.replace(row, seeds=tuple(sorted(seeds))))
    return dataclasses.replace(table, rows=tuple(rows))


def epochs_of(row: Row, epochs: int) -> int:
    """The epochs of a row in a table of so many."""
    return max(round(row.share * epochs), 1)


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
                folder = args.out / 'runs' / re.sub(r'\W+', '_', f'{row.label} {images} {of_row} {seed}')
                config = partial(run_config, row, images, of_row, seed, start, args)
                runs[row.label, images, seed] = Run(folder, row.label, images, of_row, seed, config, start)
    return list(runs.values())


def run_config(row: Row, images: int, epochs: int, seed: int, start: Optional[Run], args: argparse.Namespace) -> Config:
    """The config of a training."""
    config = network_config(row.config, row.options)
    set_data(config, args.data, args.data_root, args.test_images)
    set_images(config, images, seed)
    set_epochs(config, epochs, images)
    if start:  # with other random numbers than those that it has seen
        config.randomness.seed += SEEDS_OF_STARTED
    config.load_from = str(start.last_checkpoint) if start else None
    config.merge_from_dict(args.cfg_options)
    return config


def chosen(runs: Sequence[Run], args: argparse.Namespace) -> List[Run]:
    """The trainings that the options name, and those that they begin with."""
    choices = (('label', args.models), ('images', args.images), ('seed', args.seeds))
    wanted = [run for run in runs if all(names is None or getattr(run, key) in names for key, names in choices)]
    needed = {run.start for run in wanted}
    if not wanted:
        raise ValueError(f'no training has --models {args.models}, --images {args.images} and --seeds {args.seeds}')
    return [run for run in runs if run in wanted or run in needed]


def check_images(runs: Sequence[Run]) -> None:
    """Loads the images of the largest training once, before several processes do so or download them.

    Raises:
        ValueError: There are fewer of them.
    """
    if not runs:
        return
    largest = max(runs, key=lambda run: run.images).config
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        for loader in (largest.train_dataloader, largest.val_dataloader):
            DATASETS.build(copy.deepcopy(loader.dataset)).full_init()


def seconds_left(runs: Sequence[Run], jobs: int) -> float:
    """About how long what is left takes: by the trainings of a row that are done, or by one step.

    No less than the longest training that is left, after that which it begins with.
    """
    of_image: Dict[str, List[float]] = {}
    for run in runs:
        if run.result is not None:
            seconds = run.result['seconds'] / (run.images * run.epochs)
            of_image.setdefault(run.label, []).append(seconds)
    left: Dict[Optional[Run], float] = {}
    ends: Dict[Optional[Run], float] = {}
    for run in runs:  # those that others begin with come first
        if run.result is None:
            if run.label not in of_image:
                of_image[run.label] = [seconds_of_image(run)]
            seconds = sum(of_image[run.label]) / len(of_image[run.label])
            left[run] = seconds * run.images * (run.epochs - run.epochs_done)
            ends[run] = ends.get(run.start, 0.0) + left[run]
    return max([sum(left.values()) / jobs, *ends.values()])


@cache
def seconds_of_image(run: Run) -> float:
    """By one step of the training, measured once."""
    return step_seconds(run.config) / run.config.train_dataloader.batch_size


def in_words(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f'{minutes // 60} h {minutes % 60} min' if minutes >= 60 else f'{max(minutes, 1)} min'


def progress(runs: Sequence[Run], jobs: int) -> str:
    left = sum(run.result is None for run in runs)
    about = f'; the others take about {in_words(seconds_left(runs, jobs))}' if left else ''
    return f'{len(runs) - left} of {len(runs)} trainings are done{about}'


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    try:
        table = table_of(args)
        runs = runs_of(table, args)
        wanted = chosen(runs, args)
        for run in runs:
            if run in wanted or run.result is not None:
                run.check_folder()
    except ValueError as error:
        sys.exit(str(error))
    print(progress(wanted, args.jobs), flush=True)
    if args.list:
        for run in wanted:
            state = 'done' if run.result else f'{run.epochs_done} epochs done' if run.epochs_done else 'not begun'
            print(f'  {run}: {state}')
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the trainings too

    def tell(run: Run, sentence: str) -> None:
        print(f'{run}: {sentence}; {progress(wanted, args.jobs)}', flush=True)

    try:
        with locked(args.out) as lock:
            try:
                check_images([run for run in wanted if run.result is None])
            except ValueError as error:
                sys.exit(str(error))
            failed = train(wanted, args.jobs, args.threads, lock, tell)
            results = [run.result for run in runs if run.result is not None]
            (args.out / f'{args.table}.json').write_text(json.dumps(results, indent=1))
            print(write_page(args.out, args.table, table, runs, args.data_name or WORDS[args.data]))
    except BlockingIOError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    if failed:
        sys.exit(f'{len(failed)} trainings failed or could not begin: ' + '; '.join(map(str, failed)))


if __name__ == '__main__':
    MMLogger.get_instance('mmengine', log_level='ERROR')  # its progress alone
    warnings.filterwarnings('ignore', 'pkg_resources is deprecated')  # mmengine imports it again for every config
    main()
