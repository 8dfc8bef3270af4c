"""Trainings that survive killed processes, full disks and damaged files: nothing here knows of attention."""

import math
import os
import random
import re
from pathlib import Path
from typing import Dict, Optional, Tuple, Union

import numpy as np
import torch
from mmengine.dist import all_reduce, get_rank, is_main_process
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook, Hook
from mmengine.runner import EpochBasedTrainLoop, find_latest_checkpoint
from mmpretrain.registry import HOOKS

from ..checkpoint_files import load_from_local
from .runner import checkpoint_to_load, is_resumed, load_from


@register_backend('atomic', force=True)  # again, by this plugin or by another one that has it
class AtomicBackend(LocalBackend):
    """mmengine's local files, each written beside its place and moved there when it is on the disk.

    A process that is killed while it writes, or a full disk, leaves the former file as it was.

    Examples:
        >>> default_hooks = dict(checkpoint=dict(type='CheckpointHook', backend_args=dict(backend='atomic')))
    """

    def put(self, obj: bytes, filepath: Union[str, Path]) -> None:
        """Writes bytes to a file, whose folder is made.

        Raises:
            OSError: The file could not be written.
        """
        path = Path(filepath)
        part = path.with_name(f'{path.name}.part')  # always this name: the next write replaces what was left
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(part, 'wb') as file:
                file.write(obj)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise OSError(
                f'{path} ({len(obj):,} bytes) could not be written ({error.strerror}), and the files written '
                'before are as they were: make room, then go on from the last checkpoint'
            ) from error


def find_whole_checkpoint(work_dir: str, out_dir: Optional[str] = None) -> Optional[str]:
    """Returns the checkpoint to resume from: what ``last_checkpoint`` names, or the newest whole one; None if none is.

    ``last_checkpoint`` has a whole path. Of a folder that was moved or copied it is that of the old place, where
    another run may be by now; the checkpoint of the same name in the folder itself is taken then.

    Args:
        work_dir (str): The folder of the run.
        out_dir (str, optional): Of ``CheckpointHook``, where checkpoints go to another folder. Defaults to None.

    Raises:
        FileNotFoundError: Something was saved, but nothing of it can be resumed from.
    """
    last = find_latest_checkpoint(work_dir)
    if last and '://' in last:  # files elsewhere are mmengine's business
        return last
    folder = Path(last).parent if last and out_dir else Path(work_dir)
    if last and load_or_empty(folder / Path(last).name):
        return str(folder / Path(last).name)
    files = sorted(folder.glob('*.pth'), key=lambda path: path.stat().st_mtime, reverse=True)
    # Checkpoints of the best epochs, and published ones, have no optimizer: a run cannot go on from them.
    newest = next((str(path) for path in files if 'optimizer' in load_or_empty(path)), None)
    if newest is None and last is not None:
        raise FileNotFoundError(
            f'{last or "last_checkpoint"} is damaged or missing, and {work_dir} holds no other '
            'checkpoint to resume from: start anew without --resume'
        )
    return newest


def load_or_empty(path: Union[str, Path]) -> dict:
    """Returns a local checkpoint whose tensors stay in the file until they are used; empty if it cannot be loaded."""
    try:
        return load_from_local(str(path), map_location='cpu', mmap=True)
    except Exception:
        return {}


@HOOKS.register_module()
class AtomicCheckpointHook(CheckpointHook):
    """mmengine's ``CheckpointHook``, with files that are either complete or not there.

    A killed process or a full disk damages no checkpoint. ``max_keep_ckpts`` removes an old one before the new one is
    there: keep two. Where the last one is damaged all the same, ``--resume`` names it in the log and takes the one
    before. A run whose folder was moved or copied resumes the checkpoints in it. A checkpoint of another model, or one
    of weights alone to resume from, is an error.

    Args:
        backend_args (dict, optional): Where the files go. Defaults to None, means ``dict(backend='atomic')``, the
            local disk.
        **kwargs: As in :class:`mmengine.hooks.CheckpointHook`.
    """

    def __init__(self, *args, backend_args: Optional[dict] = None, **kwargs):
        super().__init__(*args, backend_args=backend_args or dict(backend='atomic'), **kwargs)

    def before_run(self, runner) -> None:
        """Finds the checkpoint to resume from, where none is named, and checks that it is one of this model.

        Raises:
            KeyError: There is nothing to resume but weights.
            ValueError: Hardly any weight has the name and the shape of one of the model; mmengine would only warn.
        """
        name = checkpoint_to_load(runner)
        if is_resumed(runner) and name is None:
            last = find_latest_checkpoint(runner.work_dir)
            name = find_whole_checkpoint(runner.work_dir, self.out_dir)
            load_from(runner, name)
            if name and (not last or Path(last).resolve() != Path(name).resolve()):
                runner.logger.warning(
                    f'{last or "last_checkpoint"} is damaged, missing or of another folder: resuming from {name}'
                )
        checkpoint = load_or_empty(name) if name else {}
        if not checkpoint:
            return  # there is none, or it is elsewhere, or mmengine's attempt to load it will raise an error
        if is_resumed(runner) and not {'meta', 'message_hub'} <= checkpoint.keys():
            raise KeyError(
                f'{name} holds weights alone and cannot be resumed from: start from them with '
                f'--cfg-options load_from={name}, without --resume'
            )
        theirs, ours = _shapes(checkpoint.get('state_dict', checkpoint)), _shapes(runner.model.state_dict())
        fitting = ours.items() & theirs.items()
        if len(fitting) < len(ours) / 10:  # heads and statistics of the pixels fit many models
            raise ValueError(
                f'{name} is of another model: {len(fitting)} of the {len(ours)} weights of this one are in it under '
                'the same name and with the same shape; give the config that it was trained with'
            )

    def before_train(self, runner) -> None:
        """Removes the incomplete files that a killed process has left."""
        super().before_train(runner)
        if is_main_process():
            for part in Path(self.out_dir).glob('*.pth.part'):
                part.unlink()


