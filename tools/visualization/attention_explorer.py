#!/usr/bin/env python
"""Writes one page for the browser that shows where every head of a model attends to, of any pixel of some images."""

import argparse
import sys
import warnings
from pathlib import Path
from pickle import UnpicklingError

warnings.filterwarnings('ignore', 'Fail to import|pkg_resources is deprecated', module='mmcv|mmengine|importlib')

from attncnn_plugin.explorer import explorer_page
from attncnn_plugin.model_options import add_model_options, check_model_options, load_model


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage='%(prog)s CONFIG CHECKPOINT IMAGE ... [options]\n'
        '       %(prog)s IMAGE ... (--timm NAME | --hf FOLDER) [options]',
    )
    parser.add_argument(
        'words',
        nargs='+',
        metavar='CONFIG CHECKPOINT IMAGE',
        help='config and checkpoint of the model, without --timm and --hf, then image files; with a config also '
        'numbers of images in the test set',
    )
    add_model_options(parser)
    parser.add_argument('--out', default='explorer.html', help='where the page goes (default: explorer.html)')
    parser.add_argument('--about', default='', help='a line on the network for the page, such as its accuracy')
    parser.add_argument('--max-size', type=float, default=10.0, help='what the page may take, in MB (default: 10)')
    args = parser.parse_args()
    args.config, args.weights = None, None
    args.images = args.words
    if not (args.timm or args.hf):
        if len(args.words) < 3:
            parser.error(
                f'{" ".join(args.words)} must be CONFIG CHECKPOINT and an image, or add --timm NAME or --hf FOLDER'
            )
        args.config, args.weights, *args.images = args.words
    check_model_options(parser, args, args.config, args.weights)
    if args.max_size <= 0:
        parser.error(f'--max-size {args.max_size} must be above 0')
    if Path(args.out).is_dir():
        parser.error(f'--out {args.out} is a folder: name a file in it')
    return args


def main() -> None:
    args = parse_args()
    try:
        loaded = load_model(args, args.config, args.weights)
        images = [loaded.image(which) for which in args.images]
        page = explorer_page(
            loaded.model,
            loaded.inputs(images),
            [loaded.picture(image) for image in images],
            [f'test image {which}' if which.isdecimal() else Path(which).name for which in args.images],
            title=f'Attention explorer: {Path(loaded.name).name.removesuffix(".py")}',
            about=args.about,
            max_bytes=int(args.max_size * 1e6),
        )
        out = Path(args.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding='utf-8')
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, UnpicklingError) as error:
        sys.exit(str(error))
    print(f'Saved {out}, {out.stat().st_size / 1e6:.1f} MB')


if __name__ == '__main__':
    main()
