"""Ends a run with a checkpoint when the cluster asks for it, and goes on within the epoch."""

import itertools
import os
import signal
import sys
import threading
from functools import partial
from typing import Callable, Iterator, Optional

import torch
from mmengine.dist import all_reduce, barrier, is_main_process
from mmengine.fileio import put
from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop
from mmpretrain.registry import HOOKS
from torch.utils.data import DataLoader

from ...utils.runner import is_resumed
from . import atomic_backend  # noqa: F401


@HOOKS.register_module()
class PreemptionHook(Hook):
    """Ends the training on SIGTERM with a checkpoint, ``preempted.pth``, from which ``--resume`` goes on.

    When one rank got the signal, all of them finish the iteration. Where gradients are accumulated, they go on until
    the optimizer has made its step. The process ends with status 143, as SIGTERM itself would end it. A resumed run
    trains on the remaining batches of the epoch, in the same order. Its random numbers (dropout, augmentation) are not
    those of a run that was never stopped, as in any resumed run of mmengine.

    A signal during validation takes effect at the first iteration after it.
    """

    priority = 'LOWEST'  # after the schedulers, EMAHook, and what else belongs to the iteration

    def __init__(self) -> None:
        self._got_signal = False
        self._previous_handler = None
        self._interrupted: Optional[dict] = None  # of the epoch that the run was stopped in

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Reads where in an epoch the run was stopped."""
        if is_resumed(runner):
            self._interrupted = checkpoint['meta'].get('preempted')

    def before_train(self, runner) -> None:
        """Takes SIGTERM, from here on, as a request to stop."""
        if threading.current_thread() is not threading.main_thread():
            runner.logger.warning('PreemptionHook does nothing: only the main thread of a process gets signals')
            return
        self._got_signal = False
        self._previous_handler = signal.signal(signal.SIGTERM, self._handle)
        for loop in (runner.train_loop, runner.val_loop):
            if loop is not None:
                loop.dataloader.worker_init_fn = partial(_leave_process_group, loop.dataloader.worker_init_fn)

    def before_train_epoch(self, runner) -> None:
        """Leaves out the batches that an interrupted epoch has had.

        Raises:
            ValueError: An epoch has another number of batches than before.
        """
        if self._interrupted is None:
            return
        loader, interrupted, self._interrupted = runner.train_dataloader, self._interrupted, None
        done, num_batches = interrupted['batches'], interrupted['num_batches']
        if len(loader) != num_batches:
            raise ValueError(
                f'the run was stopped after {done} of the {num_batches} batches of epoch '
                f'{runner.epoch + 1}, but an epoch now has {len(loader)}: resume with the batch size and the number of '
                'processes that it had, or from the checkpoint of an epoch'
            )
        if hasattr(loader.sampler, 'seed'):  # a run without a seed of its own drew another one
            loader.sampler.seed = interrupted['sampler_seed']
        runner.logger.info(f'Leaving out the {done} batches that epoch {runner.epoch + 1} has had')
        runner.train_loop.dataloader = RemainingBatches(loader, done)

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs: Optional[dict] = None) -> None:
        """Saves a checkpoint and ends the process, if any rank got the signal."""
        got_signal = torch.tensor(float(self._got_signal))
        all_reduce(got_signal, op='max')
        # Accumulated gradients are in no checkpoint: the optimizer has to have made its step.
        has_stepped = getattr(runner.optim_wrapper, 'should_update', lambda: True)()
        if not got_signal or not has_stepped:
            return
        meta = dict(epoch=runner.epoch, iter=runner.iter + 1)
        if isinstance(runner.train_loop, EpochBasedTrainLoop):  # the others count iterations
            loader = runner.train_dataloader
            done = getattr(loader, 'done', 0)
            meta['preempted'] = dict(
                batches=done + batch_idx + 1,
                num_batches=done + len(loader),
                sampler_seed=getattr(loader.sampler, 'seed', None),
            )
        path = os.path.join(runner.work_dir, 'preempted.pth')
        atomic = dict(backend='atomic')
        runner.save_checkpoint(runner.work_dir, 'preempted.pth', meta=meta, by_epoch=False, backend_args=atomic)
        if is_main_process():
            put(path.encode(), os.path.join(runner.work_dir, 'last_checkpoint'), backend_args=atomic)
        runner.logger.info(f'SIGTERM: stopped after iteration {runner.iter + 1}, saved {path}; go on with --resume')
        barrier()  # no rank ends before the file is there
        self.after_train(runner)
        sys.exit(128 + signal.SIGTERM)

    def after_train_epoch(self, runner) -> None:
        """Puts the whole data loader back for the epochs after an interrupted one."""
        if isinstance(runner.train_dataloader, RemainingBatches):
            runner.train_loop.dataloader = runner.train_dataloader.loader

    def after_train(self, runner) -> None:
        """Puts the former handler of SIGTERM back."""
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
            self._previous_handler = None

    def _handle(self, signum: int, frame) -> None:
        self._got_signal = True


class RemainingBatches:
    """A data loader without its first ``done`` batches, which the epoch has had."""

    def __init__(self, loader: DataLoader, done: int):
        self.loader = loader
        self.done = done

    def __iter__(self) -> Iterator:
        return itertools.islice(self.loader, self.done, None)

    def __len__(self) -> int:
        return len(self.loader) - self.done

    def __getattr__(self, name: str):
        return getattr(self.loader, name)


def _leave_process_group(worker_init_fn: Optional[Callable], worker_id: int) -> None:
    """Keeps a signal to the whole group from ending the data loader's workers, which end with their parent anyway."""
    os.setpgid(0, 0)
    if worker_init_fn is not None:
        worker_init_fn(worker_id)
