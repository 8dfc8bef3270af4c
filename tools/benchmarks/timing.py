"""Times of several functions in turns, their multiply-adds, and what the machine can do at most."""

import statistics
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, List

import torch
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Repetitions:
    """How often a measurement is repeated: as often as ``seconds`` allow, from ``least`` to ``most`` times."""

    least: int = 3
    most: int = 15
    seconds: float = 20.0


def synchronize(device: str) -> None:
    """Waits for a GPU to have done what it was given."""
    if device == 'cuda':
        torch.cuda.synchronize()


def time_once(function: Callable[[], None], device: str) -> float:
    """Seconds of one call."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def in_turns(
    functions: Dict[str, Callable[[], None]],
    device: str,
    repetitions: Repetitions = Repetitions(),
) -> Dict[str, List[float]]:
    """Seconds of every call of each function: the first, the second, …, the first again, and so on.

    Args:
        functions (dict[str, Callable]): The functions, by name, each called before for warm-up.
        device (str): ``'cpu'`` or ``'cuda'``.
        repetitions (Repetitions): How often. Defaults to 3 to 15 times, 20 seconds.

    Returns:
        dict[str, list[float]]: The times by name.
    """
    seconds = {name: [] for name in functions}
    start, rounds = time.perf_counter(), 0
    while (
        rounds < repetitions.least
        or rounds < repetitions.most
        and ((time.perf_counter() - start) * (rounds + 1) / rounds < repetitions.seconds)
    ):
        for name, function in functions.items():
            seconds[name].append(time_once(function, device))
        rounds += 1
    return seconds


def multiply_adds(function: Callable[[], None]) -> int:
    """Multiply-adds of the matrix products, convolutions and attention kernels of one call, half of torch's count."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops() // 2


def measure(
    functions: Dict[str, Callable[[], None]],
    device: str,
    repetitions: Repetitions = Repetitions(),
) -> Dict[str, Dict[str, Any]]:
    """Multiply-adds of each function, counted in a call that is its warm-up, and the times of the calls after it.

    Args:
        See :func:`in_turns`.

    Returns:
        dict: ``multiply_adds`` and ``seconds``, each by name.
    """
    counts = {name: multiply_adds(function) for name, function in functions.items()}
    return dict(multiply_adds=counts, seconds=in_turns(functions, device, repetitions))


def matrix_rate(device: str, dtype: torch.dtype, quick: bool = False) -> float:
    """Multiply-adds a second of the product of two large square matrices."""
    size = 256 if quick else 8192 if device == 'cuda' else 2048
    first, second = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    measured = measure({'product': lambda: torch.mm(first, second)}, device, Repetitions(5, 5))
    return measured['multiply_adds']['product'] / statistics.median(measured['seconds']['product'])


def copy_rate(device: str, quick: bool = False) -> float:
    """Bytes a second, those read and those written, of copying a tensor that fits no cache."""
    source = torch.ones((1 if quick else 256) * 2**20 // 4, device=device)
    target = torch.empty_like(source)
    measured = measure({'copy': lambda: target.copy_(source)}, device, Repetitions(5, 5))
    return 2 * source.numel() * source.element_size() / statistics.median(measured['seconds']['copy'])
