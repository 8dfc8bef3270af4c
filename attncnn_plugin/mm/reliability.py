"""Hooks for trainings that survive killed processes, full disks and damaged files, of any model."""

import contextlib
import copy
import os
from pathlib import Path
from typing import Dict, Iterator, Optional, Union

from mmengine.dataset import worker_init_fn
from mmengine.dist import all_gather_object, is_main_process
from mmengine.fileio import LocalBackend, exists, join_path, put, register_backend
from mmengine.hooks import CheckpointHook, Hook
from mmengine.runner import EpochBasedTrainLoop, find_latest_checkpoint
from mmpretrain.registry import HOOKS

from ..checkpoint_files import load_from_local
from .runner import averaged_models, check_loop, samplers_of, seed_epoch

UNFIT = 'missing, damaged or without an optimizer'


@register_backend('atomic', force=True)  # again, by this plugin or by another one that has it
class AtomicBackend(LocalBackend):
    """mmengine's local files, each written beside its place and moved there when it is on the disk.

    A process that is killed while it writes, or a full disk, leaves the former file as it was.
    """

    def put(self, obj: bytes, filepath: Union[str, Path]) -> None:
        """Writes bytes to a file, whose folder is made; raises ``OSError`` where it cannot."""
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
                'before are as they were: make room, then resume from the last checkpoint'
            ) from error


def find_whole_checkpoint(work_dir: str, out_dir: Optional[str] = None) -> Optional[str]:
    """Returns the checkpoint to resume from: what ``last_checkpoint`` names, or the newest whole one; None if none is.

    Checkpoints of the best epochs, and published ones, have no optimizer: a run cannot resume from them. In a folder
    that was moved or copied, ``last_checkpoint`` has the path of the old place, where another run may be by now: only
    the folder itself is looked into, or ``out_dir``, where the run writes its checkpoints.

    Raises:
        FileNotFoundError: Something was saved, but nothing of it can be resumed from.
    """
    last = find_latest_checkpoint(work_dir)
    if last and '://' in last:
        return last  # files elsewhere are looked at when they are loaded
    named = [Path(last) if out_dir else Path(work_dir, os.path.basename(last))] if last else []
    found = {path for folder in (work_dir, *(path.parent for path in named)) for path in Path(folder).glob('*.pth')}
    for path in (*named, *sorted(found, key=os.path.getmtime, reverse=True)):
        if 'optimizer' in load_or_empty(path):
            return str(path)
    if found or last is not None:
        raise FileNotFoundError(
            f'{last or "last_checkpoint"} is {UNFIT}, and {work_dir} holds no other one: start anew without --resume'
        )
    return None


def load_or_empty(path: Union[str, Path]) -> dict:
    """Returns a local checkpoint whose tensors stay in the file until they are used; empty if it cannot be loaded."""
    try:
        return load_from_local(str(path), map_location='cpu', mmap=True)
    except Exception:
        return {}


