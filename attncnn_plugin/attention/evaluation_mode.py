"""A context manager that puts a model into evaluation mode."""

from contextlib import contextmanager
from typing import Iterator

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode inside, and each single module back into its own mode after it.

    Nothing runs compiled inside: compiled modules do not call new hooks.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.compiler.set_stance('force_eager'):
            yield
    finally:
        for module in training:
            module.training = True
