#!/usr/bin/env python
"""Prints what the heads of a checkpoint do, layer by layer: where they look, whether they do anything, what they form.

For a config of this plugin and its checkpoint, or for a vision transformer of timm by name:

    analyze_heads.py configs/sa_quadratic_digits.py work_dirs/sa_quadratic_digits/epoch_30.pth --json heads.json
    analyze_heads.py --timm vit_base_patch16_224 --pretrained --images folder

Where scores depend on content, attention is averaged over images: files of a folder, or the config's test dataset.
"""
import argparse
import json
import sys
from pathlib import Path
from pickle import UnpicklingError
from typing import Optional, Tuple

import torch
from PIL import Image
from timm.utils import ParseKwargs
from torch import Tensor, nn

import attncnn_plugin  # noqa: F401
from attncnn_plugin.utils.frameworks import import_problem, require_mmpretrain
from attncnn_plugin.utils.images import image_files
from attncnn_plugin.visualization.attention_maps import (attention_layers, depends_on_content,
                                                         require_attention_layers)
from attncnn_plugin.visualization.head_report_model import model_reports, reports_to_dict, reports_to_text
from attncnn_plugin.visualization.head_report_timm import timm_reports


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', nargs='?', help='config of the model')
    parser.add_argument('weights', nargs='?', metavar='checkpoint', help='checkpoint of the model')
    parser.add_argument('--json', metavar='OUT', help='also write the report to this file')
    parser.add_argument('--images', metavar='FOLDER', help='images to average over, with subfolders (default: the '
                        'test dataset of the config)')
    parser.add_argument('--num-images', type=int, default=100, help='images, evenly spread (default: 100)')
    parser.add_argument('--size', nargs=2, type=int, metavar=('HEIGHT', 'WIDTH'), help='grid in tokens on which '
                        "positions are judged (default: that of the config's img_size)")
    parser.add_argument('--tolerance', type=float, default=1e-6, help='residual up to which a shift is expressible '
                        '(default: 1e-6)')
    if import_problem() is None:
        from mmengine.config import DictAction
        parser.add_argument('--cfg-options', nargs='+', default={}, action=DictAction,
                            help='overrides settings of the config: k=v')
    parser.add_argument('--timm', metavar='NAME', help='a model of timm in the place of config and checkpoint')
    parser.add_argument('--checkpoint', metavar='FILE', help='with --timm: its checkpoint')
    parser.add_argument('--pretrained', action='store_true', help="with --timm: timm's pretrained weights")
    parser.add_argument('--model-kwargs', nargs='+', default={}, action=ParseKwargs,
                        help='with --timm: settings of the model: k=v')
    args = parser.parse_args()
    if args.timm is None:
        if args.config is None or args.weights is None:
            parser.error('a config and a checkpoint are needed, or --timm NAME')
        if args.checkpoint or args.pretrained or args.model_kwargs:
            parser.error('--checkpoint, --pretrained and --model-kwargs are for --timm')
    elif args.config is not None or args.size is not None or getattr(args, 'cfg_options', None):
        parser.error('--timm takes the place of the config, its checkpoint, --size and --cfg-options')
    elif args.images is None:
        parser.error('--timm needs --images FOLDER')
    if args.num_images < 1:
        parser.error(f'--num-images {args.num_images} must be at least 1')
    return args


def model_of_timm(args: argparse.Namespace) -> Tuple[nn.Module, Tensor]:
    """The model, and images as it takes them."""
    import timm
    from timm.data import create_transform, resolve_model_data_config
    options = {'checkpoint_path': args.checkpoint} if args.checkpoint else {}
    model = timm.create_model(args.timm, pretrained=args.pretrained, **options, **args.model_kwargs).eval()
    settings = resolve_model_data_config(model, args=args.model_kwargs)
    transform = create_transform(**settings, is_training=False)
    mode = 'L' if settings['input_size'][0] == 1 else 'RGB'
    return model, torch.stack([
        transform(Image.open(path).convert(mode)) for path in image_files(args.images, args.num_images)])


def model_of_config(args: argparse.Namespace) -> Tuple[nn.Module, Optional[Tensor], Optional[Tuple[int, int]]]:
    """The model, images if its attention depends on content, and the grid on which positions are judged."""
    require_mmpretrain()
    from attncnn_plugin.utils.config_model import ConfigModel
    loaded = ConfigModel(args.config, args.weights, args.cfg_options)
    size = tuple(args.size) if args.size else None
    if not any(map(depends_on_content, require_attention_layers(loaded.model).values())):
        return loaded.model, None, size or loaded.grid
    images = loaded.read_folder(args.images, args.num_images) if args.images else loaded.test_images(args.num_images)
    return loaded.model, loaded.inputs(images), size


def main() -> None:
    args = parse_args()
    try:
        if args.timm is None:
            model, images, size = model_of_config(args)
            reports = model_reports(model, images, size, args.tolerance)
            origin = dict(model=args.config, checkpoint=args.weights)
        else:
            model, images = model_of_timm(args)
            report = model_reports if attention_layers(model) else timm_reports
            reports = report(model, images, tolerance=args.tolerance)
            origin = dict(model=args.timm, checkpoint=args.checkpoint or ('pretrained' if args.pretrained else None))
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, UnpicklingError) as error:
        sys.exit(str(error))
    print(reports_to_text(reports))
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        content = reports_to_dict(reports, **origin, num_images=0 if images is None else len(images))
        Path(args.json).write_text(json.dumps(content, indent=1, allow_nan=False) + '\n')
        print(f'Saved {args.json}')


if __name__ == '__main__':
    main()
