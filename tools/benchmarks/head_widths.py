#!/usr/bin/env python
"""What the widths of CMHSA's heads cost in accuracy: convolutions are trained, then turned into attention of each kind.

Images lie in DATA/train/CLASS/* and DATA/test/CLASS/*. Every kind of attention begins with the same convolutions, and
trains for as many epochs as full heads, and for as many as take the time that full heads take. Results go to one JSON
file a run in OUT; runs that are there are not repeated, so that the script can be stopped and called again. The time of
a step is measured once, when OUT is new: begin on a quiet machine.

    python tools/benchmarks/head_widths.py DATA OUT            # all that is missing, then the table
    python tools/benchmarks/head_widths.py DATA OUT --table    # the table of what is there
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Dict, List, Tuple

import numpy as np
import timm
import torch
import torch.nn.functional as F
from small_images import (
    BATCH_SIZE,
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

import attncnn_plugin  # noqa: F401

FULL = 'full'
# Arguments of the network, and what is done with its heads as they begin.
KINDS: Dict[str, dict] = {
    'convolution goes on': dict(phase='conv'),
    FULL: dict(),
    'full, merged': dict(merge_heads=True),
    'narrow': dict(head_dim='exact', qk_dim=16),
    'narrow, at least 16': dict(head_dim='exact', min_head_dim=16, qk_dim=16),
    'narrow, at least 32': dict(head_dim='exact', min_head_dim=32, qk_dim=16),
    'narrow, queries of 48': dict(head_dim='exact', qk_dim=48),
    'full, queries of 16': dict(qk_dim=16),
    'full, factors of equal norm': dict(balanced=True),
    'narrow, factors of equal norm': dict(head_dim='exact', qk_dim=16, balanced=True),
}
SMALL = dict(img_size=32, patch_size=4, depth=4, num_classes=10)
EQUAL = ('epochs', 'time')
FIRST_RATE, SECOND_RATE = 2e-3, 5e-4


def main() -> None:
    parser = options(__doc__)
    parser.add_argument('--images', type=int, default=10000, help='for training; default 10000')
    parser.add_argument('--epochs', type=int, nargs=2, default=(15, 10), help='of the two phases; default 15 10')
    parser.add_argument('--kinds', nargs='+', default=list(KINDS), choices=list(KINDS), metavar='KIND')
    parser.add_argument('--equal', nargs='+', default=EQUAL, choices=EQUAL, help='default both')
    args = parser.parse_args()
    train_missing(args, train_all)
    print(table(args.out))


def train_all(args: argparse.Namespace) -> None:
    """The runs that are missing, seed by seed."""
    (train, labels), (test, targets) = (load_images(args.data / split) for split in ('train', 'test'))
    train, test = (normalized(train), labels), some_of((normalized(test), targets), args.test_images, seed=0)
    first, second = args.epochs
    for seed in args.seeds:
        images = some_of(train, args.images, seed)
        start = args.out / f'convolution-{seed}.pth'
        if not start.exists():
            torch.manual_seed(seed)
            model = timm.create_model('cmhsa3_patch16_224', phase='conv', **SMALL)
            fit(model, images, first, FIRST_RATE, seed)
            save(start, lambda path, model=model: torch.save(model.state_dict(), path))
        measured = args.out / 'step_seconds.json'
        if not measured.exists():
            seconds = step_seconds(start, images)
            save(measured, lambda path, seconds=seconds: path.write_text(json.dumps(seconds)))
        seconds = json.loads(measured.read_text())
        for kind in args.kinds:
            for equal in args.equal:
                epochs = second if equal == 'epochs' else round(second * seconds[FULL] / seconds[kind])
                result = args.out / f'{kind}-{equal}-{seed}.json'.replace(' ', '_')
                if result.exists() or equal == 'time' and epochs == second:
                    continue
                model = begin(kind, start, seed)
                report = dict(kind=kind, equal=equal, seed=seed, epochs=epochs)
                report['before'] = accuracy(model, test)
                fit(model, images, epochs, SECOND_RATE, seed)
                report['top1'] = accuracy(model, test)
                report['parameters'] = sum(p.numel() for p in model.parameters())
                report['machine'] = f'torch {torch.__version__}, {os.cpu_count()} cores, {args.threads} threads'
                save_report(result, report)


def begin(kind: str, start: Path, seed: int) -> nn.Module:
    """The network with attention of a kind in the place of the trained convolutions."""
    settings = dict(phase='attn', **KINDS[kind]) if 'phase' not in KINDS[kind] else dict(KINDS[kind])
    balanced = settings.pop('balanced', False)
    torch.manual_seed(seed)
    model = timm.create_model('cmhsa3_patch16_224', **SMALL, **settings)
    model.load_state_dict(torch.load(start, weights_only=True))
    if balanced:
        for block in model.blocks:
            balance(block.attn)
    return model


@torch.no_grad()
def balance(attention: nn.Module) -> None:
    """W^V and W^O of each head as U√S and √S Vᵀ of their product, in the place of pixels and weights."""
    start = 0
    for width, matrix in zip(attention.head_dims, attention.value_matrices()):
        left, singular, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        root = singular[:width].sqrt()
        attention.value.weight[start : start + width] = root[:, None] * right[:width]
        attention.out.weight[:, start : start + width] = left[:, :width] * root
        start += width


def step_seconds(start: Path, images: Tuple[Tensor, Tensor]) -> Dict[str, float]:
    """Time of a training step of each kind, in turns; the median of fifteen."""
    x, y = images[0][:BATCH_SIZE], images[1][:BATCH_SIZE]
    models = {kind: begin(kind, start, 0).train() for kind in KINDS}
    seconds: Dict[str, List[float]] = {kind: [] for kind in models}
    for _ in range(16):
        for kind, model in models.items():
            begun = time.perf_counter()
            F.cross_entropy(model(x), y).backward()
            seconds[kind].append(time.perf_counter() - begun)
    return {kind: float(np.median(times[1:])) for kind, times in seconds.items()}


def table(out: Path) -> str:
    """Means and ranges over the seeds, in Markdown."""
    runs = [json.loads(path.read_text()) for equal in EQUAL for path in sorted(out.glob(f'*-{equal}-*.json'))]
    seconds = json.loads((out / 'step_seconds.json').read_text())
    columns = 'heads | parameters | time of a step | at equal epochs | at equal time | seeds'
    lines = [f'| {columns} |', '| --- ' * 6 + '|']
    for kind in KINDS:
        of_kind = [run for run in runs if run['kind'] == kind]
        if not of_kind:
            continue
        cells = [kind, f'{of_kind[0]["parameters"]:,}', f'{seconds[kind] / seconds[FULL]:.2f}']
        for equal in EQUAL:
            chosen = [run for run in of_kind if run['equal'] == equal]
            if equal == 'time':  # or as many epochs take the time
                ratio = seconds[FULL] / seconds[kind]
                same = [run for run in of_kind if run['equal'] == 'epochs']
                chosen += [run for run in same if round(run['epochs'] * ratio) == run['epochs']]
            if not chosen:
                cells.append('')
                continue
            last, epochs = zip(*[(run['top1'], run['epochs']) for run in chosen])
            which = f' in {min(epochs)} to {max(epochs)} epochs' if equal == 'time' else ''
            cells.append(f'{np.mean(last):.2f} ({min(last):.2f} to {max(last):.2f}){which}')
        lines.append(f'| {" | ".join(cells)} | {len({run["seed"] for run in of_kind})} |')
    return '\n'.join(lines)


if __name__ == '__main__':
    main()
