#!/usr/bin/env python
"""Images a second in training, of the networks of configs/small, and what makes them more.

All sides of a network train in turns in this process, with the loading of their images. A side is one change to the
second one, which all configs of configs/small have:

  image by image   flips and shifts in the pipeline of the loader, as in mmpretrain's configs
  batch            flips and shifts of the whole batch (FlipAndShift), which leave the channels last
  channels first   the same, with the images made contiguous after it
  two workers      images loaded by two processes
  bfloat16         BFloat16OptimWrapper
  compiled         torch.compile of the backbone

    python tools/benchmarks/training_speed.py --data folder --data-root data/images
    python tools/benchmarks/training_speed.py --quick    # the digits, one step a turn: to see that it runs
"""

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Callable, Dict, Iterator, List

import torch
from mmengine.logging import MMLogger
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from mmengine.runner import Runner

import attncnn_plugin  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduction.configs import DATA, network_config, set_data  # noqa: E402
from reproduction.results import build  # noqa: E402

MODELS = [
    'sa_quadratic',
    'sa_generalized',
    'sa_learned',
    'sa_learned_content',
    'resnet',
    'vit',
    'deit',
    'cmhsa_conv',
    'cmhsa_attn',
]
ONE_BY_ONE = [dict(type='RandomCrop', crop_size=32, padding=4), dict(type='RandomFlip', prob=0.5)]
SIDES = ('image by image', 'batch', 'channels first', 'two workers', 'bfloat16', 'compiled')
BASE = 'batch'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', default=MODELS, metavar='CONFIG', help=f'default: {" ".join(MODELS)}')
    parser.add_argument('--sides', nargs='+', default=list(SIDES), choices=SIDES, metavar='SIDE')
    parser.add_argument('--data', choices=DATA, default='cifar10')
    parser.add_argument('--data-root', type=Path)
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--rounds', type=int, default=5, help='turns of each side; default 5')
    parser.add_argument('--steps', type=int, default=10, help='of a turn; default 10')
    parser.add_argument('--quick', action='store_true')
    args = parser.parse_args()
    if args.quick:
        args.data, args.rounds, args.steps = 'digits', 1, 1
    torch.set_num_threads(args.threads)
    init_default_scope('mmpretrain')
    sides = [BASE, *(side for side in args.sides if side != BASE)]
    print(f'| network | images a second, {BASE} | {" | ".join(f"{side}, times" for side in sides[1:])} |')
    print('| --- ' * (len(sides) + 1) + '|')
    for name in args.models:
        speeds = in_turns({side: trainer(name, side, args) for side in sides}, args.rounds, args.steps)
        cells = [f'{statistics.median(speeds[BASE]):.0f}']
        for side in sides[1:]:
            ratios = [own / base for own, base in zip(speeds[side], speeds[BASE])]
            cells.append(f'{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})')
        print(f'| {name} | {" | ".join(cells)} |', flush=True)


def trainer(name: str, side: str, args: argparse.Namespace) -> Callable[[], int]:
    """A function that loads a batch, makes a step with it, and gives the number of its images."""
    config = network_config(name, {})
    set_data(config, args.data, args.data_root)
    if side == 'image by image':
        pipeline = config.train_dataloader.dataset.pipeline
        packing = next(i for i, step in enumerate(pipeline) if step.type not in ('LoadImageFromFile', 'Resize'))
        pipeline[packing:packing] = ONE_BY_ONE
        preprocessor = {key: config.data_preprocessor[key] for key in ('num_classes', 'mean', 'std', 'to_rgb')}
        config.data_preprocessor = dict(type='ClsDataPreprocessor', **preprocessor)
    if side == 'two workers':
        config.train_dataloader.update(num_workers=2, persistent_workers=True)
    torch.manual_seed(0)
    model = build(config).train()
    model.init_weights()
    if side == 'channels first':
        model.data_preprocessor.register_forward_hook(
            lambda module, args, data: {**data, 'inputs': data['inputs'].contiguous()}
        )
    if side == 'bfloat16':
        config.optim_wrapper.type = 'BFloat16OptimWrapper'
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    if side == 'compiled':
        model.backbone.compile(backend='eager' if args.quick else 'inductor')
    loader = Runner.build_dataloader(dict(config.train_dataloader, collate_fn=dict(type='default_collate')), seed=0)
    batches = endless(loader)

    def step() -> int:
        batch = next(batches)
        model.train_step(batch, wrapper)
        return len(batch['inputs'])

    return step


def endless(loader) -> Iterator[dict]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def in_turns(functions: Dict[str, Callable[[], int]], rounds: int, steps: int) -> Dict[str, List[float]]:
    """Images a second of each side in each round, after two steps that are not counted."""
    speeds: Dict[str, List[float]] = {side: [] for side in functions}
    for function in functions.values():
        function()
        function()
    for _ in range(rounds):
        for side, function in functions.items():
            begun = time.perf_counter()
            images = sum(function() for _ in range(steps))
            speeds[side].append(images / (time.perf_counter() - begun))
    return speeds


if __name__ == '__main__':
    MMLogger.get_instance('mmengine', log_level='ERROR')  # not how each layer was initialized
    main()
