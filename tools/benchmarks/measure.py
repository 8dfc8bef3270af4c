"""Times of several functions side by side, and their multiply-adds.

The clock, its overhead, the number of threads and the synchronisation of a GPU are those of ``torch.utils.benchmark``.
Its Timer runs one function at a time and its Compare prints times, not ratios: the turns and the ratios are made here.
"""

import time
from typing import Callable, Dict, List, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

NUM_THREADS = 2
SECONDS_A_TURN = 0.05  # a turn is one call at least
LEAST_ROUNDS, MOST_ROUNDS = 3, 11
SECONDS = 20.0  # no further round begins after them


class Ratio(NamedTuple):
    """What one function takes over what another takes.

    Attributes:
        time (float): The median, over the rounds, of the ratio of their times in a round.
        spread (float): Half the distance of its quartiles.
        arithmetic (float): The ratio of their multiply-adds.
    """

    time: float
    spread: float
    arithmetic: float

    def __str__(self) -> str:
        return f'{self.time:.2f} ±{self.spread:.2f} ({self.arithmetic:.2f})'


class Measured(NamedTuple):
    """What was measured of several functions, by their names.

    Attributes:
        seconds (dict[str, list[float]]): The median time of a call in every round.
        multiply_adds (dict[str, int]): Those of a call's matrix products, convolutions and attention kernels.
    """

    seconds: Dict[str, List[float]]
    multiply_adds: Dict[str, int]

    def joined(self, first: str, second: str) -> 'Measured':
        """With ``'half'``, a call of either in half of all calls, round by round."""
        seconds = [(a + b) / 2 for a, b in zip(self.seconds[first], self.seconds[second])]
        multiply_adds = (self.multiply_adds[first] + self.multiply_adds[second]) // 2
        return Measured({**self.seconds, 'half': seconds}, {**self.multiply_adds, 'half': multiply_adds})

    def ratio(self, first: str, second: str) -> Ratio:
        """What the first takes over what the second takes. Times are divided round by round: they share a load."""
        low, median, high = np.percentile(np.divide(self.seconds[first], self.seconds[second]), [25, 50, 75])
        return Ratio(median, (high - low) / 2, self.multiply_adds[first] / self.multiply_adds[second])


def side_by_side(functions: Dict[str, Callable[[], None]], quick: bool = False) -> Measured:
    """Measures functions in turns: the first, the second, …, then the first again.

    Args:
        functions (dict[str, Callable]): The functions by name.
        quick (bool): One turn each, one thread: to see that everything runs, not to measure. Defaults to False.
    """
    multiply_adds = {name: count_multiply_adds(function) for name, function in functions.items()}  # and warm-up
    timers = {
        name: Timer('function()', globals=dict(function=function), num_threads=1 if quick else NUM_THREADS)
        for name, function in functions.items()
    }
    seconds, start = {name: [] for name in functions}, time.perf_counter()
    for done in range(1 if quick else MOST_ROUNDS):
        if done >= LEAST_ROUNDS and time.perf_counter() - start > SECONDS:
            break
        for name, timer in timers.items():
            seconds[name].append(timer.blocked_autorange(min_run_time=0 if quick else SECONDS_A_TURN).median)
    return Measured(seconds, multiply_adds)


def count_multiply_adds(function: Callable[[], None]) -> int:
    """Multiply-adds of one call, half of torch's count."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops() // 2


def forward_pass(model: nn.Module, images: Tensor) -> Callable[[], None]:
    """The model in evaluation mode, without gradients."""
    model.eval().requires_grad_(False)  # torch's counter fails on views of parameters without gradients otherwise
    return torch.no_grad()(lambda: model(images))


def training_step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """Forward and backward pass of the cross-entropy; the step of an optimizer takes any model of a size as long."""
    parameters = list(model.train().requires_grad_(True).parameters())
    return lambda: torch.autograd.grad(F.cross_entropy(model(images), labels), parameters, allow_unused=True)
