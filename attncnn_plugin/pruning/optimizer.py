"""An optimizer that goes on after parameters were replaced: heads removed, convolutions turned into attention.

Cordonnier et al. 2020, appendix E, train on after pruning, d'Ascoli et al. 2021 after the conversion.
"""

from typing import Any, List, Mapping, Tuple, Union

import torch
from torch import Tensor, nn

from ..attention.prunable_heads import Replacement
from ..convert.succession import Succession


def replace_parameters(
    optimizer: torch.optim.Optimizer, replaced: Mapping[nn.Parameter, Union[Replacement, Succession]]
) -> None:
    """Gives an optimizer the parameters that took the place of others, with the state of the entries that were kept.

    The groups, their order and their settings stay: parameters join the group of the one whose place they took. State
    that has the parameter's shape, such as a momentum, loses the same entries as the parameter, or takes their new
    order. A single number, such as that of the steps, stays. Parameters that have no entries of old ones, such
    as the centres of heads that were a convolution, begin without state.

    Args:
        optimizer (Optimizer): Any optimizer whose state for a parameter has tensors of its shape, single numbers, or
            none.
        replaced (Mapping[Parameter, Replacement | Succession]): The result of
            :meth:`~attncnn_plugin.attention.prunable_heads.PrunableHeads.prune_heads`, or ``report.replaced`` of
            :func:`~attncnn_plugin.convert.convs_to_attention`.
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
    for old in replaced:
        for name, value in optimizer.state.get(old, {}).items():
            if isinstance(value, Tensor) and value.numel() != 1 and value.shape != old.shape:
                raise ValueError(
                    f'{name} of a {type(optimizer).__name__} has shape {tuple(value.shape)} for a parameter of '
                    f'{tuple(old.shape)}: state of another shape cannot lose its entries; use an optimizer '
                    'such as AdamW'
                )
    for group in optimizer.param_groups:
        names = group.get('param_names', [None] * len(group['params']))
        pairs = [pair for own in zip(names, group['params']) for pair in _in_its_place(*own, replaced)]
        group['params'][:] = [parameter for _, parameter in pairs]
        if 'param_names' in group:
            group['param_names'][:] = [name for name, _ in pairs]
    for old, replacement in replaced.items():
        state = optimizer.state.pop(old, None)
        heir = replacement.parameter if isinstance(replacement, Replacement) else replacement.heir
        if state and heir is not None:
            optimizer.state[heir] = {name: _kept(value, old, replacement) for name, value in state.items()}


def _in_its_place(
    name: Any, old: nn.Parameter, replaced: Mapping[nn.Parameter, Union[Replacement, Succession]]
) -> List[Tuple[Any, nn.Parameter]]:
    """The parameters, with their names, that stand where one stood."""
    replacement = replaced.get(old)
    if replacement is None:
        return [(name, old)]
    if isinstance(replacement, Replacement):
        return [(name, replacement.parameter)]
    return list(replacement.parameters.items())


def _kept(value: Any, old: nn.Parameter, replacement: Union[Replacement, Succession]) -> Any:
    if not isinstance(value, Tensor) or value.shape != old.shape:
        return value
    if isinstance(replacement, Replacement):
        return value.index_select(replacement.dim, replacement.index.to(value.device))
    assert replacement.reorder is not None
    return replacement.reorder(value).contiguous()
