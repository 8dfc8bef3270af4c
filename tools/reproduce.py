#!/usr/bin/env python
"""Trains what a table of the documentation needs, and writes its page.

  reproduce.py C20-1 --data cifar10 --data-root data/cifar10
  reproduce.py L21-1 --data folder --data-root data/images --models ViT 'two phases' --seeds 0 --images 500 2000
  reproduce.py C20-1 --list       # what is done, what is left, and about how long it takes; trains nothing
  reproduce.py C20-1 --results docs/tables/C20-1.json  # goes on with what was trained on another machine
  reproduce.py T-CNN --smoke      # the whole table on scikit-learn's digits, in a few minutes

Every training has a folder of its own below OUT/runs. Run the command again after a stop: what is done is left alone,
and the rest goes on from the last epoch, to the same weights as without the stop. Results are in OUT/TABLE.json, the
page is OUT/TABLE.md, its figure OUT/TABLE.svg.
"""

import argparse
import os
import signal
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, List

import torch
from mmengine.config import DictAction
from mmengine.logging import MMLogger

from attncnn_plugin.apis.model_options import setting
from attncnn_plugin.utils.errors import one_line

sys.path.insert(0, str(Path(__file__).parent))  # for those who import this file
from reproduction.configs import DATA  # noqa: E402
from reproduction.estimate import progress  # noqa: E402
from reproduction.page import write_page  # noqa: E402
from reproduction.runs import Run, locked, train, write_json  # noqa: E402
from reproduction.tables import TABLES  # noqa: E402
from reproduction.trainings import (  # noqa: E402
    SEEDS_OF_STARTED,
    check_images,
    chosen,
    results_in,
    results_of_files,
    runs_of,
    table_of,
    take_over,
    with_results,
)

WORDS = dict(cifar10='CIFAR-10', cifar100='CIFAR-100', folder='images of a folder', digits="scikit-learn's digits")
SMOKE_TEST_IMAGES = 100


def positive(text: str) -> int:
    """An option that is a positive integer."""
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise argparse.ArgumentTypeError(f'{text!r} must be a positive integer')
    return int(text)


def seed(text: str) -> int:
    """An option that is a seed, as NumPy takes them."""
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**32 - SEEDS_OF_STARTED:
        raise argparse.ArgumentTypeError(f'{text!r} must be an integer from 0 to {2**32 - SEEDS_OF_STARTED - 1}')
    return int(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('table', choices=list(TABLES), metavar='TABLE', help=', '.join(TABLES))
    parser.add_argument('--models', nargs='+', metavar='ROW', help='rows of the table (default: all)')
    parser.add_argument('--seeds', nargs='+', type=seed, help='of each training (default: those of the table)')
    parser.add_argument('--images', nargs='+', type=positive, help='numbers of training images (default: the table’s)')
    parser.add_argument('--epochs', type=positive, help='of a training (default: those of the table)')
    parser.add_argument('--data', choices=DATA, help='default: cifar10, with --smoke the digits')
    parser.add_argument('--data-root', type=Path, help='folder of the images (default: data/cifar10 and the like)')
    parser.add_argument('--data-name', metavar='WORDS', help='what the page calls the images, such as Flowers-102')
    parser.add_argument('--test-images', type=positive, help='how many are validated with (default: all)')
    parser.add_argument('--out', type=Path, help='folder of the results (default: work_dirs/reproduce/DATA)')
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    jobs = 1 if torch.cuda.is_available() else cores
    parser.add_argument(
        '--results',
        nargs='+',
        type=Path,
        default=[],
        metavar='JSON',
        help='of other machines: TABLE.json to take over, with --list too',
    )
    parser.add_argument('--jobs', type=positive, default=jobs, help=f'trainings at a time (default here: {jobs})')
    parser.add_argument('--threads', type=positive, default=1, help='of each training (default: 1)')
    parser.add_argument('--list', action='store_true', help='train nothing')
    parser.add_argument('--smoke', action='store_true', help='few digits, two epochs, one seed')
    parser.add_argument(
        '--cfg-options', nargs='+', type=setting, action=DictAction, default={}, help='settings of all configs: k=v'
    )
    args = parser.parse_args()
    args.data = args.data or ('digits' if args.smoke else 'cifar10')
    if args.smoke and args.data != 'digits':
        parser.error(f'--smoke is for the digits, not for --data {args.data}')
    if args.data == 'digits' and args.data_root is not None:
        parser.error(f'--data-root {args.data_root} is for images in a folder: the digits come with scikit-learn')
    if args.smoke and args.test_images is None:
        args.test_images = SMOKE_TEST_IMAGES
    args.out = args.out or Path('work_dirs/reproduce') / (f'{args.data}_smoke' if args.smoke else args.data)
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    try:
        failed = reproduce(args)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    if failed:
        sys.exit(f'{len(failed)} trainings failed or could not begin: ' + '; '.join(map(str, failed)))


def reproduce(args: argparse.Namespace) -> List[Run]:
    """Does what the options say.

    Returns:
        list[Run]: The trainings that failed, or could not begin.

    Raises:
        OSError: Files cannot be read or written, or the folder is in use.
        ValueError: The options, or what is in the folder, are not for the table.
    """
    others = results_of_files(args.results)
    table = with_results(table_of(args), [*results_in(args.out), *others], args.out)
    runs = runs_of(table, args)
    wanted = chosen(runs, args)
    if others:
        with locked(args.out):
            take_over(runs, others)
    for run in runs:
        if run in wanted or run.result is not None:
            run.check_folder()
    for run in wanted:
        run.check_start()
    with in_one_line():  # of networks and images that cannot be built
        print(progress(wanted, args.jobs), flush=True)
    if args.list:
        for run in wanted:
            state = 'done' if run.result else f'{run.epochs_done} epochs done' if run.epochs_done else 'not begun'
            print(f'  {run}: {state}')
        return []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the trainings too

    def write() -> Path:
        results = [run.result for run in runs if run.result is not None]
        write_json(args.out / f'{args.table}.json', results)
        return write_page(args.out, args.table, table, runs, args.data_name or WORDS[args.data])

    def tell(run: Run, sentence: str) -> None:
        try:
            write()
            print(f'{run}: {sentence}; {progress(wanted, args.jobs)}', flush=True)
        except Exception as error:  # the trainings go on, and the page is written again at the end
            print(f'{run}: {sentence}; the page was not written ({one_line(error)})', flush=True)

    with locked(args.out) as lock:
        with in_one_line():
            check_images([run for run in wanted if run.result is None])
        failed = train(wanted, args.jobs, args.threads, lock, tell)
        print(write())
    return failed


@contextmanager
def in_one_line() -> Iterator[None]:
    """Ends the tool with a sentence where something else than this package may fail."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        sys.exit(one_line(error, folder_option='--data-root FOLDER'))


if __name__ == '__main__':
    MMLogger.get_instance('mmengine', log_level='ERROR')  # its progress alone
    warnings.filterwarnings('ignore', 'pkg_resources is deprecated')  # mmengine imports it again for every config
    main()
