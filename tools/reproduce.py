#!/usr/bin/env python
"""Trains what a table of the documentation needs, and writes its page.

  reproduce.py two-phases --data folder --data-root data/images --models ViT 'both phases' --seeds 0
  reproduce.py --list             # the tables
  reproduce.py C20-1 --list       # what is done and what is left; trains nothing
  reproduce.py T-CNN --smoke      # the whole table on scikit-learn's digits, in a few minutes

Every training has a folder of its own below OUT/runs. Run the command again after a stop: what is done is left alone,
and the rest goes on from the last epoch, to the same weights as without the stop. Results are in OUT/TABLE.json, the
page is OUT/TABLE.md, its figure OUT/TABLE.svg. What the tables train is in tools/reproduction/tables.py.
"""

import argparse
import copy
import fcntl
import re
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Callable, Dict, List

import torch

warnings.filterwarnings('ignore', 'Fail to import|pkg_resources is deprecated', module='mmcv|mmengine|importlib')

from mmengine.config import Config, DictAction
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope
from mmpretrain.registry import DATASETS

from attncnn_plugin.commands import setting
from attncnn_plugin.mm.tools import FOLDERS, one_line

sys.path.insert(0, str(Path(__file__).parent))  # for those who import this file
from reproduction.configs import DATA, network_config, set_data, set_epochs, set_images  # noqa: E402
from reproduction.page import write_page  # noqa: E402
from reproduction.results import Run, write_json  # noqa: E402
from reproduction.tables import TABLES, Row, Table  # noqa: E402

# What makes a training that of its row.
OWN = 'train_cfg.max_epochs train_dataloader.dataset.num_images train_dataloader.dataset.seed randomness.seed load_from'


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('table', nargs='?', choices=list(TABLES), metavar='TABLE', help=', '.join(TABLES))
    parser.add_argument('--models', nargs='+', metavar='ROW', help='rows of the table (default: all)')
    parser.add_argument('--seeds', nargs='+', type=int, help='which of the table’s seeds (default: all)')
    parser.add_argument('--data', choices=DATA, help='default: cifar10, with --smoke the digits')
    parser.add_argument('--data-root', type=Path, help='folder of the images (default: data/cifar10 and the like)')
    parser.add_argument('--data-name', metavar='WORDS', help='what the page calls the images (default: as --data does)')
    parser.add_argument('--test-images', type=int, help='how many are validated with (default: all)')
    parser.add_argument('--out', type=Path, help='folder of the results (default: work_dirs/reproduce/DATA)')
    jobs = 1 if torch.cuda.is_available() else torch.get_num_threads()
    parser.add_argument('--jobs', type=int, default=jobs, help='trainings at a time (default: cores, with a GPU 1)')
    parser.add_argument('--threads', type=int, default=1, help='of each training (default: 1)')
    parser.add_argument('--list', action='store_true', help='train nothing; without TABLE: list the tables')
    parser.add_argument('--smoke', action='store_true', help='200 images, two epochs, one seed')
    parser.add_argument('--cfg-options', nargs='+', type=setting, action=DictAction, default={}, help='settings: k=v')
    args = parser.parse_args()
    if args.table is None and not args.list:
        parser.error(f'TABLE is needed, one of {", ".join(TABLES)}')
    args.data = args.data or ('digits' if args.smoke else 'cifar10')
    args.out = args.out or Path('work_dirs/reproduce', f'{args.data}_smoke' if args.smoke else args.data)
    if args.data == 'digits' and args.data_root is not None:
        parser.error(f'--data-root {args.data_root} is for images in a folder: the digits come with scikit-learn')
    if min(args.jobs, args.threads) < 1:
        parser.error(f'--jobs {args.jobs} and --threads {args.threads} must be at least 1')
    for key in args.cfg_options:
        if any(f'{own}.'.startswith(f'{key}.') for own in OWN.split()):
            parser.error(f'--cfg-options {key}=… would make the training another one than its row says')
    return args


def main() -> None:
    args = parse_args()
    if args.table is None:
        return print('\n'.join(f'{name}: {table.title}' for name, table in TABLES.items()))
    try:
        reproduce(args)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (OSError, ValueError) as error:
        sys.exit(str(error))


