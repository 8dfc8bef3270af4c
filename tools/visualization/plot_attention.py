#!/usr/bin/env python
"""Draws what the heads of a model attend to (C20, Figures 2 to 14), as a PNG or an SVG.

  plot_attention.py CONFIG CHECKPOINT --figure centers --out centers.png
  plot_attention.py CONFIG CHECKPOINT --figure content --image 3 --query 4 2 --out image.svg
  plot_attention.py --figure movement --runs work_dirs/sa_quadratic_digits --out movement.png
  plot_attention.py --figure accuracy --runs quadratic=work_dirs/q learned=work_dirs/l --out accuracy.png

centers        the centres of the heads with their 50% and 90% contours, one panel a layer
probabilities  the probabilities around a query, layers x heads
content        attention by content on the whole grid, mean over images or, with --image, of one image
movement       the centres over a training with AttentionVisualizationHook, whose folder is --runs
accuracy       the accuracy of several trainings, whose folders are --runs

Where a layer has no term of position alone, centers and probabilities are those of the mean over images.
"""
import argparse
import sys
from pathlib import Path
from typing import List, Tuple

import mmcv
import numpy as np
import torch
from mmengine.config import Config, DictAction
from mmengine.dataset import Compose
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import load_checkpoint
from mmpretrain.registry import DATASETS, TRANSFORMS
from torch import Tensor, nn

import attncnn_plugin  # noqa: F401
from attncnn_plugin.visualization.attention_maps import (attention_layers, attention_probs_of, grid_of,
                                                         mean_attention_probs_of, position_probs)
from attncnn_plugin.visualization.figures import (plot_attention_centers, plot_attention_probs,
                                                  plot_center_movement)
from attncnn_plugin.visualization.style import save_figure
from attncnn_plugin.visualization.training_curves import plot_metric, read_centers

OF_MODELS, OF_RUNS = ('centers', 'probabilities', 'content'), ('movement', 'accuracy')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', nargs='?', help='config of the model')
    parser.add_argument('checkpoint', nargs='?', help='checkpoint of the model')
    parser.add_argument('--figure', choices=OF_MODELS + OF_RUNS, required=True)
    parser.add_argument('--out', required=True, help='the picture, *.png or *.svg')
    parser.add_argument('--query', nargs=2, type=int, metavar=('ROW', 'COLUMN'),
                        help='query in tokens, from 0 (default: the middle of the grid)')
    parser.add_argument('--zoom', type=int, default=7,
                        help='rows and columns around the query, for probabilities (default: 7)')
    parser.add_argument('--image', help='one image in place of the mean: a file, or a number in the test set')
    parser.add_argument('--num-images', type=int, default=100,
                        help='images of the test set for the mean (default: 100)')
    parser.add_argument('--image-size', nargs=2, type=int, metavar=('HEIGHT', 'WIDTH'),
                        help='size of an image, for attention by position alone (default: that of the config)')
    parser.add_argument('--runs', nargs='+', default=[], metavar='[LABEL=]DIR',
                        help='work_dirs of trainings, for movement and accuracy')
    parser.add_argument('--metric', default='accuracy/top1', help='metric for accuracy (default: accuracy/top1)')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides settings of the config: k=v')
    args = parser.parse_args()
    if args.figure in OF_MODELS and not args.checkpoint:
        parser.error(f'--figure {args.figure} is of a model: give CONFIG and CHECKPOINT')
    if args.figure in OF_RUNS and not args.runs or args.figure == 'movement' and len(args.runs) > 1:
        parser.error(f'--figure {args.figure} is of {"one training" if args.figure == "movement" else "trainings"}: '
                     'give --runs DIR')
    if Path(args.out).suffix not in ('.png', '.svg'):
        parser.error(f'--out {args.out} must end in .png or .svg')
    return args


def load(args: argparse.Namespace) -> Tuple[Config, nn.Module]:
    config = Config.fromfile(args.config)
    config.merge_from_dict(args.cfg_options or {})
    init_default_scope(config.get('default_scope', 'mmpretrain'))
    settings = config.model
    if config.get('data_preprocessor') and 'data_preprocessor' not in settings:
        settings = dict(settings, data_preprocessor=dict(config.data_preprocessor))
    model = MODELS.build(settings)
    load_checkpoint(model, args.checkpoint, map_location='cpu', strict=True)
    return config, model


