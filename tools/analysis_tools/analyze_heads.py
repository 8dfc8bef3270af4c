#!/usr/bin/env python
"""Prints a report of the heads of a checkpoint, layer by layer: where they look, and what convolution they form.

For a config and its checkpoint, of a model of this plugin or a vision transformer of mmpretrain, or for a vision
transformer of timm by name, or of Hugging Face transformers by its folder:

    analyze_heads.py configs/sa_quadratic_digits.py work_dirs/sa_quadratic_digits/epoch_30.pth --json heads.json
    analyze_heads.py configs/deit_small_cifar100.py work_dirs/deit_small_cifar100/epoch_400.pth
    analyze_heads.py --timm vit_base_patch16_224 --pretrained --images folder
    analyze_heads.py --hf vit_pruned --images folder

Where scores depend on content, attention is averaged over images: files of a folder, or the config's test dataset.
Where they depend only on position, a model of timm needs no images but the size of a grid: --size.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import Tuple

warnings.filterwarnings('ignore', 'Fail to import|pkg_resources is deprecated', module='mmcv|mmengine|importlib')

from attncnn_plugin.analysis import HeadReport, head_report
from attncnn_plugin.analysis.recorder import attention_layers
from attncnn_plugin.loaded_model import LoadedModel
from attncnn_plugin.model_options import add_image_options, add_model_options, check_model_options, load_model

LEGEND = """centre, std: where a head looks, and how wide, in tokens; share: probability of its nearest shift
3x3, 5x5: probability of the tokens around the query; error of a convolution: 0 if the layer is one
"""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_image_options(parser)
    parser.add_argument('--json', metavar='OUT', help='also write the report to this file')
    add_model_options(parser)
    args = parser.parse_args()
    check_model_options(parser, args, args.config, args.weights)
    if (args.timm or args.hf) and args.images is None and args.size is None:
        parser.error(
            f'{"--timm" if args.timm else "--hf"} needs --images FOLDER, or --size for position-only attention'
        )
    if args.images is not None and args.size is not None:
        parser.error('--size is for what depends only on position: give no --images with it')
    if args.num_images < 1:
        parser.error(f'--num-images {args.num_images} must be at least 1')
    if args.json and Path(args.json).is_dir():
        parser.error(f'--json {args.json} is a folder, but the report is one file')
    return args


def report_of(loaded: LoadedModel, args: argparse.Namespace) -> Tuple[HeadReport, int]:
    """The report of a model, and the number of images that it is a mean over."""
    by_position = (
        args.images is None
        and attention_layers(loaded.model)
        and not any(layer.depends_on_content or layer.window for layer in attention_layers(loaded.model).values())
    )
    if args.size or by_position:
        return head_report(loaded.model, size=args.size or loaded.grid), 0
    images = loaded.some_inputs(args.images, args.num_images)
    return head_report(loaded.model, images), len(images)


def main() -> None:
    args = parse_args()
    try:
        if args.json:
            Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        report, num_images = report_of(load_model(args, args.config, args.weights), args)
        print(LEGEND)
        print(report)
        if args.json:
            origin = (
                dict(model=args.timm, checkpoint=args.checkpoint or ('pretrained' if args.pretrained else None))
                if args.timm
                else dict(model=args.config or args.hf, checkpoint=args.weights)
            )
            content = report.to_dict(**origin, num_images=num_images)
            Path(args.json).write_text(json.dumps(content, indent=1, allow_nan=False) + '\n')
            print(f'Saved {args.json}')
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, UnpicklingError) as error:
        sys.exit(str(error))


if __name__ == '__main__':
    main()
