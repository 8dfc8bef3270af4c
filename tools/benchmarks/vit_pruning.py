#!/usr/bin/env python
"""What heads removed from a small vision transformer cost in accuracy, and save in multiply-adds and time.

Images lie in DATA/train/CLASS/* and DATA/test/CLASS/*. A small ViT is trained. Of its heads those go that the loss
depends on least (Michel et al. 2019), or random ones, until a share of the multiply-adds is left; the rest is measured
as it is, and after some more epochs, beside the ViT with all heads after as many. Results go to one JSON file a run in
OUT, weights beside them; runs that are there are not repeated, so that the script can be stopped and called again.

    python tools/benchmarks/vit_pruning.py DATA OUT            # all that is missing, then the table
    python tools/benchmarks/vit_pruning.py DATA OUT --table    # the table of what is there
"""

import argparse
import json
import os
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Dict

import numpy as np
import timm
import torch
import torch.nn.functional as F
from small_images import (
    BATCH_SIZE,
    Images,
    accuracy,
    fit,
    load_images,
    normalized,
    options,
    save,
    save_report,
    some_of,
    train_missing,
)
from torch import Tensor, nn

from attncnn_plugin.pruning import head_costs, head_importance, least_important, prunable_heads, prune_heads

KINDS = ('importance', 'random')
ALL = 'all heads'
FIRST_RATE, SECOND_RATE = 1e-3, 3e-4
TIMED_IMAGES, TIMES = 100, 15


def main() -> None:
    parser = options(__doc__)
    parser.add_argument('--images', type=int, default=20000, help='for training; default 20000')
    parser.add_argument('--epochs', type=int, nargs=2, default=(30, 5), help='before and after pruning; default 30 5')
    parser.add_argument('--batches', type=int, default=20, help='that importance is measured on; default 20')
    parser.add_argument(
        '--shares',
        type=float,
        nargs='+',
        default=(0.9, 0.8, 0.7),
        help='of the multiply-adds that stay; default 0.9 0.8 0.7, and 0.67 has one head a layer',
    )
    args = parser.parse_args()
    train_missing(args, run_all)
    print(table(args.out))


def run_all(args: argparse.Namespace) -> None:
    """The runs that are missing, seed by seed."""
    (train, labels), test = load_images(args.data / 'train'), load_images(args.data / 'test')
    train, test = (normalized(train), labels), some_of(test, args.test_images, seed=0)
    test = normalized(test[0]), test[1]
    for seed in args.seeds:
        images = some_of(train, args.images, seed)
        start = args.out / f'start-{seed}.pth'
        if not start.exists():
            model = new_vit(seed)
            fit(model, images, args.epochs[0], FIRST_RATE, seed)
            save(start, lambda path, model=model: torch.save(model.state_dict(), path))
        for kind, share in [(ALL, 1.0), *((kind, share) for share in args.shares for kind in KINDS)]:
            result = args.out / f'{kind}-{share}-{seed}.json'.replace(' ', '_')
            if result.exists():
                continue
            model = new_vit(seed)
            model.load_state_dict(torch.load(start, weights_only=True))
            if kind != ALL:
                remove(model, kind, share, images, args.batches, seed)
            report = dict(kind=kind, share=share, seed=seed, epochs=list(args.epochs), images=len(images[1]))
            report.update(measured(model, test), before=accuracy(model, test))
            fit(model, images, args.epochs[1], SECOND_RATE, seed + 1000)
            report['after'] = accuracy(model, test)
            report['machine'] = f'torch {torch.__version__}, {os.cpu_count()} cores, {args.threads} threads'
            save(result.with_suffix('.pth'), lambda path, model=model: torch.save(model.state_dict(), path))
            save_report(result, report)


def new_vit(seed: int) -> nn.Module:
    """A ViT of 4x4 patches of images of 32x32 pixels, with 6 blocks of 8 heads."""
    torch.manual_seed(seed)
    return timm.create_model(
        'vit_tiny_patch16_224', img_size=32, patch_size=4, embed_dim=128, depth=6, num_heads=8, num_classes=10
    )


def remove(model: nn.Module, kind: str, share: float, images: Images, batches: int, seed: int) -> None:
    """Removes heads until a share of the multiply-adds is left."""
    model.eval()
    x = images[0][:1]
    parts = zip(images[0].split(BATCH_SIZE)[:batches], images[1].split(BATCH_SIZE))
    if kind == 'importance':
        scores = head_importance(model, parts, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    else:
        scores = random_scores(model, seed)
    heads = least_important(scores, multiply_adds=share, costs=head_costs(model, lambda: model(x)))
    prune_heads(model, heads)


def random_scores(model: nn.Module, seed: int) -> Dict[str, Tensor]:
    """A random number for each head."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(layer.num_heads, generator=generator) for name, layer in prunable_heads(model).items()}


@torch.no_grad()
def measured(model: nn.Module, test: Images) -> Dict[str, object]:
    """Multiply-adds, time, parameters and heads of a model."""
    model.eval()
    x = test[0][:TIMED_IMAGES]
    total, _ = head_costs(model, lambda: model(x[:1]))
    times = []
    for _ in range(TIMES + 2):  # the first ones warm up
        begin = perf_counter()
        model(x)
        times.append(perf_counter() - begin)
    return dict(
        multiply_adds=total,
        milliseconds=1000 * median(times[2:]) / len(x),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        heads=[layer.num_heads for layer in prunable_heads(model).values()],
    )


def table(out: Path) -> str:
    """Means and ranges over the seeds, in Markdown."""
    runs = [json.loads(path.read_text()) for path in sorted(out.glob('*.json'))]
    lines = [
        '| heads that stay | number | multiply-adds | ms an image | top-1 as it is | after more epochs | seeds |',
        '| --- ' * 7 + '|',
    ]
    for share, kind in sorted({(run['share'], run['kind']) for run in runs}, key=lambda key: (-key[0], key[1])):
        of_kind = [run for run in runs if (run['share'], run['kind']) == (share, kind)]
        numbers = [sum(run['heads']) for run in of_kind]
        lines.append(
            f'| {kind} | {spread(numbers, 0)} | {np.mean([run["multiply_adds"] for run in of_kind]) / 1e6:.1f} M '
            f'| {np.mean([run["milliseconds"] for run in of_kind]):.3f} '
            f'| {spread([run["before"] for run in of_kind])} | {spread([run["after"] for run in of_kind])} '
            f'| {len(of_kind)} |'
        )
    return '\n'.join(lines)


def spread(values: list, digits: int = 2) -> str:
    """Mean and range."""
    if min(values) == max(values):
        return f'{values[0]:.{digits}f}'
    return f'{np.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})'


if __name__ == '__main__':
    main()