@HOOKS.register_module()
class AtomicCheckpointHook(CheckpointHook):
    """mmengine's ``CheckpointHook``, with files that are either complete or not there.

    An old checkpoint, also that of the best epoch, is removed when the new one is there. Where the last one is damaged
    all the same, ``--resume`` names it in the log and takes the one before. A run whose folder was moved or copied
    resumes the checkpoints in it. A run writes and removes nothing outside of its own folder, wherever it was resumed
    from. A checkpoint of another model is an error, and so is one to resume from that does not restore all of the run.
    A schedule that would have another end by now is a warning. Weights that are not finite are an error instead of a
    checkpoint.

    The arguments are those of ``CheckpointHook``; ``backend_args`` defaults to ``dict(backend='atomic')``.
    """

    def __init__(self, *args, backend_args: Optional[dict] = None, **kwargs):
        super().__init__(*args, backend_args=backend_args or dict(backend='atomic'), **kwargs)

    def before_run(self, runner) -> None:
        """Finds the checkpoint to resume from, where none is named, and checks that it is one of this model.

        Raises:
            FileNotFoundError: Something was saved, but nothing of it can be resumed from.
            ValueError: A checkpoint to resume from does not restore optimizers, schedulers and weights. Hardly any
                weight has the name and the shape of one of the model; mmengine would only warn.
        """
        name = runner._load_from
        if runner._resume and name is None:
            last = find_latest_checkpoint(runner.work_dir)
            name = find_whole_checkpoint(runner.work_dir, self.out_dir)
            if name and os.path.realpath(name) != os.path.realpath(last or ''):
                why = f'{last or "last_checkpoint"} is of another folder, {UNFIT}'
                runner.logger.warning(f'{why}: resuming from {name} instead')
            runner._load_from = name
        checkpoint = load_or_empty(name) if name else {}
        if not checkpoint:
            return  # there is none, or it is elsewhere, or mmengine's attempt to load it will raise an error
        _check_resumable(runner, checkpoint)
        theirs, ours = (
            {name.removeprefix('module.'): value.shape for name, value in of.items() if hasattr(value, 'shape')}
            for of in (checkpoint.get('state_dict', checkpoint), runner.model.state_dict())
        )
        fitting = ours.items() & theirs.items()
        if len(fitting) < len(ours) / 10:  # heads and statistics of the pixels fit many models
            raise ValueError(
                f'{name} is of another model: {len(fitting)} of the {len(ours)} weights of this one are in it under '
                'the same name and with the same shape; give the config that it was trained with'
            )

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Checks what is resumed once more, since it may come from elsewhere, and schedulers, which hooks may change.

        Raises:
            ValueError: It does not restore optimizers, schedulers and weights.
        """
        _check_resumable(runner, checkpoint)
        theirs, ours = checkpoint.get('param_schedulers') or (), runner.param_schedulers
        if not runner._resume or ours is None:  # mmengine warns of None
            return
        if len(theirs) != len(ours):
            raise ValueError(
                f'{runner._load_from} has the state of {len(theirs)} param_schedulers, but the run has '
                f'{len(ours)}: give the config that it was trained with'
            )
        for own, state in zip(ours, theirs) if isinstance(ours, list) else ():
            if own.end != state['end']:
                runner.logger.warning(
                    f'{type(own).__name__} ends at {state["end"]}, as in the checkpoint, and not at {own.end}, as it '
                    'would now: a run that resumes keeps its schedule, whatever its epochs and batches are'
                )

    def before_train(self, runner) -> None:
        """Points to the run's own files instead of another's, and removes what a killed process has left incomplete."""
        hub, folder = runner.message_hub, runner.work_dir
        if self.out_dir not in (None, folder):  # as mmengine does
            folder = join_path(self.out_dir, os.path.basename(folder.rstrip(os.sep)))
        for key, path in _named_in(hub).items():
            hub.pop_info(key)
            own = join_path(folder, os.path.basename(path))
            if exists(own, self.backend_args):
                hub.update_info(key, own)
        super().before_train(runner)
        if is_main_process():
            for part in Path(self.out_dir).glob('*.pth.part'):
                part.unlink()
            last = Path(runner.work_dir, 'last_checkpoint')
            if last.is_file():  # in a copy made of links, that of the other run, into which mmengine would write
                put(last.read_bytes(), str(last), backend_args=dict(backend='atomic'))

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:
        """Raises ``FloatingPointError``, on every rank, where a learned weight is NaN or infinite."""
        for name, parameter in runner.model.named_parameters():
            if parameter.requires_grad and not parameter.isfinite().all():
                last = find_latest_checkpoint(runner.work_dir) or 'none yet'
                raise FloatingPointError(
                    f'{name} is not finite any more after iteration {runner.message_hub.get_info("iter") + 1}, and is '
                    f'not saved; the last checkpoint is {last}: resume with a lower rate, or with clip_grad'
                )

    def _save_checkpoint_with_step(self, runner, *args, **kwargs) -> None:
        with self._removed_last(runner):
            super()._save_checkpoint_with_step(runner, *args, **kwargs)

    def _save_best_checkpoint(self, runner, metrics) -> None:
        with self._removed_last(runner):
            super()._save_best_checkpoint(runner, metrics)

    @contextlib.contextmanager
    def _removed_last(self, runner) -> Iterator[None]:
        """Removes files after what comes in their place is written; mmengine does so before."""
        backend, removed = self.file_backend, []
        self.file_backend = copy.copy(backend)
        self.file_backend.remove = removed.append
        try:
            yield
        finally:
            self.file_backend = backend
        for path in set(removed) - {*_named_in(runner.message_hub).values()}:  # not what was written anew
            backend.remove(path)


def _named_in(hub) -> Dict[str, str]:
    """Returns the paths of the last and of the best checkpoints, by their keys in ``runtime_info``."""
    return {key: path for key, path in hub.runtime_info.items() if key == 'last_ckpt' or key.startswith('best_ckpt')}


def _check_resumable(runner, checkpoint: dict) -> None:
    """Raises ``ValueError`` where a run that resumes a checkpoint would go on without something that it had."""
    if not runner._resume:
        return
    name = runner._load_from
    parts = ['meta', 'message_hub', 'optimizer', *(['param_schedulers'] if runner.param_schedulers else [])]
    missing = [part for part in parts if part not in checkpoint]
    if missing:
        other = None
        for folder in (runner.work_dir, os.path.dirname(name)):
            with contextlib.suppress(FileNotFoundError):
                other = find_whole_checkpoint(folder) or other
        raise ValueError(
            f'{name} has no {" and no ".join(missing)}, which a run needs to resume: '
            f'{f"resume from {other}, or " if other else ""}start from its weights, with --cfg-options '
            f'load_from={name} and without --resume'
        )
    if 'ema_state_dict' in checkpoint and not averaged_models(runner):
        raise ValueError(f'{name} has averages of an EMAHook in place of the trained weights: resume with that hook')


@HOOKS.register_module()
class EpochSeedHook(Hook):
    """Draws the random numbers of each epoch from only the seed of the run, the epoch and the rank.

    Checkpoints of mmengine hold no random state. With this hook a run that resumes from the checkpoint of an epoch ends
    with the same weights as one that was never stopped, where the computations themselves are deterministic: it draws
    by the seed of the checkpoint. Workers of the data loader, which mmengine seeds alike in each epoch, draw other
    numbers in each.
    """

    priority = 'VERY_LOW'  # after the hooks that draw random numbers of their own

    def before_train(self, runner) -> None:
        """Has samplers take the seed of the run, which a checkpoint may have changed, and workers that of each epoch.

        Raises:
            TypeError: The loop does not count epochs.
            ValueError: The data loader keeps its workers, whose random numbers go on from one epoch to the next.
        """
        check_loop(runner, self)
        loader, seed = runner.train_dataloader, all_gather_object(runner.seed)[0]
        if loader.persistent_workers:
            raise ValueError('EpochSeedHook needs persistent_workers=False in train_dataloader, to seed workers again')
        if getattr(loader.worker_init_fn, 'func', None) is worker_init_fn:
            loader.worker_init_fn = None  # PyTorch seeds workers by the numbers of this process
        for sampler in samplers_of(loader):
            if hasattr(sampler, 'seed'):
                sampler.seed = seed

    def before_train_epoch(self, runner) -> None:
        """Seeds Python, numpy and PyTorch."""
        seed_epoch(runner)


@HOOKS.register_module()
class ResumedValidationHook(Hook):
    """Validates once more where a run resumes from the end of an epoch.

    The checkpoint of an epoch is written before the validation, so a run that is stopped in between has none of that
    epoch. It does nothing in loops of iterations.
    """

    priority = 'LOWEST'  # after CheckpointHook, which has to know by then where the best one goes

    def before_train(self, runner) -> None:
        """Runs the validation if the last epoch had one."""
        loop, epoch = runner.train_loop, runner.epoch
        if not isinstance(loop, EpochBasedTrainLoop) or runner.val_loop is None or not runner._resume:
            return
        # After the last epoch the loop has nothing left to do, and does not validate.
        if epoch >= max(loop.val_begin, 1) and (epoch % loop.val_interval == 0 or epoch == loop.max_epochs):
            runner.val_loop.run()
