"""``attncnn report``: where each head looks, and what convolution the heads of a layer form."""

import json
from argparse import Namespace
from pathlib import Path
from typing import List

from ..analysis import head_report
from .model import load

LEGEND = """centre, std: mean and deviation of where a head looks, (row, column) in tokens
entropy: relative to uniform attention; 3x3, 5x5: share of the tokens around
nearest shift: the shift that gets most, and its share; error of a convolution:
0 if the layer is one; random 3x3: error of the best fit to a random kernel"""


def run(args: Namespace) -> List[str]:
    """Prints the report, and writes it as JSON."""
    loaded = load(args)
    images = loaded.inputs_for_means(args.images, args.num_images)
    report = head_report(loaded.model, images, layers=args.layers)
    number = max(layer.num_images for layer in report.layers)
    if args.out:
        checkpoint = args.mm[1] if args.mm else args.checkpoint or ('pretrained' if args.pretrained else None)
        content = report.to_dict(model=loaded.name, checkpoint=checkpoint, num_images=number)
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(json.dumps(content, indent=1, allow_nan=False) + '\n')
    layers, _, summary = str(report).rpartition('\n\n')
    print(summary, layers, LEGEND, sep='\n\n')
    return [
        f'{len({layer.name for layer in report.layers})} layers, '
        + (f'mean over {number} images' if number else 'by position'),
        f'Saved {args.out}' if args.out else 'Nothing was written: --json FILE writes all numbers',
        'Next: attncnn plot --figure heads draws them, attncnn rank says which matter',
    ]
