#!/usr/bin/env python
"""Draws the attention of a model's heads, as Cordonnier et al. 2020 do in Figures 2 to 14, as a PNG or an SVG.

Curves of trainings too, as there in Figures 2 and 13, and in Figure 2 of Li et al. 2021.

  plot_attention.py CONFIG CHECKPOINT --figure centers --out centers.png
  plot_attention.py CONFIG CHECKPOINT --figure content --image 3 --query 4 2 --out image.svg
  plot_attention.py --timm vit_tiny_patch16_224 --pretrained --figure attention --image photo.jpg --out photo.png
  plot_attention.py --hf vit_pruned --figure centers --images folder --out centers.png
  plot_attention.py --figure distance --reports scratch=a.json convolution=b.json --out distance.png
  plot_attention.py --figure movement --runs work_dirs/sa_quadratic_digits --out movement.png
  plot_attention.py --figure accuracy --runs quadratic=work_dirs/q learned=work_dirs/l --out accuracy.png
  plot_attention.py --figure accuracy --runs whole=work_dirs/g pruned=work_dirs/p --offsets pruned=300 --out pruned.png

attention      where the class token of an image looks, in each head of the last layer and through all layers
heads          what each head attends to from the middle of the grid, mean over images, layers x heads
centers        the centres of the heads with their 50% and 90% contours, one panel a layer
probabilities  the probabilities around a query, layers x heads
content        attention by content on the whole grid, mean over images or, with --image, of one image
distance       how far and how locally the heads of each layer look, of one model or several, whose reports by
               analyze_heads.py --json are --reports
movement       the centres over a training with AttentionVisualizationHook, whose folder is --runs
accuracy       the accuracy of several trainings, whose folders are --runs
loss           their validation loss

Models are of this plugin, or vision transformers of mmpretrain, timm or Hugging Face, whose attention is that
of patches to patches. Where a layer has no term of position alone, centers and probabilities are those of the mean
over images.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import Dict, List

from torch import Tensor

warnings.filterwarnings('ignore', 'Fail to import|pkg_resources is deprecated', module='mmcv|mmengine|importlib')

from attncnn_plugin.analysis import mean_attention, read_centers
from attncnn_plugin.analysis.recorder import attention_layers
from attncnn_plugin.loaded_model import LoadedModel
from attncnn_plugin.model_options import add_image_options, add_model_options, check_model_options, load_model

try:
    from attncnn_plugin.visualization import (
        plot_attention,
        plot_attention_centers,
        plot_attention_distance,
        plot_attention_probs,
        plot_center_movement,
        plot_heads,
        plot_metric,
        save_figure,
    )
except ImportError as error:  # of matplotlib
    sys.exit(str(error))

METRICS = {'accuracy': 'accuracy/top1', 'loss': 'cross_entropy/mean'}
OF_MODELS = ('attention', 'heads', 'centers', 'probabilities', 'content')
OF_REPORTS, OF_RUNS = ('distance',), ('movement', *METRICS)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument('--figure', choices=OF_MODELS + OF_REPORTS + OF_RUNS, required=True)
    parser.add_argument('--out', required=True, help='the picture, *.png, *.svg or *.pdf')
    parser.add_argument(
        '--query',
        nargs=2,
        type=int,
        metavar=('ROW', 'COLUMN'),
        help='query in tokens, from 0 (default: the middle of the grid)',
    )
    parser.add_argument(
        '--zoom', type=int, default=7, help='rows and columns around the query, for probabilities; 0: all (default: 7)'
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument('--image', help='one image in place of the mean: a file, or a number in the test set')
    add_image_options(parser, which)
    parser.add_argument(
        '--reports', nargs='+', default=[], metavar='[LABEL=]JSON', help='reports of models, for distance'
    )
    parser.add_argument(
        '--runs', nargs='+', default=[], metavar='[LABEL=]DIR', help='work_dirs of trainings, for figures of these'
    )
    parser.add_argument(
        '--offsets',
        nargs='+',
        default=[],
        metavar='LABEL=EPOCH',
        help='where the curves of trainings that go on from another begin, for accuracy and loss (default: 0)',
    )
    parser.add_argument(
        '--metric', help='another metric of the logs (default: accuracy/top1 for accuracy, cross_entropy/mean for loss)'
    )
    args = parser.parse_args()
    if args.figure in OF_MODELS:
        check_model_options(parser, args, args.config, args.weights)
    if args.figure == 'attention' and args.image is None:
        parser.error('--figure attention is of one image: give --image')
    if args.figure in ('attention', 'heads') and (args.query or args.size):
        parser.error('--query and --size are for --figure centers, probabilities and content')
    if args.figure in OF_REPORTS and not args.reports:
        parser.error(f'--figure {args.figure} is of reports: give --reports JSON, of analyze_heads.py --json')
    if args.figure in OF_RUNS and not args.runs or args.figure == 'movement' and len(args.runs) > 1:
        parser.error(
            f'--figure {args.figure} is of {"one training" if args.figure == "movement" else "trainings"}: '
            'give --runs DIR'
        )
    if args.num_images < 1:
        parser.error(f'--num-images {args.num_images} must be at least 1')
    if Path(args.out).suffix not in ('.png', '.svg', '.pdf'):
        parser.error(f'--out {args.out} must end in .png, .svg or .pdf')
    return args


def draw_model(args: argparse.Namespace):
    loaded = load_model(args, args.config, args.weights)
    if args.figure in ('attention', 'heads'):
        draw = plot_heads if args.figure == 'heads' else plot_attention
        return draw(loaded.model, loaded.inputs(choose_images(args, loaded)))
    layers = list(attention_layers(loaded.model).values())
    by_position = layers and all(layer.has_position_scores for layer in layers)
    part = 'position' if by_position and args.figure != 'content' else 'all'
    if args.figure == 'content' and layers and not any(layer.depends_on_content for layer in layers):
        raise ValueError(f'{loaded.name} has attention by position alone: --figure probabilities draws it')
    images = None
    if part == 'position' and all(layer.window is None for layer in layers):
        check_unused(args, 'image', 'is for attention that depends on images')
        check_unused(args, 'images', 'is for attention that depends on images')
        maps = mean_attention(loaded.model, size=args.size or loaded.grid, part=part)
    else:
        check_unused(args, 'size', 'is for attention by position alone over one grid')
        images = choose_images(args, loaded)
        maps = mean_attention(loaded.model, loaded.inputs(images), part=part)
    if args.figure == 'centers':
        return plot_attention_centers(maps, query=args.query, numbers=loaded.head_numbers)
    if args.figure == 'probabilities':
        return plot_attention_probs(maps, args.query, args.zoom or None, numbers=loaded.head_numbers)
    maps = {name: own for name, own in maps.items() if own.num_images}
    if args.image is not None:
        query = next(iter(maps.values())).of_query(args.query)[1]
        return plot_attention(loaded.model, loaded.inputs(images), list(maps), query, True, loaded.head_numbers)
    return plot_attention_probs(maps, args.query, zoom=None, numbers=loaded.head_numbers)


def check_unused(args: argparse.Namespace, name: str, purpose: str) -> None:
    if getattr(args, name) is not None:
        raise ValueError(
            f'--{name} {purpose}, which --figure {args.figure} of {args.config or args.timm or args.hf} does not show'
        )


def choose_images(args: argparse.Namespace, loaded: LoadedModel) -> List[Tensor]:
    """The image that was chosen, or those that the mean is over."""
    if args.images is not None:
        return loaded.read_folder(args.images, args.num_images)
    return loaded.test_images(args.num_images) if args.image is None else [loaded.image(args.image)]


def numbers_of(offsets: List[str]) -> Dict[str, float]:
    """``['a=300']`` as ``{'a': 300.0}``."""
    try:
        return {label: float(epoch) for label, epoch in (offset.rsplit('=', 1) for offset in offsets)}
    except ValueError:
        sys.exit(f'--offsets {" ".join(offsets)} must be LABEL=EPOCH')


def labelled(option: str, runs: List[str]) -> Dict[str, str]:
    """``['a=work_dirs/x', 'work_dirs/y']`` as ``{'a': 'work_dirs/x', 'y': 'work_dirs/y'}``."""
    pairs = [run.split('=', 1) if '=' in run and not Path(run).exists() else (_name(run), run) for run in runs]
    if len({label for label, _ in pairs}) < len(pairs):
        sys.exit(f'--{option} {" ".join(runs)} have the same name: give LABEL=DIR')
    return dict(pairs)


def read_report(path: str) -> dict:
    """What analyze_heads.py --json wrote."""
    report = json.loads(Path(path).read_text())
    if not isinstance(report, dict) or 'layers' not in report:
        raise ValueError(f'{path} is no report of analyze_heads.py --json')
    return report


def _name(path: str) -> str:
    """What a folder or a report is called."""
    return Path(path).resolve().name.removesuffix('.json')


def main() -> None:
    args = parse_args()
    try:
        if args.figure == 'movement':
            figure = plot_center_movement(read_centers(args.runs[0]))
        elif args.figure == 'distance':
            reports = {label: read_report(path) for label, path in labelled('reports', args.reports).items()}
            figure = plot_attention_distance(reports)
        elif args.figure in METRICS:
            metric = args.metric or METRICS[args.figure]
            figure = plot_metric(labelled('runs', args.runs), metric, numbers_of(args.offsets))
        else:
            figure = draw_model(args)
        save_figure(figure, args.out)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, UnpicklingError) as error:
        sys.exit(str(error))
    print(f'Saved {args.out}')


if __name__ == '__main__':
    main()
