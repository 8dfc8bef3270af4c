"""A hook that draws random numbers, and a training that does not notice."""

import random
from contextlib import contextmanager
from typing import Iterator

import numpy as np
import torch


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """What is drawn inside, by workers' seeds and augmentation, is drawn again outside."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