def _shapes(state_dict: dict) -> Dict[str, Tuple[int, ...]]:
    """Returns shapes of tensors by their names, without the prefix of wrappers."""
    return {
        re.sub(r'^(module\.)+', '', name): tuple(value.shape)
        for name, value in state_dict.items()
        if hasattr(value, 'shape')
    }


@HOOKS.register_module()
class EpochSeedHook(Hook):
    """Draws the random numbers of each epoch from the seed of the run, the epoch and the rank alone.

    Checkpoints of mmengine hold no random state, so dropout and augmentation of a resumed run are others. With this
    hook a run that goes on from the checkpoint of an epoch ends with the same weights as one that was never stopped,
    where the computations themselves are deterministic. The data loader must have ``num_workers=0``, or workers that
    are started anew for each epoch (``persistent_workers=False``).

    Examples:
        >>> default_hooks = dict(epoch_seed=dict(type='EpochSeedHook'))
        >>> randomness = dict(seed=0)
    """

    priority = 'VERY_LOW'  # after the hooks that draw random numbers of their own

    def before_train_epoch(self, runner) -> None:
        """Seeds Python, numpy and PyTorch."""
        sequence = np.random.SeedSequence([runner.seed, runner.epoch, get_rank()])
        seed = int(sequence.generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


@HOOKS.register_module()
class InvalidLossHook(Hook):
    """Ends the training, on every rank, when a loss is NaN or infinite, and keeps such weights out of checkpoints.

    The error names the iteration and the last checkpoint. Infinite gradients, which are normal with automatic mixed
    precision, are not looked at.
    """

    priority = 'HIGH'  # before EMAHook, and before anything is saved

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs: Optional[dict] = None) -> None:
        """Checks the losses of the iteration, on every rank.

        Raises:
            FloatingPointError: One of them, on any rank, is NaN or infinite.
        """
        logged = {name: float(torch.as_tensor(value).detach()) for name, value in (outputs or {}).items()}
        invalid = {name: value for name, value in logged.items() if 'loss' in name and not math.isfinite(value)}
        invalid_anywhere = torch.tensor(float(bool(invalid)))
        all_reduce(invalid_anywhere, op='max')
        if not invalid_anywhere:
            return
        values = ', '.join(f'{name}={value}' for name, value in invalid.items()) or 'a loss of another rank is invalid'
        raise FloatingPointError(
            f'{values} at iteration {runner.iter + 1} (epoch {runner.epoch + 1}); nothing was saved since '
            f'{_last_checkpoint(runner)}: resume with a lower rate, or look at the images'
        )

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:
        """Checks the weights: a step of the optimizer after a finite loss can make them infinite.

        Raises:
            FloatingPointError: A learned weight is NaN or infinite.
        """
        for name, parameter in runner.model.named_parameters():
            if parameter.requires_grad and not parameter.isfinite().all():
                raise FloatingPointError(
                    f'{name} is not finite any more after iteration {runner.message_hub.get_info("iter") + 1}; nothing '
                    f'was saved since {_last_checkpoint(runner)}: resume with a lower rate, or with clip_grad'
                )


def _last_checkpoint(runner) -> str:
    """Returns the file that the run can go on from, in words where there is none."""
    return find_latest_checkpoint(runner.work_dir) or 'the start'


@HOOKS.register_module()
class ResumedValidationHook(Hook):
    """Validates once more where a run goes on from the end of an epoch.

    The checkpoint of an epoch is written before the validation, so a run that is stopped in between has none of that
    epoch. With this hook the curves of a run that was stopped have all their points. It leaves loops of iterations
    alone.

    Examples:
        >>> default_hooks = dict(resumed_validation=dict(type='ResumedValidationHook'))
    """

    def before_train(self, runner) -> None:
        """Runs the validation if the last epoch had one."""
        loop, epoch = runner.train_loop, runner.epoch
        if not isinstance(loop, EpochBasedTrainLoop) or runner.val_loop is None or not is_resumed(runner):
            return
        is_last = epoch == loop.max_epochs  # the loop has nothing left to do, and does not validate
        if epoch >= max(loop.val_begin, 1) and (epoch % loop.val_interval == 0 or is_last):
            runner.val_loop.run()
