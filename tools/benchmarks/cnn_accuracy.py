#!/usr/bin/env python
"""Whether attention in the place of a CNN's last convolutions helps: accuracy on clean and on corrupted images.

Images lie in DATA/train/CLASS/* and DATA/test/CLASS/*. A small ResNet is trained; from the same weights the CNN goes
on, and so do hybrids whose last stage became attention; a hybrid from scratch trains for all epochs. Results go to one
JSON file a run in OUT, weights beside them; runs that are there are not repeated, so that the script can be stopped
and called again.

    python tools/benchmarks/cnn_accuracy.py DATA OUT            # all that is missing, then the table
    python tools/benchmarks/cnn_accuracy.py DATA OUT --table    # the table of what is there
"""

import argparse
import json
import os
from pathlib import Path
from typing import Callable, Dict, Optional

import numpy as np
import torch
from mmpretrain.models import ResNet_CIFAR
from small_images import (
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
from torchvision.transforms.v2 import functional as transforms

from attncnn_plugin.convert import convs_to_attention

# What becomes of the CNN, as arguments of convs_to_attention; None for the CNN itself.
KINDS: Dict[str, Optional[dict]] = {
    'CNN goes on': None,
    'additive': dict(content='additive', alpha=6),
    'gated': dict(content='gated', alpha=6),
    'additive, table': dict(content='additive', alpha=6, position='table', window_size=15),
    'positions alone': dict(alpha=6),
}
FROM_SCRATCH = 'additive, from scratch'
LAYERS = '0.layer3.*.conv*'
FIRST_RATE, SECOND_RATE = 2e-3, 1e-3
CORRUPTIONS: Dict[str, Callable[[Tensor], Tensor]] = {
    'clean': lambda images: images,
    'noise': lambda images: noisy(images, 0.1),
    'blur': lambda images: transforms.gaussian_blur(images, [5, 5], [1.0, 1.0]),
    'contrast': lambda images: transforms.adjust_contrast(images, 0.4),
    'JPEG': lambda images: torch.stack([transforms.jpeg(image, 20) for image in images]),
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument('--images', type=int, default=5000, help='for training; default 5000')
    parser.add_argument('--epochs', type=int, nargs=2, default=(12, 6), help='of the two phases; default 12 6')
    parser.add_argument('--kinds', nargs='+', default=[*KINDS, FROM_SCRATCH], metavar='KIND')
    args = parser.parse_args()
    train_missing(args, train_all)
    print(table(args.out))


def train_all(args: argparse.Namespace) -> None:
    """The runs that are missing, seed by seed."""
    (train, labels), test = load_images(args.data / 'train'), load_images(args.data / 'test')
    train, test = (normalized(train), labels), some_of(test, args.test_images, seed=0)
    tests = {name: (normalized(corrupt(test[0])), test[1]) for name, corrupt in CORRUPTIONS.items()}
    first, second = args.epochs
    for seed in args.seeds:
        images = some_of(train, args.images, seed)
        start = args.out / f'CNN-{seed}.pth'
        if not start.exists():
            model = new_cnn(seed)
            fit(model, images, first, FIRST_RATE, seed)
            save(start, lambda path, model=model: torch.save(model.state_dict(), path))
        for kind in args.kinds:
            result = args.out / f'{kind}-{seed}.json'.replace(' ', '_')
            if result.exists():
                continue
            model = new_cnn(seed)
            if kind == FROM_SCRATCH:
                turn(model, 'additive', seed)
                fit(model, images, first, FIRST_RATE, seed)
            else:
                model.load_state_dict(torch.load(start, weights_only=True))
                turn(model, kind, seed)
            report = dict(kind=kind, seed=seed, epochs=second, images=len(images[1]), before=top1(model, tests))
            save(result.with_suffix('.before.pth'), lambda path, model=model: torch.save(model.state_dict(), path))
            fit(model, images, second, SECOND_RATE, seed + 1000)
            report['after'] = top1(model, tests)
            report['parameters'] = sum(parameter.numel() for parameter in model.parameters())
            report['machine'] = f'torch {torch.__version__}, {os.cpu_count()} cores, {args.threads} threads'
            save(result.with_suffix('.after.pth'), lambda path, model=model: torch.save(model.state_dict(), path))
            save_report(result, report)


def new_cnn(seed: int) -> nn.Module:
    """A ResNet of three stages of 16, 32 and 64 channels, the last one for 8x8 pixels."""
    torch.manual_seed(seed)
    stages = dict(num_stages=3, strides=(1, 2, 2), dilations=(1, 1, 1), out_indices=(2,))
    backbone = ResNet_CIFAR(depth=18, stem_channels=16, base_channels=16, **stages)
    return nn.Sequential(backbone, First(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class First(nn.Module):
    """The first of several feature maps."""

    def forward(self, maps):
        return maps[0]


def turn(model: nn.Module, kind: str, seed: int) -> None:
    """Makes attention of a kind of the convolutions of the last stage."""
    settings = KINDS[kind]
    if settings is not None:
        random = dict(generator=torch.Generator().manual_seed(seed)) if 'content' in settings else {}
        convs_to_attention(model, LAYERS, **random, **settings)


def noisy(images: Tensor, deviation: float) -> Tensor:
    """With noise of a standard deviation in units of the range of pixels; the same noise in every call."""
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + 255 * deviation * noise).round().clamp(0, 255).to(torch.uint8)


def top1(model: nn.Module, tests: Dict[str, Images]) -> Dict[str, float]:
    """Top-1 in per cent on each set of images."""
    return {name: accuracy(model, test) for name, test in tests.items()}


def table(out: Path) -> str:
    """Means and ranges over the seeds, in Markdown."""
    runs = [json.loads(path.read_text()) for path in sorted(out.glob('*.json'))]
    lines = [f'| network | parameters | {" | ".join(CORRUPTIONS)} | seeds |', '| --- ' * (3 + len(CORRUPTIONS)) + '|']
    for kind in [*KINDS, FROM_SCRATCH]:
        of_kind = [run for run in runs if run['kind'] == kind]
        if not of_kind:
            continue
        cells = [kind, f'{of_kind[0]["parameters"]:,}']
        for name in CORRUPTIONS:
            last = [run['after'][name] for run in of_kind]
            cells.append(f'{np.mean(last):.2f} ({min(last):.2f} to {max(last):.2f})')
        lines.append(f'| {" | ".join(cells)} | {len(of_kind)} |')
    return '\n'.join(lines)


if __name__ == '__main__':
    main()
