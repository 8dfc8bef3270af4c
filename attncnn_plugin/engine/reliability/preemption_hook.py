"""A checkpoint, and the end of the run, when the cluster asks for it."""

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

from . import atomic_backend  # noqa: F401


@HOOKS.register_module()
class PreemptionHook(Hook):
    """Ends the training on SIGTERM with a checkpoint, ``preempted.pth``, from which ``--resume`` goes on.

    Every rank finishes the iteration in which any of them got the signal, and those that gradients are still
    accumulated for; the process ends with status 143, as one that SIGTERM has ended. A resumed run trains on the
    batches of the epoch that were left, in the order that they had. As in any resumed run of mmengine, random numbers
    (dropout, augmentation) are others than those of a run that was never stopped.

    A signal during validation takes effect at the first iteration after it.
    """

    priority = 'LOWEST'  # after the schedulers, EMAHook, and what else belongs to the iteration

    def __init__(self) -> None:
        self._asked = False
        self._previous = None
        self._rest: Optional[dict] = None

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Whether an epoch has to be gone on with."""
        if runner._resume:
            self._rest = checkpoint['meta'].get('preempted')

    def before_train(self, runner) -> None:
        """From here on, SIGTERM is a request."""
        if threading.current_thread() is not threading.main_thread():
            runner.logger.warning('PreemptionHook does nothing: only the main thread of a process is told of signals')
            return
        self._asked = False
        self._previous = signal.signal(signal.SIGTERM, self._ask)
        for loop in (runner.train_loop, runner.val_loop):
            if loop is not None:
                loop.dataloader.worker_init_fn = partial(_leave_process_group, loop.dataloader.worker_init_fn)

    def before_train_epoch(self, runner) -> None:
        """In an epoch that was interrupted: leaves out the batches that it has had.

        Raises:
            ValueError: An epoch is not what it was.
        """
        if self._rest is None:
            return
        loader, rest, self._rest = runner.train_dataloader, self._rest, None
        if len(loader) != rest['num_batches']:
            raise ValueError(
                f'the run was stopped after {rest["batches"]} of the {rest["num_batches"]} batches of epoch '
                f'{runner.epoch + 1}, but an epoch now has {len(loader)}: resume with the batch size and the number of '
                'processes that it had, or from the checkpoint of an epoch'
            )
        if hasattr(loader.sampler, 'seed'):  # a run without a seed of its own drew another one
            loader.sampler.seed = rest['sampler_seed']
        runner.logger.info(f'Leaving out the {rest["batches"]} batches that epoch {runner.epoch + 1} has had')
        runner.train_loop.dataloader = _Rest(loader, rest['batches'])

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs: Optional[dict] = None) -> None:
        """Saves and ends the process, if any rank was asked to."""
        asked = torch.tensor(float(self._asked))
        all_reduce(asked, op='max')
        complete = getattr(runner.optim_wrapper, 'should_update', lambda: True)()  # gradients are in no checkpoint
        if not asked or not complete:
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
        """The epochs after an interrupted one are whole."""
        if isinstance(runner.train_dataloader, _Rest):
            runner.train_loop.dataloader = runner.train_dataloader.loader

    def after_train(self, runner) -> None:
        """SIGTERM is what it was before."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _ask(self, signum: int, frame) -> None:
        self._asked = True


class _Rest:
    """What is left of a data loader whose first ``done`` batches the epoch has had."""

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
