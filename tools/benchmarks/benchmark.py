#!/usr/bin/env python
"""How fast the models of this package are, and how much memory they take, against the original and other models.

Prints a table for each group of measurements. See docs/benchmarks.md for what is measured and how.
"""

import argparse
from pathlib import Path

import torch
from groups import GROUPS
from models import Settings
from page import machine, section, update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--only',
        nargs='+',
        choices=list(GROUPS),
        default=list(GROUPS),
        metavar='GROUP',
        help=f'some groups of {", ".join(GROUPS)} (default: all)',
    )
    parser.add_argument('--page', type=Path, metavar='FILE.md', help='a page whose tables of these groups are replaced')
    parser.add_argument('--device', choices=['cpu', 'cuda'], default='cpu', help='default: cpu')
    parser.add_argument('--quick', action='store_true', help='small models, one call each: to see that everything runs')
    args = parser.parse_args()
    settings = Settings(args.device, args.quick)
    where = machine(settings)
    for name in args.only:
        torch.manual_seed(0)
        cells = {}
        for row, column, ratio in GROUPS[name].measure(settings):
            print(f'{name}: {row}, {column}: {ratio}', flush=True)
            cells[row, column] = str(ratio)
        text = section(name, cells, where)
        print(f'\n{text}', flush=True)
        if args.page:
            update(args.page, {name: text})


if __name__ == '__main__':
    main()
