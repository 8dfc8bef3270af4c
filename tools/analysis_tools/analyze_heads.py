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
from typing import List, Optional, Tuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from timm.utils import ParseKwargs
from torch import Tensor, nn

import attncnn_plugin  # noqa: F401
from attncnn_plugin.utils.frameworks import import_problem, require_mmpretrain
from attncnn_plugin.visualization.attention_maps import attention_layers, depends_on_content
from attncnn_plugin.visualization.head_report_model import model_reports, reports_to_dict, reports_to_text
from attncnn_plugin.visualization.head_report_timm import timm_reports

SUFFIXES = {'.bmp', '.jpeg', '.jpg', '.png', '.ppm', '.tif', '.tiff', '.webp'}


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


def image_files(folder: str, number: int) -> List[Path]:
    """Image files below a folder, evenly spread over all of them by name."""
    files = sorted(path for path in Path(folder).rglob('*') if path.suffix.lower() in SUFFIXES)
    if not files:
        sys.exit(f'--images {folder} holds no image files ({" ".join(sorted(SUFFIXES))})')
    return [files[i] for i in spread(len(files), number)]


def spread(length: int, number: int) -> List[int]:
    """Evenly spread indices of a sequence, at most all of them."""
    number = min(length, number)
    return [i * length // number for i in range(number)]


def open_image(path: Path, mode: str) -> Image.Image:
    try:
        with Image.open(path) as image:
            return image.convert(mode)
    except (UnidentifiedImageError, OSError) as error:
        sys.exit(f'{path} cannot be read as an image: {error}')


def together(images: List[Tensor]) -> Tensor:
    """Images of one size as a batch."""
    sizes = sorted({tuple(image.shape[-2:]) for image in images})
    if len(sizes) > 1:
        sys.exit(f'the images have {len(sizes)} different sizes after the pipeline, such as {sizes[0]} and {sizes[1]}: '
                 'an average needs one, resize them')
    return torch.cat(images)


def model_of_timm(args: argparse.Namespace) -> Tuple[nn.Module, Tensor]:
    """The model, and images as it takes them."""
    import timm
    from timm.data import create_transform, resolve_model_data_config
    options = {'checkpoint_path': args.checkpoint} if args.checkpoint else {}
    model = timm.create_model(args.timm, pretrained=args.pretrained, **options, **args.model_kwargs).eval()
    settings = resolve_model_data_config(model, args=args.model_kwargs)
    transform = create_transform(**settings, is_training=False)
    mode = 'L' if settings['input_size'][0] == 1 else 'RGB'
    files = image_files(args.images, args.num_images)
    return model, together([transform(open_image(path, mode))[None] for path in files])


def model_of_config(args: argparse.Namespace) -> Tuple[nn.Module, Optional[Tensor], Tuple[int, int]]:
    """The model, images if it needs some, and the grid of tokens."""
    require_mmpretrain()
    from mmengine.config import Config
    from mmengine.registry import MODELS, init_default_scope
    from mmengine.runner import load_checkpoint

    from attncnn_plugin.models.networks import GridNetwork
    config = Config.fromfile(args.config)
    config.merge_from_dict(args.cfg_options)
    init_default_scope(config.get('default_scope', 'mmpretrain'))
    preprocessor = {'type': 'ClsDataPreprocessor', **(config.get('data_preprocessor') or {})}
    model = MODELS.build({'data_preprocessor': preprocessor, **config.model}).eval()
    load_checkpoint(model, args.weights, map_location='cpu', strict=True)
    layers = attention_layers(model)
    networks = [module for module in model.modules() if isinstance(module, GridNetwork)]
    if not layers or len(networks) != 1:
        sys.exit(f'{args.config} with {args.weights} has {len(layers)} attention layers in {len(networks)} networks of '
                 'this plugin, but those of one are reported. Convolutions become attention by a transition (a CMHSA '
                 'in its first phase), vision transformers of timm are for --timm')
    network = networks[0]
    size = tuple(n // network.stem.reduction for n in network.img_size)
    if args.images is None and not any(map(depends_on_content, layers.values())):
        return model, None, size
    return model, images_of_config(args, config, model, config.model.backbone.get('in_channels', 3)), size


def images_of_config(args: argparse.Namespace, config, model: nn.Module, channels: int) -> Tensor:
    """Images after the config's test pipeline, normalized."""
    from mmengine.dataset import Compose, pseudo_collate
    from mmpretrain.registry import DATASETS, TRANSFORMS
    if args.images is None and config.get('test_dataloader') is None:
        sys.exit(f'{args.config} has no test_dataloader: give --images FOLDER')
    if args.images is None:
        try:
            dataset = DATASETS.build(config.test_dataloader.dataset)
            samples = [dataset[i] for i in spread(len(dataset), args.num_images)]
        except Exception as error:  # of any dataset
            sys.exit(f'the test dataset of {args.config} cannot be read ({error}): give --images FOLDER')
    else:
        steps = [step for step in config.test_dataloader.dataset.pipeline if step['type'] != 'LoadImageFromFile']
        pipeline = Compose([TRANSFORMS.build(step) for step in steps])
        samples = []
        for path in image_files(args.images, args.num_images):
            image = np.asarray(open_image(path, 'L' if channels == 1 else 'RGB'))
            if channels == 3 and model.data_preprocessor.to_rgb:  # which then expects what OpenCV loads
                image = image[..., ::-1]
            samples.append(pipeline(dict(img=image.copy(), img_shape=image.shape[:2], ori_shape=image.shape[:2])))
    return together([model.data_preprocessor(pseudo_collate([sample]))['inputs'] for sample in samples])


def main() -> None:
    args = parse_args()
    try:
        if args.timm is None:
            model, images, size = model_of_config(args)
            size = tuple(args.size) if args.size else None if images is not None else size
            reports = model_reports(model, images, size, args.tolerance)
            origin = dict(model=args.config, checkpoint=args.weights)
        else:
            model, images = model_of_timm(args)
            report = model_reports if attention_layers(model) else timm_reports
            reports = report(model, images, tolerance=args.tolerance)
            origin = dict(model=args.timm, checkpoint=args.checkpoint or ('pretrained' if args.pretrained else None))
    except (FileNotFoundError, ImportError, RuntimeError, TypeError, ValueError) as error:
        sys.exit(str(error))
    print(reports_to_text(reports))
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        content = reports_to_dict(reports, **origin, num_images=0 if images is None else len(images))
        Path(args.json).write_text(json.dumps(content, indent=1, allow_nan=False) + '\n')
        print(f'Saved {args.json}')


if __name__ == '__main__':
    main()
