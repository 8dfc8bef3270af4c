#!/usr/bin/env python
"""Prints a report of the heads of a checkpoint, layer by layer: where they look, and what convolution they form.

For a config and its checkpoint, of a model of this plugin or a vision transformer of mmpretrain, or for a vision
transformer of timm by name:

    analyze_heads.py configs/sa_quadratic_digits.py work_dirs/sa_quadratic_digits/epoch_30.pth --json heads.json
    analyze_heads.py configs/deit_small_cifar100.py work_dirs/deit_small_cifar100/epoch_400.pth
    analyze_heads.py --timm vit_base_patch16_224 --pretrained --images folder

Where scores depend on content, attention is averaged over images: files of a folder, or the config's test dataset.
Where they depend on position alone, a model of timm needs no images but the size of a grid: --size.
"""

import argparse
import json
import sys
from pathlib import Path
from pickle import UnpicklingError
from statistics import fmean
from typing import List, Tuple

import torch
from PIL import Image
from timm.layers import to_2tuple
from timm.utils import ParseKwargs
from torch import Tensor, nn

import attncnn_plugin  # noqa: F401
from attncnn_plugin.analysis import (
    LayerReport,
    attention_layers,
    is_vit,
    model_reports,
    reports_to_dict,
    reports_to_text,
    require_attention_layers,
    vit_reports,
)
from attncnn_plugin.apis.images import image_files
from attncnn_plugin.utils.checkpoint_files import load_from_local
from attncnn_plugin.utils.frameworks import import_problem, require_mmpretrain


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', nargs='?', help='config of the model')
    parser.add_argument('weights', nargs='?', metavar='checkpoint', help='checkpoint of the model')
    parser.add_argument('--json', metavar='OUT', help='also write the report to this file')
    parser.add_argument(
        '--images',
        metavar='FOLDER',
        help='images to average over, with subfolders (default: the test dataset of the config)',
    )
    parser.add_argument('--num-images', type=int, default=100, help='images, evenly spread (default: 100)')
    parser.add_argument(
        '--size',
        nargs=2,
        type=int,
        metavar=('HEIGHT', 'WIDTH'),
        help='grid in tokens for attention by position alone; means over images are on the grid of the images '
        "(default: that of the images, or of the config's img_size)",
    )
    parser.add_argument(
        '--tolerance',
        type=float,
        default=1e-6,
        help='residual up to which a shift is expressible, at least 1e-7 (default: 1e-6)',
    )
    if import_problem() is None:
        from mmengine.config import DictAction

        parser.add_argument(
            '--cfg-options', nargs='+', default={}, action=DictAction, help='overrides settings of the config: k=v'
        )
    parser.add_argument('--timm', metavar='NAME', help='a model of timm in the place of config and checkpoint')
    parser.add_argument('--checkpoint', metavar='FILE', help='with --timm: its checkpoint')
    parser.add_argument('--pretrained', action='store_true', help="with --timm: timm's pretrained weights")
    parser.add_argument(
        '--model-kwargs', nargs='+', default={}, action=ParseKwargs, help='with --timm: settings of the model: k=v'
    )
    args = parser.parse_args()
    if args.timm is None:
        if args.config is None or args.weights is None:
            parser.error('a config and a checkpoint are needed, or --timm NAME')
        if args.checkpoint or args.pretrained or args.model_kwargs:
            parser.error('--checkpoint, --pretrained and --model-kwargs are for --timm')
    elif args.config is not None or getattr(args, 'cfg_options', None):
        parser.error('--timm takes the place of the config, its checkpoint and --cfg-options')
    elif args.images is None and args.size is None:
        parser.error('--timm needs --images FOLDER, or --size where attention is by position alone')
    if args.num_images < 1:
        parser.error(f'--num-images {args.num_images} must be at least 1')
    if args.json and Path(args.json).is_dir():
        parser.error(f'--json {args.json} is a folder, but the report is one file')
    return args


