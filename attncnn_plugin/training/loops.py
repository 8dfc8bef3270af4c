"""What ``TwoPhases`` and ``PruneHeads``, which a training loop calls, have in common."""

import random
from contextlib import contextmanager
from numbers import Integral
from typing import Any, Iterable, Iterator, List, Mapping, Tuple, Union

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..attention.state_dicts import StructureError
from ..change import Change
from ..pruning.optimizers import replace_parameters
from ..structure import apply, follow_state_dict, plan

Optimizers = Union[torch.optim.Optimizer, Iterable[torch.optim.Optimizer]]


def check_epochs(what: str, epochs: Any) -> Tuple[int, ...]:
    """Returns one epoch, or a sequence of them, as a tuple; ``what`` begins the error.

    Raises:
        ValueError: One is no whole number, or negative.
    """
    listed = tuple(epochs) if isinstance(epochs, (list, tuple, range)) else (epochs,)
    if any(not isinstance(epoch, Integral) or isinstance(epoch, bool) or epoch < 0 for epoch in listed):
        raise ValueError(f'{what} must be whole numbers, counted from 0')
    return listed


def uncompiled(model: nn.Module) -> nn.Module:
    """Returns the model that ``torch.compile`` has wrapped."""
    return getattr(model, '_orig_mod', model)


def check_one_device(number: int) -> None:
    """Refuses a trainer of several devices, which wraps the model for them once.

    Raises:
        TypeError: It has several.
    """
    if number > 1:
        raise TypeError(
            f'the trainer has {number} devices, and wraps the model once: use a run per phase, or a loop of your own'
        )


def in_list(optimizers: Optimizers) -> List[torch.optim.Optimizer]:
    """Returns a list of optimizers, or of what wraps them, for one or several."""
    return [optimizers] if hasattr(optimizers, 'param_groups') else list(optimizers)


def follow_with_optimizer(model: nn.Module, optimizer: Optimizers, state_dict: Mapping[str, Any]) -> Change:
    """Brings a model, and an optimizer of it, to the structure of a checkpoint: before you load both, to resume.

    The optimizer is as new, built for the model as the first epoch had it, and gets the parameters of attention in the
    groups and in the order in which :class:`TwoPhases` has put them.

    Args:
        model (nn.Module): The model as it is built for the first epoch, not wrapped for distributed training.
        optimizer (Optimizer | Iterable[Optimizer]): What trains it.
        state_dict (Mapping[str, Tensor]): The weights of the checkpoint.

    Returns:
        Change: What :func:`attncnn_plugin.follow_state_dict` did; an average of the model needs only that.

    Raises:
        StructureError: The state dict does not fit.
    """
    change = follow_state_dict(model, state_dict)
    for own in in_list(optimizer):
        replace_parameters(own, change)
    return change


def follow_as_it_loads(model: nn.Module, optimizer: Optimizers = ()) -> RemovableHandle:
    """Makes a model take the structure of whatever it loads, for trainers that leave no place to do so before.

    Args:
        model (nn.Module): The model.
        optimizer (Optimizer | Iterable[Optimizer]): What trains it, and gets its new parameters. Defaults to none.

    Returns:
        RemovableHandle: Ends it, by ``remove()``.
    """
    optimizers = in_list(optimizer)

    def follow(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        try:
            change = apply(module, plan(module, state_dict, prefix))
        except StructureError as error:
            args[-1].append(str(error))
            return
        for own in optimizers:
            replace_parameters(own, change)

    return model.register_load_state_dict_pre_hook(follow)


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
