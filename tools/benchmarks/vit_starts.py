#!/usr/bin/env python
"""Whether a vision transformer that starts as a convolution learns more from few images.

Images lie in DATA/train/CLASS/* and DATA/test/CLASS/*. A small ViT (4x4 patches, 128 channels, 6 blocks, 4 heads, 1.2M
parameters) begins in each of the ways and trains in the same one. Embeddings by sines and cosines alone, with timm's
own queries and keys, are the control of the starts that set them too. Beside these are a CMHSA in two phases and a
ResNet of as many parameters. Results go to one JSON file a run in OUT, the state of a run that was stopped beside them;
runs that are there are not repeated, so that the script can be stopped and called again.

    python tools/benchmarks/vit_starts.py DATA OUT --images 5000 20000    # all that is missing, then the table
    python tools/benchmarks/vit_starts.py DATA OUT --table                # the table of what is there
    python tools/benchmarks/vit_starts.py DATA OUT --curves curves.svg    # the figure, too
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Callable, Dict, List

import numpy as np
import timm
import torch
from mmpretrain.models import ResNet_CIFAR
from small_images import accuracy, fit, load_images, normalized, options, save_report, some_of, train_missing
from torch import nn

from attncnn_plugin.init import init_as_convolution, set_sine_cosine_embedding

SMALL = dict(img_size=32, patch_size=4, num_classes=10)
WIDTH, HEADS, DEPTH, CMHSA_DEPTH, RESNET_CHANNELS = 128, 4, 6, 12, 42
RATE, SECOND_RATE = 1e-3, 5e-4
RATES = {'CMHSA, two phases': 2e-3, 'ResNet': 2e-3}  # those of the other scripts here
FIRST_PHASE = 0.6  # of the epochs

# How each ViT begins.
STARTS: Dict[str, Callable[[nn.Module, int], object]] = {
    'default': lambda model, seed: None,
    'sine-cosine embedding': lambda model, seed: set_sine_cosine_embedding(model),
    'mimetic': lambda model, seed: init_as_convolution(model, method='mimetic', seed=seed),
    'impulse': lambda model, seed: init_as_convolution(model, method='impulse', seed=seed),
    'Gaussian': lambda model, seed: init_as_convolution(model, seed=seed),
    'Gaussian, own embedding': lambda model, seed: init_as_convolution(model, embedding='own', seed=seed),
    'Gaussian, mimetic values': lambda model, seed: init_as_convolution(model, values='mimetic', seed=seed),
    'Gaussian, alpha 1': lambda model, seed: init_as_convolution(model, alpha=1.0, seed=seed),
    'Gaussian, alpha 8': lambda model, seed: init_as_convolution(model, alpha=8.0, seed=seed),
}
CMHSA, RESNET = RATES
KINDS = [*STARTS, CMHSA, RESNET]
MAIN_KINDS = ['default', 'sine-cosine embedding', 'mimetic', 'impulse', 'Gaussian', CMHSA, RESNET]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument('--images', type=int, nargs='+', default=(5000,), help='for training; default 5000')
    parser.add_argument('--epochs', type=int, default=30, help='default 30')
    parser.add_argument('--kinds', nargs='+', default=MAIN_KINDS, choices=KINDS, metavar='KIND', help=', '.join(KINDS))
    parser.add_argument('--rate', type=float, help=f'the largest learning rate; default {RATE}, of others {RATES}')
    parser.add_argument('--curves', type=Path, help='draw the accuracies after each epoch, means over the seeds')
    args = parser.parse_args()
    args.table |= args.curves is not None
    train_missing(args, train_all)
    if args.curves is not None:
        draw(args.out, args.curves)
    print(table(args.out))


def train_all(args: argparse.Namespace) -> None:
    """The runs that are missing, seed by seed."""
    (train, labels), (test, targets) = (load_images(args.data / split) for split in ('train', 'test'))
    train, test = (normalized(train), labels), some_of((normalized(test), targets), args.test_images, seed=0)
    for number in args.images:
        for seed in args.seeds:
            images = some_of(train, number, seed)
            for kind in args.kinds:
                rate = args.rate or RATES.get(kind, RATE)
                name = f'{kind}-{number}-{args.epochs}-{rate:g}-{seed}'.replace(' ', '_').replace(',', '')
                result, checkpoint = args.out / f'{name}.json', args.out / f'{name}.pth'
                if result.exists():
                    continue
                model = new_network(kind, seed)
                report = dict(kind=kind, images=number, epochs=args.epochs, rate=rate, seed=seed)
                report['parameters'] = sum(parameter.numel() for parameter in model.parameters())
                begun = time.perf_counter()
                if kind == CMHSA:
                    report['curve'] = two_phases(model, images, test, args.epochs, rate, seed, checkpoint)
                else:
                    report['curve'] = fit(model, images, args.epochs, rate, seed, test, checkpoint)
                report['seconds'] = time.perf_counter() - begun  # since the script was called last
                report['top1'] = accuracy(model, test)
                report['machine'] = f'torch {torch.__version__}, {os.cpu_count()} cores, {args.threads} threads'
                save_report(result, report)


def new_network(kind: str, seed: int) -> nn.Module:
    """A network of a kind as it begins."""
    torch.manual_seed(seed)
    if kind == CMHSA:
        return timm.create_model('cmhsa3_patch16_224', phase='conv', depth=CMHSA_DEPTH, **SMALL)
    if kind == RESNET:
        stages = dict(num_stages=3, strides=(1, 2, 2), dilations=(1, 1, 1), out_indices=(2,))
        channels = RESNET_CHANNELS
        backbone = ResNet_CIFAR(depth=18, stem_channels=channels, base_channels=channels, **stages)
        return nn.Sequential(backbone, First(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * channels, 10))
    pooled = dict(class_token=False, global_pool='avg')
    shape = dict(embed_dim=WIDTH, num_heads=HEADS, depth=DEPTH)
    model = timm.create_model('vit_tiny_patch16_224', pretrained=False, **SMALL, **shape, **pooled)
    STARTS[kind](model, seed)
    return model


class First(nn.Module):
    """The first of several feature maps."""

    def forward(self, maps):
        return maps[0]


def two_phases(model: nn.Module, images, test, epochs: int, rate: float, seed: int, checkpoint: Path) -> List[float]:
    """A CMHSA with convolutions, then with attention that begins as these."""
    first = round(FIRST_PHASE * epochs)
    done = checkpoint.with_suffix('.first.pth')
    if done.exists():
        kept = torch.load(done, weights_only=True)
        curve = kept['curve']
        model.load_state_dict(kept['model'])
    else:
        curve = fit(model, images, first, rate, seed, test, checkpoint)
        torch.save(dict(model=model.state_dict(), curve=curve), done)
    torch.manual_seed(seed)
    model.to_attention()
    curve = curve + fit(model, images, epochs - first, SECOND_RATE, seed + 1000, test, checkpoint)
    done.unlink()
    return curve


def runs_of(out: Path) -> List[dict]:
    """The runs that are there, in the order of the kinds."""
    runs = [json.loads(path.read_text()) for path in sorted(out.glob('*.json'))]
    return sorted(runs, key=lambda run: (KINDS.index(run['kind']), run['images'], run['epochs'], run['rate']))


def grouped(runs: List[dict]) -> Dict[tuple, List[dict]]:
    """Runs that differ in their seeds alone."""
    groups: Dict[tuple, List[dict]] = {}
    for run in runs:
        groups.setdefault((run['kind'], run['images'], run['epochs'], run['rate']), []).append(run)
    return groups


def table(out: Path) -> str:
    """Means and ranges over the seeds, in Markdown: after a third of the epochs, two thirds, and all."""
    parts = 'after a third | after two thirds | at the end'
    lines = [f'| network, start | images | epochs | rate | parameters | {parts} | seeds |', '| --- ' * 9 + '|']
    for (kind, images, epochs, rate), runs in grouped(runs_of(out)).items():
        cells = [kind, f'{images:,}', str(epochs), f'{rate:g}', f'{runs[0]["parameters"]:,}']
        for part in (1 / 3, 2 / 3, 1):
            values = [run['curve'][max(0, round(part * epochs) - 1)] for run in runs]
            cells.append(f'{np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})')
        lines.append(f'| {" | ".join(cells)} | {len(runs)} |')
    return '\n'.join(lines)


def draw(out: Path, path: Path) -> None:
    """A panel for each number of images: accuracies after each epoch, mean and range over the seeds."""
    from matplotlib.figure import Figure

    groups = grouped(runs_of(out))
    panels = sorted({images for _, images, _, _ in groups})
    figure = Figure(figsize=(6 * len(panels), 4.5), layout='constrained')
    axes = figure.subplots(1, len(panels), squeeze=False)
    for axis, number in zip(axes[0], panels):
        for (kind, images, _, _), runs in groups.items():
            if images == number:
                curves = np.array([run['curve'] for run in runs])
                epochs = np.arange(1, curves.shape[1] + 1)
                (line,) = axis.plot(epochs, curves.mean(0), label=kind)
                axis.fill_between(epochs, curves.min(0), curves.max(0), color=line.get_color(), alpha=0.2, linewidth=0)
        axis.set(title=f'{number:,} images', xlabel='epochs', ylabel='top-1 in %')
    axes[0, -1].legend()
    figure.savefig(path)


if __name__ == '__main__':
    main()
