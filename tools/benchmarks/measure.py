"""Times of several functions side by side, their multiply-adds, and the memory of a training step."""

import math
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from attncnn_plugin.pruning.importance import plain_products

Sizes = Sequence[int]
Step = Callable[[], object]

SECONDS_A_TURN = 0.05  # a turn is one call at least
LEAST_ROUNDS, MOST_ROUNDS = 3, 11
SECONDS = 4.0  # no round beyond the least begins after them
# For glibc's malloc: blocks from this size on have pages of their own, which go back as the block is freed.
GIVE_BACK = {'MALLOC_MMAP_THRESHOLD_': '65536'}


class Ratio(NamedTuple):
    """Time and arithmetic of one function over another's."""

    time: float  # the median, over the rounds, of the ratio of their times in a round
    spread: float  # half the distance of its quartiles
    arithmetic: float  # the ratio of their multiply-adds

    def __str__(self) -> str:
        return f'{self.time:.2f} ±{self.spread:.2f} ({self.arithmetic:.2f})'


class Measured(NamedTuple):
    """Times of a call in every round, and the multiply-adds of a call, of several steps by their names."""

    seconds: Dict[str, List[float]]
    multiply_adds: Dict[str, int]

    def ratio(self, first: str, second: str) -> Ratio:
        """Returns what the first takes over what the second takes, by time round by round: they share a load."""
        low, median, high = np.percentile(np.divide(self.seconds[first], self.seconds[second]), [25, 50, 75])
        return Ratio(median, (high - low) / 2, self.multiply_adds[first] / self.multiply_adds[second])


def side_by_side(steps: Dict[str, Step], quick: bool = False) -> Measured:
    """Measures steps in turns: the first, the second, …, then the first again. ``quick`` calls each of them once."""
    multiply_adds = {name: count_multiply_adds(step) for name, step in steps.items()}  # and warm-up
    turn = 0 if quick else SECONDS_A_TURN
    calls = {name: 1 + int(turn / seconds_a_call(step, 1)) for name, step in steps.items()}
    seconds: Dict[str, List[float]] = {name: [] for name in steps}
    start = time.perf_counter()
    for done in range(1 if quick else MOST_ROUNDS):
        if done >= LEAST_ROUNDS and time.perf_counter() - start > SECONDS:
            break
        for name, step in steps.items():
            seconds[name].append(seconds_a_call(step, calls[name]))
    return Measured(seconds, multiply_adds)


def seconds_a_call(step: Step, calls: int) -> float:
    """Returns the mean time of some calls."""
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls


def count_multiply_adds(step: Step) -> int:
    """Returns the multiply-adds of one call, half of torch's count: of matrix products and convolutions."""
    gradients = {torch.ops.aten.convolution_backward: gradients_of_a_convolution}
    with plain_products(), FlopCounterMode(display=False, custom_mapping=gradients) as counter:
        step()
    return counter.get_total_flops() // 2


def gradients_of_a_convolution(gradient: Sizes, x: Sizes, weight: Sizes, *settings: Any, **_: Any) -> int:
    """Counts two for a multiply-add, from shapes; PyTorch's own formula takes no account of groups."""
    *_, transposed, _padding, _groups, wanted = settings
    positions = (x if transposed else gradient)[2:]
    return 2 * sum(wanted[:2]) * x[0] * math.prod(positions) * math.prod(weight)


def forward_pass(model: nn.Module, x: Tensor) -> Step:
    """Returns a call of the model in evaluation mode, without gradients."""
    model.eval().requires_grad_(False)  # torch's counter fails on views of parameters without gradients otherwise
    return torch.no_grad()(lambda: model(x))


def training_step(model: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """Returns a forward and backward pass of the cross-entropy; an optimizer takes any model of a size as long."""
    parameters = list(model.train().requires_grad_(True).parameters())
    return lambda: torch.autograd.grad(F.cross_entropy(model(images), labels), parameters, allow_unused=True)


def added_by(make_step: Callable[..., Step], *args) -> int:
    """Returns the bytes that a step needs on top of the libraries, the weights and the images.

    They are the largest resident set of a process of its own, in which ``make_step`` makes the step of ``args``, less
    what it was before the step: torch counts only the memory of GPUs, and its profiler adds up what a CPU allocates.
    """
    os.environ.update(GIVE_BACK)  # read as a process starts
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as executor:
            return executor.submit(_added_here, torch.get_num_threads(), make_step, *args).result()
    finally:
        for name in GIVE_BACK:
            del os.environ[name]


def _added_here(threads: int, make_step: Callable[..., Step], *args) -> int:
    torch.set_num_threads(threads)
    step = make_step(*args)
    before = _resident_bytes('VmRSS')
    step()
    return _resident_bytes('VmHWM') - before


def _resident_bytes(field: str) -> int:
    """Returns Linux's resident set, ``'VmRSS'`` now, ``'VmHWM'`` at most.

    ``getrusage`` will not do: a new process inherits the ``ru_maxrss`` of the one that started it.
    """
    lines = Path('/proc/self/status').read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
