#!/usr/bin/env python
"""Trains a config with each of some learning rates, and prints a table of the accuracies.

  learning_rates.py CONFIG --lr 1e-4 3e-4 5e-4
  learning_rates.py CONFIG --lr 1e-4 3e-4 5e-4 --second-lr 1e-5 3e-5 5e-5 7e-5 --gpus 4

The rates are within the ranges of Li et al. 2021, appendix B. --second-lr is the rate of the second phase, for configs
with a PhaseTransitionHook: every first rate goes with every second one. Warm-up begins where it begins in the config,
at 1e-6 in those for CIFAR-100, whatever the rate is that it ends at.

Each training is one of tools/train.py, in a folder of its own. Run the command again after a stop: what is finished is
left alone, and the rest is resumed. Options that are not listed here, such as --amp, are those of train.py.
"""

import argparse
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np
from mmengine.config import Config, DictAction

import attncnn_plugin  # noqa: F401
from attncnn_plugin.analysis import read_scalars
from attncnn_plugin.mm.tools import read_config
from attncnn_plugin.model_options import setting

TOOLS = Path(__file__).parent
METRIC = 'accuracy/top1'


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config of the training')
    parser.add_argument('--lr', nargs='+', type=float, required=True, metavar='RATE', help='learning rates')
    parser.add_argument('--second-lr', nargs='+', type=float, metavar='RATE', help='those of the second phase')
    parser.add_argument(
        '--work-dir', help='folder for those of the trainings (default: work_dirs/CONFIG_learning_rates)'
    )
    parser.add_argument('--gpus', type=int, default=1, help='processes of a training (default: 1)')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        type=setting,
        action=DictAction,
        default={},
        help='overrides settings of the config: k=v',
    )
    args, args.of_train = parser.parse_known_args()
    return args


def settings_of(args: argparse.Namespace, config: Config) -> Dict[Tuple[float, ...], Dict[str, float]]:
    """The settings of each training by their names in the config, for each combination of rates."""
    phases = [('', config, args.lr)]
    if args.second_lr:
        hooks = [hook.type for hook in config.get('custom_hooks', [])]
        if 'PhaseTransitionHook' not in hooks:
            sys.exit(f'--second-lr is for configs with a PhaseTransitionHook, which {args.config} has not')
        i = hooks.index('PhaseTransitionHook')
        phases.append((f'custom_hooks.{i}.', config.custom_hooks[i], args.second_lr))
    first_rate = config.optim_wrapper.optimizer.lr
    trainings: Dict[Tuple[float, ...], Dict[str, float]] = {}
    for rates in itertools.product(*(rates for *_, rates in phases)):
        trainings[rates] = {}
        for rate, (prefix, phase, _) in zip(rates, phases):
            trainings[rates].update(phase_settings(rate, prefix, phase, first_rate))
    return trainings


def phase_settings(rate: float, prefix: str, phase: Mapping[str, Any], first_rate: float) -> Dict[str, float]:
    """The rate of a phase, and the factors with which its warm-up begins where that of the config does."""
    settings = {f'{prefix}optim_wrapper.optimizer.lr': rate}
    own_rate = (phase.get('optim_wrapper') or {}).get('optimizer', {}).get('lr', first_rate)
    schedulers = phase.get('param_scheduler') or []
    is_list = isinstance(schedulers, list)
    for i, scheduler in enumerate(schedulers if is_list else [schedulers]):
        if scheduler.type == 'LinearLR' and scheduler.get('start_factor', 1) < 1:
            name = f'{prefix}param_scheduler{f".{i}" if is_list else ""}.start_factor'
            settings[name] = scheduler.start_factor * own_rate / rate
    return settings


def accuracies(work_dir: Path) -> Optional[np.ndarray]:
    """Epochs and accuracies so far, ``(T, 2)``; None before the first validation."""
    try:
        return read_scalars(work_dir).get(METRIC)
    except FileNotFoundError:
        return None


def is_finished(work_dir: Path, epochs: int) -> bool:
    values = accuracies(work_dir)
    return values is not None and values[-1, 0] >= epochs


def train(args: argparse.Namespace, work_dir: Path, settings: Dict[str, float]) -> None:
    """Runs a training from where it stands."""
    if args.gpus == 1:
        command = [sys.executable, TOOLS / 'train.py', args.config]
    else:
        command = ['bash', TOOLS / 'dist_train.sh', args.config, args.gpus]
    options = [f'{key}={value}' for key, value in {**args.cfg_options, **settings}.items()]
    command += [*args.of_train, '--work-dir', work_dir, '--resume', '--cfg-options', *options]
    subprocess.run([str(word) for word in command])


def row(rates: Tuple[float, ...], work_dir: Path, epochs: int) -> List[str]:
    values = accuracies(work_dir)
    if values is None:
        return [*(f'{rate:g}' for rate in rates), '', '', 'stopped before the first validation']
    epoch = int(values[-1, 0])
    state = '' if epoch >= epochs else f'stopped after epoch {epoch} of {epochs}'
    return [*(f'{rate:g}' for rate in rates), f'{values[-1, 1]:.2f}', f'{values[:, 1].max():.2f}', state]


def main() -> None:
    args = parse_args()
    try:
        config = read_config(args.config)
    except FileNotFoundError as error:
        sys.exit(str(error))
    config.merge_from_dict(args.cfg_options)
    epochs = config.train_cfg.max_epochs
    folder = Path(args.work_dir or f'work_dirs/{Path(args.config).stem}_learning_rates')
    trainings = settings_of(args, config)
    grid = {rates: folder / '_'.join(f'{rate:g}' for rate in rates) for rates in trainings}
    for rates, work_dir in grid.items():
        if not is_finished(work_dir, epochs):
            train(args, work_dir, trainings[rates])
    rows = [['rate', *(['second rate'] if args.second_lr else []), 'last, %', 'best, %', '']]
    rows += [row(rates, work_dir, epochs) for rates, work_dir in grid.items()]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for cells in rows:
        print('  '.join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())
    if not all(is_finished(work_dir, epochs) for work_dir in grid.values()):
        sys.exit(1)


if __name__ == '__main__':
    main()
