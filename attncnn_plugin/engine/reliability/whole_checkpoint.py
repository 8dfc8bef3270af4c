"""The checkpoint that a run resumes from: the newest one that can be loaded."""

from pathlib import Path
from typing import Optional, Union

from mmengine.runner import find_latest_checkpoint

from ...utils.checkpoint_files import load_from_local


def find_whole_checkpoint(work_dir: str, out_dir: Optional[str] = None) -> Optional[str]:
    """The checkpoint to resume from: the one that ``last_checkpoint`` names, or the newest one where that is damaged.

    ``last_checkpoint`` has a whole path. Of a folder that was moved or copied it is that of the old place, where
    another run may be by now; the checkpoint of the same name in the folder itself is taken then.

    Args:
        work_dir (str): The folder of the run.
        out_dir (str, optional): Of ``CheckpointHook``, where checkpoints go to another folder. Defaults to None.

    Returns:
        str | None: The file; None where the run has not saved anything.

    Raises:
        FileNotFoundError: Something was saved, but nothing of it can be resumed from.
    """
    last = find_latest_checkpoint(work_dir)
    if last and out_dir is None and '://' not in last:
        own = Path(work_dir, Path(last).name)
        if own.resolve() != Path(last).resolve() and load_or_empty(own):
            return str(own)
    if last and ('://' in last or load_or_empty(last)):  # files elsewhere are mmengine's business
        return last
    folders = {Path(work_dir), Path(last).parent if last else Path(work_dir)}
    files = sorted(
        (path for folder in folders for path in folder.glob('*.pth')),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    # Checkpoints of the best epochs, and published ones, have no optimizer: a run cannot go on from them.
    newest = next((str(path) for path in files if 'optimizer' in load_or_empty(path)), None)
    if newest is None and last is not None:
        raise FileNotFoundError(
            f'{last or "last_checkpoint"} is damaged or missing, and {work_dir} holds no other '
            'checkpoint to resume from: start anew without --resume'
        )
    return newest


def load_or_empty(path: Union[str, Path]) -> dict:
    """A local checkpoint whose tensors stay in the file until they are used; an empty one if it cannot be loaded."""
    try:
        return load_from_local(str(path), map_location='cpu', mmap=True)
    except Exception:
        return {}
