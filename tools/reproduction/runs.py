"""Trainings in folders of their own: what is done, what is left, and how they go on where they were stopped."""

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from mmengine.config import Config

from attncnn_plugin.engine.reliability import AtomicBackend
from attncnn_plugin.utils.errors import one_line

from .results import collect

TRAIN = Path(__file__).parents[1] / 'train.py'
# Settings of a config that say nothing of the training: where images and weights are, and what mmengine imports.
PATHS = ('data_root', 'load_from', 'custom_imports')
SHOWN = 5  # settings that a message names


@dataclass(frozen=True, eq=False)
class Run:
    """One training.

    Attributes:
        folder (Path): Its own.
        label (str): The row of the table.
        images (int): Number of training images.
        epochs (int): Number of epochs.
        seed (int): Its seed.
        make_config (Callable): Gives its config.
        start (Run, optional): The training whose last weights it begins with.
    """

    folder: Path
    label: str
    images: int
    epochs: int
    seed: int
    make_config: Callable[[], Config]
    start: Optional['Run'] = None

    def __str__(self) -> str:
        return f'{self.label}, {self.images:,} images, epochs: {self.epochs}, seed {self.seed}'

    @cached_property
    def config(self) -> Config:
        """Its config.

        Raises:
            ValueError: The training cannot be of so many epochs or images, or a setting is none.
        """
        try:
            return self.make_config()
        except ValueError as error:
            raise ValueError(f'{self}: {error}') from None
        except (AttributeError, KeyError, TypeError) as error:  # a setting of another kind than it must be
            raise ValueError(f'{self}: {one_line(error)}') from None

    @property
    def result(self) -> Optional[dict]:
        """What came of it; None before its end."""
        path = self.folder / 'result.json'
        return read_json(path) if path.exists() else None

    @property
    def last_checkpoint(self) -> Path:
        """The checkpoint of its last epoch."""
        return self.folder / f'epoch_{self.epochs}.pth'

    @property
    def epochs_done(self) -> int:
        """The epochs that need not be trained again."""
        names = [re.fullmatch(r'epoch_(\d+)\.pth', path.name) for path in self.folder.glob('epoch_*.pth')]
        return max((int(name[1]) for name in names if name), default=0)

    def check_folder(self) -> None:
        """Compares the config with that of the training in the folder, if there is one, but for the path of weights.

        One folder of images may be named in two ways; results of another machine may be of a copy of it.

        Raises:
            ValueError: The folder has a training with other settings, or one whose settings are not known; or the
                training cannot be of so many epochs or images.
        """
        ours, path = self._data, self.config_file
        if self.result is None and self.epochs_done == 0:
            return
        if path.exists():
            difference = _difference(read_json(path), ours, ('load_from',))
        elif self.result is not None:
            difference = _difference(self.result['config'], ours)
        else:
            raise ValueError(
                f'{self.folder} has a training whose settings are not known, for {path.name} beside it is gone: give '
                'another folder by --out, or remove this one'
            )
        if difference:
            raise ValueError(
                f'{self.folder} has a training with other settings ({difference}): give another folder by --out, or '
                f'remove this one and {path.name} beside it'
            )

    def check_settings(self, config: dict, source: str) -> None:
        """Compares the config with that of a training elsewhere, but for the paths of images and weights.

        Args:
            config (dict): That of the other training.
            source (str): Where that is, in words.

        Raises:
            ValueError: It has other settings.
        """
        difference = _difference(config, self._data)
        if difference:
            raise ValueError(f'{source} has {self} with other settings ({difference}): leave it out')

    def check_start(self) -> None:
        """Looks for the weights that the training begins with, if it has to begin.

        Raises:
            ValueError: They are gone, or were trained elsewhere.
        """
        start = self.start
        if self.result is not None or self.epochs_done or start is None:
            return
        if start.result is not None and not start.last_checkpoint.exists():
            raise ValueError(
                f'{self} begins with {start.last_checkpoint}, which is not there: put it there, or remove '
                f'{start.folder / "result.json"}, and {start.label!r} is trained again'
            )

    def write_result(self, result: dict) -> None:
        """Writes what came of the training."""
        write_json(self.folder / 'result.json', result)

    def write_config(self) -> None:
        """Writes the config, and makes the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.config_file, self._data)

    @property
    def config_file(self) -> Path:
        """Where the config is: beside the folder, into which mmengine writes its own copy."""
        return self.folder.with_suffix('.json')

    @property
    def _data(self) -> dict:
        """The config as a file has it."""
        return json.loads(_dump(self.config.to_dict()))


def read_json(path: Path, advice: str = ': remove it') -> Any:
    """The data of a file.

    Args:
        path (Path): The file.
        advice (str): What to do with a broken one. Defaults to that of a file that is written again.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not JSON.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f'{path} is broken ({error}){advice}') from None


