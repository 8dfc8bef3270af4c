"""Heads of an attention layer: which entries of which parameter belong to them, and their removal (C20, appendix E)."""

import contextlib
import functools
import itertools
import operator
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ..change import Successor, is_plain, resize, succession
from .attention_layer import AttentionLayer
from .state_dicts import Restructurable, StateDict, StructureError, too_many_heads

# By name of a parameter: its dimension of heads, and how many entries a head has there, one number for all or for each.
HeadParameters = Dict[str, Tuple[int, Any]]


class PrunableHeads(Restructurable, AttentionLayer):
    """An attention layer whose heads can be removed one by one, also by loading a state dict with fewer of them.

    Attributes:
        num_heads (int): Number of heads N_h there are now.
        built_heads (int): Number of heads that the layer was built with, the most that it can load.
    """

    built_heads: int
    output_name = 'value'

    def head_parameters(self) -> HeadParameters:
        """Returns, for each parameter with entries for heads, their dimension and how many a head has there.

        In general these are the parameters of an ``encoding``.
        """
        encoding = getattr(self, 'encoding', None)
        own = [] if encoding is None else encoding.named_parameters(recurse=False)
        return {f'encoding.{name}': (0, 1) for name, _ in own}

    def head_entries(self, heads: Sequence[int]) -> Dict[str, Tuple[int, Tensor]]:
        """Returns, for each parameter with entries for heads, their dimension and the indices of these heads."""
        found = {}
        for name, (dim, entries) in self.head_parameters().items():
            starts = list(itertools.accumulate(self._widths(entries), initial=0))
            index = [entry for head in heads for entry in range(starts[head], starts[head + 1])]
            part = operator.attrgetter(name)(self)  # a tensor, where a parametrization computes it
            found[name] = dim, torch.tensor(index, dtype=torch.long, device=part.device)
        return found

    @property
    def output(self) -> Any:
        """The linear map that takes the outputs of all heads, which lie one after the other."""
        return self.get_submodule(self.output_name)

    def output_entries(self, heads: Sequence[int]) -> Tensor:
        """Returns which columns of the weight of :attr:`output` take the outputs of some heads, ``(n,)``."""
        return self.head_entries(heads)[f'{self.output_name}.weight'][1]

    def check_heads(self, heads: Sequence[int], allow_empty: bool = False) -> List[int]:
        """Returns heads as integers; raises an error for those that cannot be removed.

        Raises:
            TypeError: Something computes their weights.
            ValueError: A head that is not there, or all of them.
        """
        heads = check_heads(heads, self.num_heads, allow_empty)
        layout = {name: (dim, sum(self._widths(entries))) for name, (dim, entries) in self.head_parameters().items()}
        reason = not_alone(self, layout)
        if reason is not None:
            raise TypeError(f'heads cannot be removed from a {type(self).__name__}: {reason}')
        return heads

    @torch.inference_mode(False)
    @torch.no_grad()
    def prune_heads(self, heads: Sequence[int], allow_empty: bool = False) -> Dict[nn.Parameter, Successor]:
        """Removes heads; the layer computes what it did with their output at zero. Returns what replaced parameters.

        An optimizer has to be given the new ones, see :func:`~attncnn_plugin.pruning.replace_parameters`.

        Args:
            heads (Sequence[int]): Heads to remove, counted among those there are now.
            allow_empty (bool): Whether all heads may go, which leaves the layer its bias. Defaults to False.

        Raises:
            TypeError: Something computes the weights of the heads, such as an adapter, or they are quantized.
            ValueError: A head that is not there, or all of them; a parameter has a hook or an attribute that may not
                fit the new one.
        """
        heads = self.check_heads(heads, allow_empty)
        kept = [head for head in range(self.num_heads) if head not in heads]
        replaced = keep_entries(self, self.head_entries(kept))
        self._note_kept(kept)
        return replaced

    def _note_kept(self, heads: Sequence[int]) -> None:
        """Notes that the layer has only these of its heads from now on."""
        self.num_heads = len(heads)

    def structure_in(self, state_dict: StateDict, prefix: str) -> Any:
        """Returns the number of heads in a state dict; None if it is the layer's, or entries are missing.

        Raises:
            StructureError: Shapes that no number of heads explains, or more heads than the layer was built with.
        """
        places, counts = self.head_parameters(), {}
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for name, (dim, entries) in places.items():
            loaded, own = state_dict.get(prefix + name), parameters.get(name)  # None if something computes it
            if not isinstance(loaded, Tensor) or own is None:
                continue
            heads, rest = divmod(loaded.shape[dim], entries) if loaded.ndim == own.ndim else (0, 1)
            if rest or loaded.movedim(dim, 0).shape[1:] != own.movedim(dim, 0).shape[1:]:
                raise StructureError(
                    f'{prefix}{name} of the state dict has shape {tuple(loaded.shape)}, that of the model '
                    f'{tuple(own.shape)}: no number of heads explains it, so the model has another width or another '
                    'kind of attention; build it as the one that was saved'
                )
            counts[name] = heads
        if len(set(counts.values())) > 1:
            raise StructureError(
                f'the parameters of {prefix.rstrip(".")} in the state dict have different numbers of '
                f'heads, {counts}: it is damaged, or its heads have other widths than those of the model'
            )
        if counts and max(counts.values()) > self.built_heads:
            raise too_many_heads(prefix, max(counts.values()), self.built_heads)
        number = next(iter(counts.values()), None) if len(counts) == len(places) else None
        return None if number == self.num_heads else number

    def take_structure(self, structure: Any) -> None:
        """Takes a number of heads, all 0 until they are loaded. The parameters stay the same objects."""
        self.num_heads = structure
        for name, (dim, entries) in self.head_parameters().items():
            parameter = self.get_parameter(name)
            resize(self, name, [*parameter.shape[:dim], sum(self._widths(entries)), *parameter.shape[dim + 1 :]])
            _set_parameter(self, name, parameter)

    def _widths(self, entries: Any) -> Sequence[int]:
        return [entries] * self.num_heads if isinstance(entries, int) else entries


