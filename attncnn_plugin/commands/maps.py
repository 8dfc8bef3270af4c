"""``attncnn maps``: the attention of every layer to images, in a file of NumPy."""

from argparse import Namespace
from pathlib import Path
from typing import List

import numpy as np

from ..analysis.recorder import attention_maps
from .model import load, stacked


def run(args: Namespace) -> List[str]:
    """Writes an array for each layer, ``(images, heads, queries, keys)``, and ``images``, their names."""
    loaded = load(args)
    images = loaded.images(args.images, args.num_images)
    maps = attention_maps(loaded.model, stacked(images), layers=args.layers)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    np.savez(args.out, images=[image.name for image in images], **{name: own.numpy() for name, own in maps.items()})
    shapes = sorted({'x'.join(map(str, own.shape)) for own in maps.values()})
    return [
        f'Attention of {len(maps)} layers: images x heads x queries x keys, {", ".join(shapes)}',
        f'Saved {args.out}',
        f"Next: numpy.load('{args.out}')['{next(iter(maps))}'], or attncnn report",
    ]
