"""Optimizers that go on when parameters of a model are replaced, whatever optimizers are around them or inside."""

from typing import Any, Dict, Iterable, List, Mapping, Set, Tuple, Union

import torch
from torch import Tensor, nn

from ..change import Change, Successor, held_by, holds_tensors, is_plain

State = Dict[Any, Any]

NEW_OPTIMIZER = 'build a new optimizer for the changed model'
OTHER_OPTIMIZER = f'state of another shape cannot lose its entries; {NEW_OPTIMIZER}, or use an optimizer such as AdamW'


def replace_parameters(
    optimizer: Any, change: Union[Change, Mapping[nn.Parameter, Successor]], anew: bool = False
) -> None:
    """Gives an optimizer the parameters that took the place of others, with the state of the entries that were kept.

    The groups, their order and their settings stay: parameters join the group of the one whose place they took. Where
    others took places, a group is in the order of the model, as that of a new optimizer to resume with. State that has
    the parameter's shape, such as a momentum, loses the same entries as the parameter, or takes their new order. A
    single number, such as that of the steps, stays. Parameters that have no entries of old ones, such as the centres of
    heads that were a convolution, begin without state.

    The same becomes of optimizers inside, at any depth, as of SAM, Lookahead and accelerate's and mmengine's wrappers.

    Args:
        optimizer (Optimizer): Any optimizer, or what holds some, whose parameters are in groups and have states by
            parameter, of tensors of its shape, single numbers, or nothing.
        change (Change | Mapping[Parameter, Successor]): What became of a model, of
            :func:`~attncnn_plugin.pruning.prune_heads` for instance, or its ``replaced``. Parameters that the optimizer
            does not have are left out.
        anew (bool): Whether the optimizer forgets the states of all its parameters. Defaults to False.

    Raises:
        TypeError: There is no optimizer.
        ValueError: State of another shape, such as that of Adafactor, a row and a column for each matrix; or parameters
            or tensors in other places, such as the partitions of a ``ZeroRedundancyOptimizer``. The optimizer is as it
            was.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> from attncnn_plugin.pruning import prune_heads
        >>> layer = QuadraticAttention(dim=8, num_heads=3)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        >>> layer(torch.randn(1, 5, 6, 8)).sum().backward()
        >>> optimizer.step()
        >>> replace_parameters(optimizer, prune_heads(layer, {'': [1]}))
        >>> optimizer.state[layer.encoding.center]['momentum_buffer'].shape
        torch.Size([2, 2])
    """
    replaced = change.replaced if isinstance(change, Change) else change
    order = {new: number for number, new in enumerate(change.order if isinstance(change, Change) else ())}
    groups, states = check_optimizer(optimizer, replaced, anew)
    heirs = [] if anew else [(old, own) for old, own in replaced.items() if own.heir is not None]
    of_heirs = [{own.heir: _inherited(state[old], old, own) for old, own in heirs if old in state} for state in states]
    for state, inherited in zip(states, of_heirs):
        for old in list(state) if anew else replaced:
            state.pop(old, None)
        state.update(inherited)
    for group in (own for own in groups if replaced.keys() & {*own['params']}):
        names = group.get('param_names', [''] * len(group['params']))
        pairs: List[Tuple[str, nn.Parameter]] = []
        for name, old in zip(names, group['params']):
            pairs += replaced[old].parameters.items() if old in replaced else [(name, old)]
        ordered = iter(sorted((own for own in pairs if own[1] in order), key=lambda own: order[own[1]]))
        pairs = [next(ordered) if own[1] in order else own for own in pairs]  # others stay where they are
        group['params'][:] = [parameter for _, parameter in pairs]
        if 'param_names' in group:
            group['param_names'][:] = [name for name, _ in pairs]
    for _, _, own, _ in held_by(optimizer, by_parameter):
        if isinstance(own, torch.optim.LBFGS):
            own._numel_cache = None  # the number of their entries


