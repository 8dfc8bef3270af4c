"""Evaluation mode for a while."""

from contextlib import contextmanager
from typing import Iterator

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode inside, and each single module back into its own mode after it."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