def read_images(args: argparse.Namespace, config: Config, model: nn.Module) -> List[Tensor]:
    """The image that was chosen, or the first ones of the test set, ``(C, H, W)``, not normalized yet."""
    settings = config.test_dataloader.dataset
    if args.image is not None and not args.image.isdecimal():
        # The pipeline is that of the test set; the file is in the place of its images.
        grey = len(config.get('data_preprocessor', {}).get('mean', [0, 0, 0])) == 1
        image = mmcv.imread(args.image, flag='grayscale' if grey else 'color',
                            channel_order='bgr' if model.data_preprocessor.to_rgb else 'rgb')
        pipeline = Compose([
            TRANSFORMS.build(step) for step in settings.pipeline if not step['type'].startswith('LoadImage')])
        return [pipeline(dict(img=image, img_shape=image.shape[:2], ori_shape=image.shape[:2]))['inputs']]
    dataset = DATASETS.build(settings)
    numbers = range(min(args.num_images, len(dataset))) if args.image is None else [int(args.image)]
    if args.image is not None and numbers[0] >= len(dataset):
        sys.exit(f'--image {args.image} must be a file, or below {len(dataset)}, the size of the test set')
    return [dataset[number]['inputs'] for number in numbers]


def blank_image(args: argparse.Namespace, config: Config) -> Tensor:
    """An image that says how large the grid is."""
    backbone = config.model.get('backbone', {})
    size = args.image_size or backbone.get('img_size')
    if size is None:
        sys.exit(f'{args.config} has no img_size in its backbone: give --image-size HEIGHT WIDTH')
    size = (size, size) if isinstance(size, int) else tuple(size)
    return torch.zeros(1, backbone.get('in_channels', 3), *size)


def shown(model: nn.Module, image: Tensor) -> np.ndarray:
    """An image for the eye, ``(H, W, 3)``, uint8, red first."""
    image = image.byte().permute(1, 2, 0).numpy()
    if model.data_preprocessor.to_rgb:
        image = image[..., ::-1]  # it is blue first, until the model has it
    return np.broadcast_to(image, (*image.shape[:2], 3))


def draw_model(args: argparse.Namespace):
    config, model = load(args)
    layers = attention_layers(model)
    if not layers:
        sys.exit(f'{args.checkpoint} has no attention layers of this package: a CMHSA has them from its transition on')
    query = args.query and tuple(args.query)
    positions = None
    if args.figure != 'content':
        size = grid_of(model, blank_image(args, config))
        positions = {name: position_probs(layer, *size) for name, layer in layers.items()}
    if positions is None or None in positions.values():
        raw = read_images(args, config, model)
        images = model.data_preprocessor(dict(inputs=raw), False)['inputs']
        size = grid_of(model, images)
        by_content = mean_attention_probs_of(model, images) if args.image is None else {
            name: probs[0] for name, probs in attention_probs_of(model, images).items()}
        positions = positions or by_content
        positions = {name: by_content[name] if probs is None else probs for name, probs in positions.items()}
    if args.figure == 'centers':
        return plot_attention_centers(model, *size, query=query, probs=positions)
    if args.figure == 'probabilities':
        return plot_attention_probs(positions, *size, query, args.zoom)
    if not positions:
        sys.exit(f'{args.config} has attention by position alone: --figure probabilities draws it')
    return plot_attention_probs(
        positions, *size, query, None, None if args.image is None else shown(model, raw[0]))


def labelled(runs: List[str]) -> dict:
    """``['a=work_dirs/x', 'work_dirs/y']`` as ``{'a': 'work_dirs/x', 'y': 'work_dirs/y'}``."""
    pairs = [run.split('=', 1) if '=' in run and not Path(run).exists() else (Path(run).resolve().name, run)
             for run in runs]
    if len({label for label, _ in pairs}) < len(pairs):
        sys.exit(f'--runs {" ".join(runs)} have the same name: give LABEL=DIR')
    return dict(pairs)


def main() -> None:
    args = parse_args()
    try:
        if args.figure == 'movement':
            figure = plot_center_movement(read_centers(args.runs[0]))
        elif args.figure == 'accuracy':
            figure = plot_metric(labelled(args.runs), args.metric)
        else:
            figure = draw_model(args)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    save_figure(figure, args.out)
    print(f'Saved {args.out}')


if __name__ == '__main__':
    main()