def reports_of_timm(args: argparse.Namespace) -> Tuple[List[LayerReport], int]:
    """The reports of a model of timm, and the number of images that they are means over."""
    import timm

    model = timm.create_model(args.timm, pretrained=args.pretrained, **args.model_kwargs).eval()
    if args.checkpoint:
        if Path(args.checkpoint).suffix not in ('.safetensors', '.npz', '.npy'):  # timm's other formats
            load_from_local(args.checkpoint, mmap=True)  # refuses damaged and malicious files
        timm.models.load_checkpoint(model, args.checkpoint, weights_only=True)
    elif not args.pretrained:
        print(f'The weights of {args.timm} are random: give --pretrained or --checkpoint', file=sys.stderr)
    images = None if args.images is None else images_of_timm(model, args)
    number = 0 if images is None else len(images)
    size = tuple(args.size) if args.size else None
    if attention_layers(model):
        return model_reports(model, images, size, args.tolerance), number
    if images is None or size is not None:
        raise ValueError(
            f'--timm {args.timm} has attention that depends on images: give --images FOLDER, which say '
            'the grid, and no --size'
        )
    return vit_reports(model, images, args.tolerance), number


def images_of_timm(model: nn.Module, args: argparse.Namespace) -> Tensor:
    """Images as the model takes them, ``(B, C, H, W)``."""
    from timm.data import create_transform, resolve_model_data_config

    settings = resolve_model_data_config(model)
    channels, *size = settings['input_size']
    channels, size = args.model_kwargs.get('in_chans', channels), args.model_kwargs.get('img_size', size)
    settings['input_size'] = (channels, *to_2tuple(size))
    if channels == 1:
        settings.update({name: (fmean(settings[name]),) for name in ('mean', 'std')})
    transform = create_transform(**settings, is_training=False)
    mode = 'L' if channels == 1 else 'RGB'
    return torch.stack(
        [transform(Image.open(path).convert(mode)) for path in image_files(args.images, args.num_images)]
    )


def reports_of_config(args: argparse.Namespace) -> Tuple[List[LayerReport], int]:
    """The reports of the model of a config, and the number of images that they are means over."""
    require_mmpretrain()
    from attncnn_plugin.apis.config_model import ConfigModel

    loaded = ConfigModel(args.config, args.weights, args.cfg_options)
    size = tuple(args.size) if args.size else None
    layers = attention_layers(loaded.model)
    if not layers and is_vit(loaded.model):
        if size is not None:
            raise ValueError(f'{args.config} has attention that depends on images, which say the grid: give no --size')
        images = images_of_config(loaded, args)
        return vit_reports(loaded.model, images, args.tolerance), len(images)
    need_images = any(layer.depends_on_content or layer.window is not None for layer in layers.values())
    if layers and not need_images:
        return model_reports(loaded.model, None, size or loaded.grid, args.tolerance), 0
    require_attention_layers(loaded.model)  # before images are looked for
    images = images_of_config(loaded, args)
    return model_reports(loaded.model, images, size, args.tolerance), len(images)


def images_of_config(loaded, args: argparse.Namespace) -> Tensor:
    """Images of a folder or of the test set, as the model of a ``ConfigModel`` takes them, ``(B, C, H, W)``."""
    number = args.num_images
    return loaded.inputs(loaded.read_folder(args.images, number) if args.images else loaded.test_images(number))


def main() -> None:
    args = parse_args()
    try:
        if args.json:
            Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        reports, num_images = reports_of_config(args) if args.timm is None else reports_of_timm(args)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, UnpicklingError) as error:
        sys.exit(str(error))
    print(reports_to_text(reports))
    if args.json:
        origin = (
            dict(model=args.config, checkpoint=args.weights)
            if args.timm is None
            else dict(model=args.timm, checkpoint=args.checkpoint or ('pretrained' if args.pretrained else None))
        )
        content = reports_to_dict(reports, **origin, num_images=num_images)
        Path(args.json).write_text(json.dumps(content, indent=1, allow_nan=False) + '\n')
        print(f'Saved {args.json}')


if __name__ == '__main__':
    main()
