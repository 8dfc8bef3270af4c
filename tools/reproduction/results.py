"""Trainings in folders of their own, and what came of them."""

import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from mmengine.config import Config
from mmengine.runner import CheckpointLoader
from torch import nn

import attncnn_plugin.mm.safe_loading
from attncnn_plugin import follow_state_dict
from attncnn_plugin.analysis import read_scalars
from attncnn_plugin.change import number_of_parameters
from attncnn_plugin.mm.reliability import AtomicBackend
from attncnn_plugin.pruning import count_multiply_adds

from .configs import build
from .measures import attention_moved, corrupted_accuracies, share_at_shift


@dataclass(frozen=True, eq=False)
class Run:
    """A training of a row of a table, which may begin with the last weights of another one."""

    folder: Path
    label: str
    images: int
    epochs: int
    seed: int
    start: Optional['Run']
    make_config: Callable[['Run'], Config]
    corrupted: bool  # whether corrupted images are classified in the end

    def __str__(self) -> str:
        return f'{self.label}, {self.images:,} images, epochs: {self.epochs}, seed {self.seed}'

    @cached_property
    def config(self) -> Config:
        return self.make_config(self)

    @property
    def config_file(self) -> Path:
        """Beside the folder, into which mmengine writes its own copy."""
        return self.folder.with_suffix('.json')

    @property
    def epochs_done(self) -> int:
        """Counts the epochs that need not be trained again."""
        return max((int(path.stem[len('epoch_') :]) for path in self.folder.glob('epoch_*.pth')), default=0)

    @property
    def parts_file(self) -> Path:
        """Where it was trained: it can go on in another place."""
        return self.folder / 'parts.json'

    @property
    def parts(self) -> List[dict]:
        """Returns the machines and versions that it was trained with, and the epochs that were done before each."""
        return read_json(self.parts_file) if self.parts_file.exists() else []

    @property
    def result(self) -> Optional[dict]:
        """Returns what came of it; None before its end."""
        path = self.folder / 'result.json'
        return read_json(path) if path.exists() else None

    def check_folder(self) -> None:
        """Raises an error if the folder has a training with other settings; one without checkpoints has none."""
        ours = dict(_settings(self.config.to_dict()))  # settings that no training can have are an error here, too
        if self.result is None and not self.epochs_done:
            return
        theirs = dict(_settings(read_json(self.config_file)))
        names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        shown = [f'{name}: {theirs.get(name, "not set")} there, {ours.get(name, "not set")} here' for name in names]
        if names:
            raise ValueError(
                f'{self.folder} has a training with other settings ({"; ".join(shown[:5])}): give another folder by '
                f'--out, or remove this one and {self.config_file.name} beside it'
            )

    def begin(self, threads: int, lock: int) -> subprocess.Popen:
        """Starts the training in a process of its own, from its last checkpoint where there is one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.config_file, self.config.to_dict())
        here = dict(machine=dict(machine(), threads=threads), versions=versions())
        parts = [part for part in self.parts if part['epochs_before'] < self.epochs_done]  # with an epoch at least
        if not parts or any(parts[-1][key] != here[key] for key in here):
            parts.append(dict(here, epochs_before=self.epochs_done))
        write_json(self.parts_file, parts)
        train, resume = Path(__file__).parents[1] / 'train.py', ['--resume'] * (self.epochs_done > 0)
        command = [sys.executable, train, self.config_file, '--work-dir', self.folder, *resume]
        environment = {**os.environ, 'OMP_NUM_THREADS': str(threads)}
        with (self.folder / 'output.txt').open('a') as output:
            return subprocess.Popen(command, stdout=output, stderr=output, env=environment, pass_fds=[lock])

    def collect(self, threads: int) -> str:
        """Writes the result of the training that has ended, from its logs and its last checkpoint."""
        scalars = read_scalars(self.folder)
        metrics = scalars.keys() & {'accuracy/top1', 'accuracy/top5', 'cross_entropy/mean'}
        curves = {name: scalars[name].tolist() for name in sorted(metrics)}
        last, top1 = curves['accuracy/top1'][-1]
        if last != self.epochs:
            raise ValueError(f'its last accuracy is of epoch {last:g}')
        checkpoint = self.folder / f'epoch_{self.epochs}.pth'
        # The time of all iterations, those before a stop too, with the loading of the images.
        times = CheckpointLoader.load_checkpoint(str(checkpoint))['message_hub']['log_scalars']['train/time']
        model, extras = trained_model(self.config, checkpoint), {}
        if self.corrupted:
            extras['corrupted'] = corrupted_accuracies(self.config, model)
            if hasattr(model.backbone, 'to_attention'):
                before = build(self.config)
                before.load_state_dict(CheckpointLoader.load_checkpoint(self.config.load_from)['state_dict'])
                before.backbone.to_attention()
                extras['moved'] = attention_moved(self.config, before, model)
        parameters, multiply_adds = cost(model)
        result = dict(label=self.label, images=self.images, epochs=self.epochs, seed=self.seed)
        result.update(start=self.start and self.start.folder.name, top1=top1, seconds=float(times.data[0].sum()))
        result.update(parameters=parameters, multiply_adds=multiply_adds, curves=curves, versions=versions())
        result.update(machine=dict(machine(), threads=threads), parts=self.parts, config=self.config.to_dict())
        share = share_at_shift(self.config)
        result.update(extras if share is None else dict(extras, share=share))
        write_json(self.folder / 'result.json', result)
        return f'{top1:.2f} %'


def _settings(config: Any, name: str = '') -> Iterator[Tuple[str, str]]:
    """Yields names and values of settings, such as ``optim_wrapper.optimizer.lr``."""
    for key, value in config.items() if isinstance(config, dict) else enumerate(config):
        if isinstance(value, (dict, list, tuple)) and value:
            yield from _settings(value, f'{name}{key}.')
        elif key != 'load_from':  # it moves together with this folder
            yield f'{name}{key}', json.dumps(value, default=str)


def read_json(path: Path) -> Any:
    """Returns the data of a file; an error names the file."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f'{path} is broken ({error}): remove it') from None


def write_json(path: Path, data: Any) -> None:
    """Writes data to a file, as a whole or not at all."""
    AtomicBackend().put(json.dumps(data, indent=1, default=str).encode(), path)


def trained_model(config: Config, checkpoint: Path) -> nn.Module:
    """Returns the classifier of a config with the structure and the weights of a checkpoint."""
    model = build(config)
    state_dict = CheckpointLoader.load_checkpoint(str(checkpoint), map_location='cpu')['state_dict']
    follow_state_dict(model, state_dict)
    model.load_state_dict(state_dict)
    return model


def cost(model: nn.Module) -> Tuple[int, int]:
    """Counts parameters, and multiply-adds of one image in evaluation mode."""
    model.eval()
    return number_of_parameters(model), count_multiply_adds(model, lambda: model(torch.zeros(1, 3, 32, 32)))[0]


def versions() -> Dict[str, str]:
    """Returns the versions of Python, of this package, and of what it computes with."""
    modules = {name: sys.modules[name].__version__ for name in ('torch', 'timm', 'mmengine', 'mmpretrain', 'numpy')}
    return dict(python=platform.python_version(), attncnn_plugin=attncnn_plugin.__version__, **modules)


def machine() -> Dict[str, object]:
    """Names the processor, its cores, and the GPU if there is one."""
    info = Path('/proc/cpuinfo')
    names = re.findall(r'^model name\s*: (.*)$', info.read_text(), re.MULTILINE) if info.exists() else []
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return dict(processor=names[0] if names else platform.processor(), cores=os.cpu_count(), gpu=gpu)
