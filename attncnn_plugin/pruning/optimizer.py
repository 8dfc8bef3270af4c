"""An optimizer that goes on after parameters were replaced: heads removed, convolutions turned into attention.

Cordonnier et al. 2020, appendix E, train on after pruning, d'Ascoli et al. 2021 after the conversion.
"""

from typing import List, Mapping, Tuple, Union

import torch
from torch import Tensor, nn

from ..change import Change, Successor


def replace_parameters(
    optimizer: torch.optim.Optimizer, change: Union[Change, Mapping[nn.Parameter, Successor]]
) -> None:
    """Gives an optimizer the parameters that took the place of others, with the state of the entries that were kept.

    The groups, their order and their settings stay: parameters join the group of the one whose place they took. State
    that has the parameter's shape, such as a momentum, loses the same entries as the parameter, or takes their new
    order. A single number, such as that of the steps, stays. Parameters that have no entries of old ones, such
    as the centres of heads that were a convolution, begin without state.

    Args:
        optimizer (Optimizer): Any optimizer whose state for a parameter has tensors of its shape, single numbers, or
            none.
        change (Change | Mapping[Parameter, Successor]): What became of a model, of
            :func:`~attncnn_plugin.convert.convs_to_attention` for instance, or of a layer's parameters, of
            :meth:`~attncnn_plugin.attention.heads.PrunableHeads.prune_heads`.
            Parameters that the optimizer does not have are left out.

    Raises:
        ValueError: State of another shape, such as that of Adafactor, a row and a column for each matrix. The optimizer
            is as it was.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=3)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        >>> layer(torch.randn(1, 5, 6, 8)).sum().backward()
        >>> optimizer.step()
        >>> replace_parameters(optimizer, layer.prune_heads([1]))
        >>> optimizer.state[layer.encoding.center]['momentum_buffer'].shape
        torch.Size([2, 2])
    """
    replaced = change.replaced if isinstance(change, Change) else change
    for old in replaced:
        for name, value in optimizer.state.get(old, {}).items():
            if isinstance(value, Tensor) and value.numel() != 1 and value.shape != old.shape:
                raise ValueError(
                    f'{name} of a {type(optimizer).__name__} has shape {tuple(value.shape)} for a parameter of '
                    f'{tuple(old.shape)}: state of another shape cannot lose its entries; use an optimizer '
                    'such as AdamW'
                )
    for group in optimizer.param_groups:
        names = group.get('param_names', [''] * len(group['params']))
        pairs: List[Tuple[str, nn.Parameter]] = []
        for name, old in zip(names, group['params']):
            pairs += replaced[old].parameters.items() if old in replaced else [(name, old)]
        group['params'][:] = [parameter for _, parameter in pairs]
        if 'param_names' in group:
            group['param_names'][:] = [name for name, _ in pairs]
    for old, successor in replaced.items():
        state = optimizer.state.pop(old, None)
        inherit = successor.inherit
        if state and successor.heir is not None and inherit is not None:
            optimizer.state[successor.heir] = {
                name: inherit(value).contiguous() if isinstance(value, Tensor) and value.shape == old.shape else value
                for name, value in state.items()
            }
