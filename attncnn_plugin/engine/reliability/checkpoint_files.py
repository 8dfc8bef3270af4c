"""Checkpoint files that cannot be loaded: said in a sentence, and passed over when a run is resumed."""

import os.path
import pickle
import re
import zipfile
from pathlib import Path
from typing import Optional, Union

import torch
from mmengine.runner import CheckpointLoader, checkpoint, find_latest_checkpoint

_load_from_local = checkpoint.load_from_local


@CheckpointLoader.register_scheme(prefixes='', force=True)
def load_from_local(filename: str, map_location=None) -> dict:
    """mmengine's loader of local files, with one sentence for what is no checkpoint.

    Args:
        filename (str): The file.
        map_location: As in :func:`torch.load`.

    Returns:
        dict: The checkpoint.

    Raises:
        FileNotFoundError: There is no such file.
        pickle.UnpicklingError: It is damaged, of another kind, or asks for something that is not safe to load.
        TypeError: It holds something else than a dictionary.
    """
    try:
        loaded = _load_from_local(filename, map_location)
    except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
        refused = re.search(r'GLOBAL (\S+)', str(error))
        if refused:
            raise pickle.UnpicklingError(
                f'{filename} was refused and nothing in it was run: it asks for {refused[1]}, '
                'but a checkpoint may hold tensors and plain data alone'
            ) from error
        if zipfile.is_zipfile(os.path.expanduser(filename)):
            raise
        raise pickle.UnpicklingError(
            f'{filename} is damaged or no checkpoint at all: give a whole file that torch.save has written'
        ) from error
    if not isinstance(loaded, dict):
        raise TypeError(
            f'{filename} holds a {type(loaded).__name__}, but a checkpoint is a dictionary of weights, or '
            "one that has them as its 'state_dict'"
        )
    return loaded


def find_whole_checkpoint(work_dir: str) -> Optional[str]:
    """The checkpoint to resume from: the one that ``last_checkpoint`` names, or the newest one where that is damaged.

    Args:
        work_dir (str): The folder of the run.

    Returns:
        str | None: The file; None where the run has not saved anything.

    Raises:
        FileNotFoundError: Something was saved, but nothing of it can be resumed from.
    """
    last = find_latest_checkpoint(work_dir)
    if last and ('://' in last or content_of(last)):  # files elsewhere are mmengine's business
        return last
    folders = {Path(work_dir), Path(last).parent if last else Path(work_dir)}
    files = sorted(
        (path for folder in folders for path in folder.glob('*.pth')),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    # Those of the best epochs and published ones have no optimizer.
    newest = next((str(path) for path in files if 'optimizer' in content_of(path)), None)
    if newest is None and last is not None:
        raise FileNotFoundError(
            f'{last or "last_checkpoint"} is damaged or missing, and {work_dir} holds no other '
            'checkpoint to resume from: start anew without --resume'
        )
    return newest


def content_of(path: Union[str, Path]) -> dict:
    """What a checkpoint holds, with weights that are read when they are used.

    Args:
        path (str | Path): The file.

    Returns:
        dict: Its content; nothing if it cannot be loaded.
    """
    try:
        content = torch.load(path, map_location='cpu', mmap=True)
    except Exception:
        return {}
    return content if isinstance(content, dict) else {}
