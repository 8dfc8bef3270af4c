"""Trainings in folders of their own: what is done, what is left, and how they go on where they were stopped."""

import difflib
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
from typing import Callable, Dict, Iterator, List, Optional, Sequence

from mmengine.config import Config

from .results import collect

TRAIN = Path(__file__).parents[1] / 'train.py'


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
            ValueError: The training cannot be of so many epochs or images.
        """
        try:
            return self.make_config()
        except ValueError as error:
            raise ValueError(f'{self}: {error}') from None

    @property
    def result(self) -> Optional[dict]:
        """What came of it; None before its end."""
        path = self.folder / 'result.json'
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def last_checkpoint(self) -> Path:
        """The checkpoint of its last epoch."""
        return self.folder / f'epoch_{self.epochs}.pth'

    @property
    def epochs_done(self) -> int:
        """The epochs that need not be trained again."""
        path = self.folder / 'last_checkpoint'
        match = re.search(r'epoch_(\d+)\.pth', path.read_text()) if path.exists() else None
        return int(match[1]) if match else 0

    def check_folder(self) -> None:
        """Compares the config with that of the training in the folder, if there is one.

        Raises:
            ValueError: The folder has a training with other settings.
        """
        path, text = self.config_file, self._text
        begun = self.result is not None or self.epochs_done > 0
        if begun and path.exists() and path.read_text() != text:
            changed = difflib.unified_diff(path.read_text().splitlines(), text.splitlines(), n=0, lineterm='')
            lines = [' '.join(line.split()) for line in changed if not line.startswith(('---', '+++', '@@'))]
            raise ValueError(
                f'{self.folder} has a training with other settings ({"; ".join(lines)}): give '
                f'another folder by --out, or remove this one and {path.name} beside it'
            )

    def write_config(self) -> None:
        """Writes the config, and makes the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config_file.write_text(self._text)

    @property
    def config_file(self) -> Path:
        """Where the config is: beside the folder, into which mmengine writes its own copy."""
        return self.folder.with_suffix('.json')

    @property
    def _text(self) -> str:
        return json.dumps(self.config.to_dict(), indent=1, default=str)


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
    if (run.folder / 'last_checkpoint').exists():
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
