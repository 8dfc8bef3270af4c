"""What the objects have in common that a training loop calls."""

import random
from contextlib import contextmanager
from typing import Any, Iterable, Iterator, List, Sequence, Tuple, Union

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

Optimizers = Union[torch.optim.Optimizer, Iterable[torch.optim.Optimizer]]


def check_epochs(what: str, epochs: Sequence[Any]) -> Tuple[int, ...]:
    """Returns epochs, if that is what they are; ``what`` begins the error.

    Raises:
        ValueError: One is no whole number, or negative.
    """
    if any(not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0 for epoch in epochs):
        raise ValueError(f'{what} must be epochs, counted from 0')
    return tuple(epochs)


def check_not_wrapped(model: nn.Module) -> None:
    """Refuses a model that is wrapped for distributed training.

    Raises:
        TypeError: It is.
    """
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        raise TypeError(
            f'the model is a {type(model).__name__}, which knows the parameters that it was built with alone: give '
            'its .module, and build a new wrapper afterwards'
        )


def in_list(optimizers: Optimizers) -> List[torch.optim.Optimizer]:
    """Returns one optimizer, or several, in a list."""
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restores Python's, numpy's and PyTorch's random numbers at the end, those of the current GPU included."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