def _inherited(value: Any, old: Tensor, successor: Any) -> Any:
    if isinstance(value, dict):
        return {name: _inherited(own, old, successor) for name, own in value.items()}
    return successor.inherit(value).contiguous() if isinstance(value, Tensor) and value.shape == old.shape else value


def check_optimizer(
    optimizer: Any, parameters: Iterable[nn.Parameter], anew: bool = False
) -> Tuple[List[Dict[str, Any]], List[State]]:
    """Refuses an optimizer that cannot lose entries of these parameters, or that holds them in places of its own.

    With ``anew`` it need not keep their states.

    Returns:
        tuple[list[dict], list[dict]]: All groups of parameters, and all states by parameter, of this optimizer and of
        those inside.

    Raises:
        TypeError: There is no optimizer.
        ValueError: State of another shape than the parameter's, or that is no tensor; or one of the parameters, or
            tensors of several entries, are in another place.
    """
    kind, old = type(optimizer).__name__, set(parameters)
    held = list(held_by(optimizer, by_parameter))
    groups = [own for _, _, own, _ in held if isinstance(own, dict) and isinstance(own.get('params'), list)]
    states = {way: own for way, _, own, _ in held if by_parameter(own)}
    if not groups:
        raise TypeError(f'a {kind} has no param_groups: give an optimizer, or what holds one')
    storages = {_storage(parameter): parameter.numel() for parameter in old if _storage(parameter)}
    in_groups, concerned, elsewhere = {id(group['params']) for group in groups}, False, []
    for way, holder, own, is_data in held:
        if isinstance(own, Tensor):
            around = own not in old and own.numel() >= storages.get(_storage(own), torch.inf)  # such as a flat buffer
            concerned |= around or own in old
            if around or id(holder) not in in_groups and (own in old or is_data and own.numel() > 1):
                elsewhere.append(way)
    if not concerned and not any(old & state.keys() for state in states.values()):
        return groups, list(states.values())
    elsewhere += [way for way, own in states.items() if not all(isinstance(x, (dict, Tensor)) for x in own.values())]
    if elsewhere:
        raise ValueError(
            f'a {kind} holds parameters or their tensors in {elsewhere[0].lstrip(".")}, beside its groups and states, '
            f'where nothing can take their places: {NEW_OPTIMIZER}'
        )
    for state in () if anew else states.values():
        _check_entries(kind, state, old)
    if not anew and any(isinstance(own, torch.optim.LBFGS) and own.state for _, _, own, _ in held):
        raise ValueError(f'a {kind} keeps one state for all parameters: {OTHER_OPTIMIZER}')
    return groups, list(states.values())


def by_parameter(own: Any) -> bool:
    """Returns True for a dict whose keys are parameters."""
    return isinstance(own, dict) and any(isinstance(key, Tensor) for key in own)


def _check_entries(kind: str, state: State, old: Set[nn.Parameter]) -> None:
    entries = [
        (parameter, name, value)
        for parameter, own in state.items()
        for name, value in (own if isinstance(own, dict) else {'state': own}).items()
    ]
    # What has another shape for one parameter is no momentum for another either, whose shape it has by chance.
    shapes = {
        name: f'has shape {tuple(value.shape)} for a parameter of {tuple(parameter.shape)}'
        for parameter, name, value in entries
        if isinstance(value, Tensor) and value.numel() != 1 and value.shape != parameter.shape
    }
    for parameter, name, value in entries:
        if parameter in old and holds_tensors(value):
            wrong = 'has several tensors for a parameter'
            if isinstance(value, Tensor):
                wrong = shapes.get(name, '' if is_plain(value) else f'is a {type(value).__name__}')
            if wrong:
                raise ValueError(f'{name} of a {kind} {wrong}: {OTHER_OPTIMIZER}')


def _storage(own: Tensor) -> int:
    """Returns where the entries of a tensor are; 0 where they are nowhere, or in several places."""
    return own.untyped_storage().data_ptr() if is_plain(own) else 0
