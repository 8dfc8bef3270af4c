"""Peak memory of one training step, in a process of its own.

By hand, since torch counts the memory of GPUs alone and its profiler adds up what a CPU allocates. On a CPU it is the
largest resident set of the process, with glibc's malloc told to give back every tensor that is freed, so that it is
what the tensors need, not the holes that malloc leaves between them.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Callable

import torch

GIVE_BACK = {'MALLOC_MMAP_THRESHOLD_': '65536'}  # for glibc's malloc: blocks from this size on have pages of their own


def added_by(make_step: Callable[..., Callable[[], None]], *args) -> int:
    """Bytes that a step needs on top of what was there before it, with the libraries, the weights and the images.

    Args:
        make_step (Callable): A function of a module, which makes the step in the new process.
        args: Its arguments; the first has the ``device``.
    """
    os.environ.update(GIVE_BACK)  # read as a process starts
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as executor:
            return executor.submit(_added_here, make_step, *args).result()
    finally:
        for name in GIVE_BACK:
            del os.environ[name]


def _added_here(make_step: Callable[..., Callable[[], None]], settings, *args) -> int:
    step = make_step(settings, *args)
    if settings.device == 'cuda':
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    before = _resident_bytes('VmRSS')
    step()
    return _resident_bytes('VmHWM') - before


def _resident_bytes(field: str) -> int:
    """The resident set now, ``'VmRSS'``, or at most since the process began, ``'VmHWM'``, of Linux.

    ``getrusage`` will not do: a new process inherits the ``ru_maxrss`` of the one that started it.
    """
    lines = Path('/proc/self/status').read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