def write_json(path: Path, data: Any) -> None:
    """Writes data to a file, as a whole or not at all."""
    AtomicBackend().put(_dump(data).encode(), path)


def _dump(data: Any) -> str:
    return json.dumps(data, indent=1, default=str)


def _difference(theirs: Any, ours: Any, left_out: Tuple[str, ...] = PATHS) -> str:
    """The settings of two configs that differ, in one line; '' for none."""
    if not isinstance(theirs, dict):
        return f'{json.dumps(theirs)[:40]} is no config'
    of_theirs, of_ours = (dict(_settings(config, left_out)) for config in (theirs, ours))
    different = [
        f'{name}: {of_theirs.get(name, "not set")} there, {of_ours.get(name, "not set")} here'
        for name in {**of_theirs, **of_ours}
        if of_theirs.get(name) != of_ours.get(name)
    ]
    more = len(different) - SHOWN
    return '; '.join([*different[:SHOWN], *([f'{more} more'] if more > 0 else [])])


def _settings(config: Any, left_out: Tuple[str, ...], name: str = '') -> Iterator[Tuple[str, str]]:
    """Names and values of the settings of a config, as ``optim_wrapper.optimizer.lr`` and JSON."""
    items: Iterable[Tuple[Any, Any]] = config.items() if isinstance(config, dict) else enumerate(config)
    for key, value in items:
        if key in left_out:
            continue
        own = f'{name}{key}'
        if isinstance(value, (dict, list)) and value:
            yield from _settings(value, left_out, f'{own}.')
        elif key == 'data_root' and isinstance(value, str):
            yield own, json.dumps(str(Path(value).resolve()))
        else:
            yield own, json.dumps(value)


def folder_name(label: str, images: int, epochs: int, seed: int) -> str:
    """That of a training."""
    return re.sub(r'\W+', '_', f'{label} {images} {epochs} {seed}')


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Keeps a folder for this call and the trainings that it starts, however they end.

    Yields:
        int: The file descriptor that trainings inherit.

    Raises:
        BlockingIOError: Another call, or one of its trainings, still works there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / 'lock').open('w') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f'{folder} is in use by another call, or by a training that one has left: wait for its end, or end it'
            ) from None
        yield file.fileno()


def start_training(run: Run, threads: int, lock: int) -> subprocess.Popen:
    """Starts a training in a process of its own, from its last checkpoint where there is one."""
    command = [sys.executable, TRAIN, run.config_file, '--work-dir', run.folder]
    if run.epochs_done:
        command.append('--resume')
    with (run.folder / 'output.txt').open('a') as output:
        return subprocess.Popen(
            [str(word) for word in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, 'OMP_NUM_THREADS': str(threads)},
            pass_fds=[lock],
        )


def train(runs: Sequence[Run], jobs: int, threads: int, lock: int, tell: Callable[[Run, str], None]) -> List[Run]:
    """Trains all that is not done yet.

    Args:
        runs (Sequence[Run]): The trainings, those that others begin with among them.
        jobs (int): How many train at a time.
        threads (int): Those of each.
        lock (int): Of :func:`locked`.
        tell (Callable): Called with a training and a sentence when it ends.

    Returns:
        list[Run]: The trainings that failed, or could not begin.
    """
    waiting = [run for run in runs if run.result is None]
    working: Dict[Run, subprocess.Popen] = {}
    failed: List[Run] = []
    try:
        while waiting or working:
            ready = [run for run in waiting if run.start is None or run.start.result is not None]
            for run in ready[: jobs - len(working)]:
                waiting.remove(run)
                run.write_config()
                working[run] = start_training(run, threads, lock)
            if not working:  # what is left begins with trainings that failed
                return failed + waiting
            time.sleep(0.2)
            for run, process in list(working.items()):
                status = process.poll()
                if status is not None:
                    del working[run]
                    sentence = _end(run, status, threads)
                    if run.result is None:
                        failed.append(run)
                    tell(run, sentence)
    finally:
        for process in working.values():
            process.terminate()
        for process in working.values():
            process.wait()
    return failed


def _end(run: Run, status: int, threads: int) -> str:
    """Collects the result of a training that has ended, and says what came of it."""
    if status != 0:
        return f'failed, see {run.folder / "output.txt"}'
    try:
        collect(run, threads)
    except Exception as error:  # whatever is wrong with it, the other trainings go on
        return f'has ended, but has no result ({type(error).__name__}: {error})'
    return f'{run.result["top1"]:.2f} %'
