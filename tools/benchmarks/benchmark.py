#!/usr/bin/env python
"""How fast the models of this package are, and how much memory they take, against the original and other models.

Prints a table for each group of measurements. See docs/benchmarks.md for what is measured and how.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Dict, List, Sequence

from cost_curve import draw
from groups import GROUPS
from report import page, tables
from settings import DTYPES, Settings
from timing import copy_rate, matrix_rate


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--only',
        nargs='+',
        choices=list(GROUPS),
        metavar='GROUP',
        help=f'some groups of {", ".join(GROUPS)} (default: all)',
    )
    parser.add_argument(
        '--quick',
        action='store_true',
        help='small models and one repetition: to see that everything runs, not to measure',
    )
    parser.add_argument('--device', choices=['cpu', 'cuda'], default='cpu', help='default: cpu')
    parser.add_argument(
        '--dtype', choices=list(DTYPES), default='float32', help='bfloat16 is by autocast (default: float32)'
    )
    parser.add_argument(
        '--from',
        nargs='+',
        type=Path,
        metavar='FILE.json',
        dest='runs',
        default=[],
        help='measures nothing: the tables are those of earlier runs',
    )
    parser.add_argument('--out', type=Path, metavar='FILE.json', help='where all figures go')
    parser.add_argument(
        '--markdown',
        type=Path,
        metavar='FILE.md',
        help='where a page with the tables goes, with its figure beside it in images/',
    )
    args = parser.parse_args()
    if args.runs and (args.only or args.out):
        parser.error('--from measures nothing: leave --only and --out away')
    return args


def measure(settings: Settings, names: Sequence[str]) -> Dict[str, Any]:
    """Measures some groups.

    Returns:
        dict: ``settings``, with the rates of the machine, and ``groups``, the rows by group.
    """
    settings.start()
    rates = dict(
        matrix_rate=matrix_rate(settings.device, settings.dtype, settings.quick),
        copy_rate=copy_rate(settings.device, settings.quick),
    )
    groups = {}
    for name in names:
        print(f'Measuring {name} …', flush=True)
        groups[name] = GROUPS[name].measure(settings)
    return dict(settings={**settings.describe(), **rates}, groups=groups)


def merge(runs: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Runs with the same settings become one, so that groups can be measured one at a time; the last rates are kept."""
    merged = {}
    for run in runs:
        same = json.dumps({name: value for name, value in run['settings'].items() if not name.endswith('_rate')})
        into = merged.setdefault(same, dict(settings={}, groups={}))
        into['settings'].update(run['settings'])
        into['groups'].update(run['groups'])
    return list(merged.values())


def write_page(runs: Sequence[Dict[str, Any]], path: Path) -> None:
    """The page, and the figure of the first run with the group ``cost``."""
    figure = path.parent / 'images/attention_cost.svg'
    path.parent.mkdir(parents=True, exist_ok=True)
    for run in runs:
        if 'cost' in run['groups']:
            draw(run['groups']['cost'][0]['points'], figure)
            break
    path.write_text(page(runs, figure, path))
    print(f'Saved {path}')


def main() -> None:
    args = parse_args()
    if args.runs:
        runs = merge([json.loads(path.read_text()) for path in args.runs])
    else:
        everything = args.device == 'cuda' or args.quick
        names = args.only or [name for name, group in GROUPS.items() if everything or not group.cuda_only]
        runs = [measure(Settings(args.device, args.dtype, args.quick), names)]
    for run in runs:
        print(f'\n{tables(run)}')
    if args.out:
        args.out.write_text(json.dumps(runs[0], indent=1) + '\n')
        print(f'Saved {args.out}')
    if args.markdown:
        write_page(runs, args.markdown)


if __name__ == '__main__':
    main()
