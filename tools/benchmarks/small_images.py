"""Trainings on small images that are all in memory, for comparisons of accuracy."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Callable, Dict, Optional, Tuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.datasets import ImageFolder

from attncnn_plugin.datasets.flip_and_shift import flip_and_shift

BATCH_SIZE, WARM_UP = 100, 2
WEIGHT_DECAY = 0.05
CHOICES = ('data', 'out', 'seeds', 'threads', 'table', 'kinds', 'equal', 'shares')  # which runs, and how they are run

Images = Tuple[Tensor, Tensor]


def options(description: str) -> argparse.ArgumentParser:
    """The options that all comparisons have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data', type=Path)
    parser.add_argument('out', type=Path)
    parser.add_argument('--test-images', type=int, help='default all')
    parser.add_argument('--seeds', type=int, nargs='+', default=(0, 1, 2))
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--table', action='store_true', help='print the table of the runs that are there')
    return parser


def train_missing(args: argparse.Namespace, train_all: Callable[[argparse.Namespace], None]) -> None:
    """Trains what is missing in a folder, if not only the table is wanted."""
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.table:
        check_settings(args)
        torch.set_num_threads(args.threads)
        train_all(args)


def check_settings(args: argparse.Namespace) -> None:
    """Ends the script where the folder has runs of other settings, which would be taken for what is asked for."""
    settings = {name: value for name, value in vars(args).items() if name not in CHOICES}
    text, path = json.dumps(settings), args.out / 'settings'
    if path.exists() and path.read_text() != text:
        sys.exit(f'{args.out} has runs with {path.read_text()}, not with {text}: give another folder')
    path.write_text(text)


def load_images(folder: Path) -> Images:
    """All images of a folder, ``(N, 3, H, W)``, uint8, and their labels."""
    samples = ImageFolder(str(folder))
    images = torch.stack([torch.from_numpy(np.array(image)) for image, _ in samples]).permute(0, 3, 1, 2)
    return images.contiguous(), torch.tensor(samples.targets)


def normalized(images: Tensor) -> Tensor:
    """With mean 0 and deviation 1 in each channel, those of CIFAR-10."""
    mean, deviation = (torch.tensor(values).reshape(3, 1, 1) for values in ([125.3, 123.0, 113.9], [63.0, 62.1, 66.7]))
    return (images.float() - mean) / deviation


def some_of(images: Images, number: Optional[int], seed: int) -> Images:
    """So many of the images, None for all, drawn by a seed."""
    chosen = torch.randperm(len(images[1]), generator=torch.Generator().manual_seed(seed))[:number]
    return images[0][chosen], images[1][chosen]


def fit(model: nn.Module, train: Images, epochs: int, rate: float, seed: int) -> None:
    """Trains with AdamW, a warm-up and a cosine, on flipped and shifted images; positions do not decay.

    Args:
        model (nn.Module): Is trained in place.
        train (Images): Normalized images and labels.
        epochs (int): Number of epochs.
        rate (float): The largest learning rate.
        seed (int): Of the order of the images and of their augmentation.
    """
    images, labels = train
    steps = math.ceil(len(labels) / BATCH_SIZE)
    parameters = dict(model.named_parameters())
    kinds = ('position.', 'encoding.', '.gate', 'pos_embed')
    positions = [name for name in parameters if any(kind in name for kind in kinds)]
    groups = [
        dict(params=[parameter for name, parameter in parameters.items() if name not in positions]),
        dict(params=[parameters[name] for name in positions], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group['params']], lr=rate, weight_decay=WEIGHT_DECAY)
    warm_up = min(WARM_UP, epochs) * steps

    def factor(step: int) -> float:
        cosine = (step - warm_up) / max(1, epochs * steps - warm_up)
        return (step + 1) / warm_up if step < warm_up else (1 + math.cos(math.pi * cosine)) / 2

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(labels), generator=generator).split(BATCH_SIZE):
            loss = F.cross_entropy(model(flip_and_shift(images[batch], 0.5, 4, generator)), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()


@torch.no_grad()
def accuracy(model: nn.Module, test: Images) -> float:
    """Top-1 in per cent."""
    model.eval()
    right = [(model(x).argmax(1) == y).sum() for x, y in zip(test[0].split(500), test[1].split(500))]
    return 100 * float(torch.stack(right).sum()) / len(test[1])


def save(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file as a whole or not at all."""
    part = path.with_suffix('.part')
    write(part)
    part.replace(path)


def save_report(path: Path, report: Dict[str, object]) -> None:
    """Writes the report of a run, and prints it."""
    save(path, lambda part: part.write_text(json.dumps(report)))
    print(json.dumps(report), flush=True)
