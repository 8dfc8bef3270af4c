#!/usr/bin/env python
"""Writes one page for the browser that shows where every head of a model attends to, of any pixel of some images."""

import argparse
import sys
from pathlib import Path
from pickle import UnpicklingError

from mmengine.config import DictAction

import attncnn_plugin  # noqa: F401
from attncnn_plugin.apis.config_model import ConfigModel
from attncnn_plugin.explorer import explorer_page


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config of the model')
    parser.add_argument('checkpoint', help='checkpoint of the model')
    parser.add_argument(
        'images',
        nargs='+',
        metavar='image',
        help='image files, .npy arrays of uint8, or numbers of images in the test set',
    )
    parser.add_argument('--out', default='explorer.html', help='where the page goes (default: explorer.html)')
    parser.add_argument('--max-size', type=float, default=10.0, help='what the page may take, in MB (default: 10)')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides settings of the config: k=v')
    args = parser.parse_args()
    if args.max_size <= 0:
        parser.error(f'--max-size {args.max_size} must be above 0')
    if Path(args.out).is_dir():
        parser.error(f'--out {args.out} is a folder: name a file in it')
    return args


def main() -> None:
    args = parse_args()
    try:
        loaded = ConfigModel(args.config, args.checkpoint, args.cfg_options)
        images = [loaded.image(which) for which in args.images]
        page = explorer_page(
            loaded.model,
            loaded.inputs(images),
            [loaded.picture(image) for image in images],
            [f'test image {which}' if which.isdecimal() else Path(which).name for which in args.images],
            title=f'{Path(args.config).stem}: what its heads attend to',
            max_bytes=int(args.max_size * 1e6),
        )
    except (OSError, ValueError, UnpicklingError) as error:
        sys.exit(str(error))
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding='utf-8')
    print(f'Saved {out}, {out.stat().st_size / 1e6:.1f} MB')


if __name__ == '__main__':
    main()
