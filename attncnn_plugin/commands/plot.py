"""``attncnn plot``: figures of the heads of a model, or of their paths during a training (C20, Figures 3 to 14)."""

from argparse import Namespace
from pathlib import Path
from typing import Any, List

from .. import visualization
from ..analysis import head_report, mean_attention, read_centers
from .model import load, stacked


def run(args: Namespace) -> List[str]:
    """Draws the figure."""
    visualization.save_figure(draw(args), args.out)
    return [f'Figure: {args.figure}', f'Saved {args.out}', 'Next: attncnn explore shows every query in the browser']


def draw(args: Namespace) -> Any:
    """Returns the figure."""
    if args.figure == 'movement':
        return visualization.plot_center_movement(read_centers(args.run))
    loaded = load(args)
    if args.figure == 'attention':
        images = stacked(loaded.images(args.images, args.num_images))
        return visualization.plot_attention(loaded.model, images, args.layers, args.query, overlay=True)
    images = loaded.inputs_for_means(args.images, args.num_images)
    if args.figure == 'distance':
        report = head_report(loaded.model, images, layers=args.layers)
        return visualization.plot_attention_distance({Path(loaded.name).stem: report})
    maps = mean_attention(loaded.model, images, layers=args.layers)
    if args.figure == 'centers':
        return visualization.plot_attention_centers(maps)
    return visualization.plot_heads(maps, args.query)
