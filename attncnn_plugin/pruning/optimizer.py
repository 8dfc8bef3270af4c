"""An optimizer that goes on after heads were removed (Cordonnier et al. 2020, appendix E, train on after pruning)."""

from typing import Any, Dict

import torch
from torch import Tensor, nn

from ..layers.prunable_heads import Replacement


def replace_parameters(optimizer: torch.optim.Optimizer, replaced: Dict[nn.Parameter, Replacement]) -> None:
    """Gives an optimizer the parameters that took the place of others, with the state of the entries that were kept.

    The groups, their order and their settings stay. State that has the parameter's shape, such as a momentum, loses the
    same entries. State of another shape, such as a number of steps, stays.

    Args:
        optimizer (Optimizer): Any optimizer whose state for a parameter has tensors of its shape, or none.
        replaced (dict[Parameter, Replacement]): The result of
            :meth:`~attncnn_plugin.layers.prunable_heads.PrunableHeads.prune_heads`.
            Parameters that the optimizer does not have are left out.

    Examples:
        >>> from attncnn_plugin.layers import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=3)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        >>> layer(torch.randn(1, 5, 6, 8)).sum().backward()
        >>> optimizer.step()
        >>> replace_parameters(optimizer, layer.prune_heads([1]))
        >>> optimizer.state[layer.encoding.center]['momentum_buffer'].shape
        torch.Size([2, 2])
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


def _kept(value: Any, old: nn.Parameter, replacement: Replacement) -> Any:
    if isinstance(value, Tensor) and value.shape == old.shape:
        return value.index_select(replacement.dim, replacement.index.to(value.device))
    return value