def reproduce(args: argparse.Namespace) -> None:
    """Does what the options say."""
    table = TABLES[args.table].smoke() if args.smoke else TABLES[args.table]
    runs = runs_of(table, args)
    wanted = chosen(runs, args)
    for run in [run for run in runs if run in wanted or run.result is not None]:
        run.check_folder()

    def progress() -> str:
        return f'{sum(run.result is not None for run in wanted)} of {len(wanted)} trainings are done'

    def write(sentence: str) -> None:
        write_json(args.out / f'{args.table}.json', [run.result for run in runs if run.result is not None])
        write_page(args.out, args.table, table, runs, args.data_name or args.data)
        print(f'{sentence}; {progress()}', flush=True)

    if args.list:
        for run in wanted:
            print(f'{run}: {"done" if run.result else f"{run.epochs_done} epochs done"}')
        return print(progress())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the trainings too
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / 'lock').open('w') as lock:  # the trainings inherit it, and may outlive this process
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f'{args.out} is in use by another call, or by a training that one has left: wait') from None
        left = [run for run in wanted if run.result is None]
        if left:
            check_images(left[0].config)
        train(left, args.jobs, args.threads, lock.fileno(), write)
        write(f'{args.out / args.table}.md')
    failed = [str(run) for run in wanted if run.result is None]
    if failed:
        raise ValueError(f'{len(failed)} trainings failed or could not begin: {"; ".join(failed)}')


def runs_of(table: Table, args: argparse.Namespace) -> List[Run]:
    """Returns all trainings of a table, the first seed first, and those that others begin with before these."""
    runs: Dict[tuple, Run] = {}
    for seed in sorted({seed for row in table.rows.values() for seed in row.seeds}):
        for label, row in table.rows.items():
            if seed in row.seeds:
                images, epochs, start = table.images_of(label), table.epochs_of(label), runs.get((row.start, seed))
                folder = args.out / 'runs' / re.sub(r'\W+', '_', f'{label} {images} {epochs} {seed}')
                config = partial(config_of, row, args)
                runs[label, seed] = Run(folder, label, images, epochs, seed, start, config, table.corrupted)
    return list(runs.values())


def chosen(runs: List[Run], args: argparse.Namespace) -> List[Run]:
    """Returns the trainings that the options name, and those that they begin with."""
    named = dict(label=args.models, seed=args.seeds)
    wanted = [run for run in runs if all(names is None or getattr(run, key) in names for key, names in named.items())]
    for key, names in named.items():
        if not {getattr(run, key) for run in wanted}.issuperset(names or ()):
            known = list(dict.fromkeys(getattr(run, key) for run in runs))
            raise ValueError(f'{args.table} has no such trainings for each {key} of {names}; in all it has {known}')
    return [run for run in runs if run in wanted or run in [other.start for other in wanted]]


def config_of(row: Row, args: argparse.Namespace, run: Run) -> Config:
    """Returns the config of a training, as the row and the options change it."""
    batch_size = {key: value for key, value in args.cfg_options.items() if key == 'train_dataloader.batch_size'}
    try:
        config = network_config(row.config, {**row.options, **batch_size})  # the schedule depends on it
        set_data(config, args.data, args.data_root, args.test_images)
        set_images(config, run.images, run.seed)
        set_epochs(config, run.epochs, run.images)
        if run.start:
            config.randomness.seed += 1000  # other random numbers than those that it has seen
            config.load_from = str(run.start.folder / f'epoch_{run.start.epochs}.pth')
        config.merge_from_dict(args.cfg_options)
    except Exception as error:
        raise ValueError(f'{run}: {one_line(error)}') from error
    return config


def check_images(config: Config) -> None:
    """Loads images of a config, before several processes do so or download them."""
    try:
        for loader in (config.train_dataloader, config.val_dataloader):
            with DefaultScope.overwrite_default_scope('mmpretrain'):
                shape = tuple(DATASETS.build(copy.deepcopy(loader.dataset))[0]['inputs'].shape)
            if shape != (3, 32, 32):
                raise ValueError(f'they have the shape {shape}, but the networks are for (3, 32, 32)')
    except Exception as error:
        reason = one_line(error).replace(f'--cfg-options {FOLDERS}', '--data-root FOLDER')
        raise ValueError(f'the images cannot be used: {reason}') from error


def train(runs: List[Run], jobs: int, threads: int, lock: int, tell: Callable[[str], None]) -> None:
    """Trains so many at a time, and tells what came of each; what begins with one that failed is left out."""
    working: Dict[Run, subprocess.Popen] = {}
    try:
        while True:
            ready = [run for run in runs if run.start is None or run.start.result is not None]
            for run in ready[: jobs - len(working)]:
                runs.remove(run)
                working[run] = run.begin(threads, lock)
            if not working:
                return
            time.sleep(0.2)
            for run in [run for run, process in working.items() if process.poll() is not None]:
                try:
                    if working.pop(run).returncode:
                        raise ValueError('it ended with an error')
                    sentence = run.collect(threads)
                except Exception as error:  # whatever is wrong with it, the other trainings go on
                    sentence = f'failed ({one_line(error)}), see {run.folder / "output.txt"}'
                tell(f'{run}: {sentence}')
    finally:
        for process in working.values():
            process.terminate()
        for process in working.values():
            process.wait()


if __name__ == '__main__':
    MMLogger.get_instance('mmengine', log_level='ERROR')  # its progress alone
    main()
