"""Random numbers that a hook draws without changing those of the training."""

import random
from contextlib import contextmanager
from typing import Iterator

import numpy as np
import torch


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restores Python's, numpy's and PyTorch's random numbers at the end, those of the current GPU included."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
