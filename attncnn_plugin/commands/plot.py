"""``attncnn plot``: figures of the heads of a model (C20, Figures 2 to 14), and curves of trainings."""

import json
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any, Dict, List

from .. import visualization
from ..analysis import mean_attention, read_centers
from ..analysis.recorder import attention_layers
from . import OF_RUNS
from .model import load, stacked

METRICS = {'accuracy': 'accuracy/top1', 'loss': 'cross_entropy/mean'}


def run(args: Namespace) -> List[str]:
    """Draws the figure."""
    if args.figure == 'distance':
        figure = visualization.plot_attention_distance(
            {label: read_report(path) for label, path in labelled(args.runs).items()}
        )
    elif args.figure == 'movement':
        figure = visualization.plot_center_movement(read_centers(*labelled(args.runs).values()))
    elif args.figure in OF_RUNS:
        figure = visualization.plot_metric(labelled(args.runs), args.metric or METRICS[args.figure], dict(args.offsets))
    else:
        figure = draw_model(args)
    visualization.save_figure(figure, args.out)
    return [f'Figure: {args.figure}', f'Saved {args.out}', 'Next: attncnn explore shows every query in the browser']


def draw_model(args: Namespace) -> Any:
    """Returns a figure of a model."""
    loaded = load(args)
    if args.figure in ('attention', 'heads'):
        draw = (
            visualization.plot_heads if args.figure == 'heads' else partial(visualization.plot_attention, overlay=True)
        )
        return draw(loaded.model, loaded.inputs(args.images, args.num_images))
    layers = list(attention_layers(loaded.model).values())
    by_position = bool(layers) and all(layer.has_position_scores for layer in layers)
    numbers: Dict[str, Any] = dict(numbers=loaded.head_numbers)
    if args.figure == 'content':
        if layers and not any(layer.depends_on_content for layer in layers):
            raise ValueError(f'{loaded.name} has attention by position alone: --figure probabilities draws it')
        if args.size:
            raise ValueError(f'--size {args.size} is for attention by position alone: give --images')
        images = loaded.images(args.images, args.num_images)
        maps = mean_attention(loaded.model, stacked(images))
        maps = {name: own for name, own in maps.items() if own.num_images}
        if len(images) == 1:
            query = next(iter(maps.values())).of_query(args.query)[1]
            return visualization.plot_attention(loaded.model, stacked(images), list(maps), query, True, **numbers)
        return visualization.plot_attention_probs(maps, args.query, zoom=None, **numbers)
    maps = mean_attention(loaded.model, **loaded.of_position(args), part='position' if by_position else 'all')
    if args.figure == 'centers':
        return visualization.plot_attention_centers(maps, query=args.query, **numbers)
    return visualization.plot_attention_probs(maps, args.query, args.zoom or None, **numbers)


def labelled(paths: List[str]) -> Dict[str, str]:
    """Returns ``['a=work_dirs/x', 'work_dirs/y']`` as ``{'a': 'work_dirs/x', 'y': 'work_dirs/y'}``."""
    name = lambda path: Path(path).resolve().name.removesuffix('.json')  # noqa: E731
    pairs = [path.split('=', 1) if '=' in path and not Path(path).exists() else (name(path), path) for path in paths]
    if len({label for label, _ in pairs}) < len(pairs):
        raise ValueError(f'--runs {" ".join(paths)} have the same name: give LABEL={pairs[-1][1]}')
    return dict(pairs)


def read_report(path: str) -> Any:
    """Returns what ``attncnn report --json`` wrote."""
    report = json.loads(Path(path).read_text())
    if not isinstance(report, dict) or 'layers' not in report:
        raise ValueError(f'{path} is no report of attncnn report --json')
    return report
