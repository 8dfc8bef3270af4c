"""An optimizer that goes on after parameters have lost some of their entries."""

from typing import Dict

import torch
from torch import Tensor, nn

from ..layers.prunable_heads import Replacement


def replace_parameters(optimizer: torch.optim.Optimizer, replaced: Dict[nn.Parameter, Replacement]) -> None:
    """Gives an optimizer the parameters that took the place of others, with the state of the entries that were kept.

    Groups, their order and their settings stay. What the state has for each entry, such as a momentum, is that of the
    kept entries; what it has for the whole parameter, such as a number of steps, stays.

    Args:
        optimizer (Optimizer): Any optimizer whose state for a parameter has tensors of its shape, or none.
        replaced (dict[Parameter, Replacement]): The result of
            :meth:`~attncnn_plugin.layers.prunable_heads.PrunableHeads.prune_heads`.
            Parameters that the optimizer does not have are left out.
    """
    for group in optimizer.param_groups:
        for position, old in enumerate(group['params']):
            if old in replaced:
                group['params'][position] = replaced[old].parameter
    for old, replacement in replaced.items():
        state = optimizer.state.pop(old, None)
        if state:
            optimizer.state[replacement.parameter] = {
                name: _kept(value, old, replacement) for name, value in state.items()
            }


def _kept(value, old: nn.Parameter, replacement: Replacement):
    if isinstance(value, Tensor) and value.shape == old.shape:
        return value.index_select(replacement.dim, replacement.index.to(value.device))
    return value