def check_heads(heads: Sequence[int], num_heads: int, allow_empty: bool) -> List[int]:
    """Returns heads, which may come from an array, as integers.

    Raises:
        ValueError: Heads that a layer of ``num_heads`` does not have, or all of them.
    """
    heads = list(heads)
    with contextlib.suppress(TypeError):  # what is no integer is refused below
        heads = [operator.index(head) for head in heads]
    if any(not isinstance(head, int) or not 0 <= head < num_heads for head in heads) or len(set(heads)) < len(heads):
        raise ValueError(f'heads={heads} must be different heads from 0 to {num_heads - 1}')
    if len(heads) == num_heads and not allow_empty:
        raise ValueError(
            f'heads={heads} are all heads of the layer: keep one, or set allow_empty=True to leave the layer its bias'
        )
    return heads


def not_alone(module: nn.Module, layout: Mapping[str, Tuple[int, int]]) -> Optional[str]:
    """Returns why entries cannot be removed from parameters, by name; None if they can.

    ``layout`` has the dimension of heads of each, and how many entries it has there.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    for name, (dim, entries) in layout.items():
        own: Any = named.get(name)
        if own is None:
            return (
                f'its {name} is no parameter of its own: remove the parametrization or the mask first, merge an '
                "adapter (merge_and_unload() of peft's), or prune before you quantize"
            )
        if not is_plain(own) or not own.is_floating_point():
            kind = f'{type(own).__name__} of {own.dtype}'
            return f'its {name} is a {kind}, not a plain floating-point parameter: prune before you quantize or shard'
        if own.ndim <= dim or own.shape[dim] != entries:
            return f'its {name} has shape {tuple(own.shape)}, but {entries} entries are expected in dimension {dim}'
    return None


def keep_entries(module: nn.Module, entries: Dict[str, Tuple[int, Tensor]]) -> Dict[nn.Parameter, Successor]:
    """Replaces parameters, by name, by some of their entries along a dimension; returns what replaced each old one."""
    replaced = {}
    for name, (dim, index) in entries.items():
        old = module.get_parameter(name)
        select = functools.partial(_select, dim, index)
        new = nn.Parameter(select(old), requires_grad=old.requires_grad)
        if old.grad is not None:
            new.grad = select(old.grad)
        replaced[old] = succession(old, {name: new}, new, select)
    for name, new in [part for own in replaced.values() for part in own.parameters.items()]:
        _set_parameter(module, name, new)
    return replaced


def _select(dim: int, index: Tensor, x: Tensor) -> Tensor:
    return x.index_select(dim, index.to(x.device))


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition('.')
    owner = module.get_submodule(path)
    setattr(owner, leaf, parameter)
    if isinstance(owner, nn.Linear):
        owner.out_features, owner.in_features = owner.weight.shape
