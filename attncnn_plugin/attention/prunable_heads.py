"""Heads that can be removed from an attention layer (C20, appendix E)."""

import functools
import itertools
import logging
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import Tensor, nn

from ..change import Successor
from .attention_layer import AttentionLayer
from .structure import Restructurable, StateDict, StructureError, too_many_heads

logger = logging.getLogger(__name__)

# Of each parameter by name: the dimension of heads, and the entries of a head, a number for all or one for each.
HeadParameters = Dict[str, Tuple[int, Any]]


class PrunableHeads(Restructurable, AttentionLayer):
    """An attention layer whose heads can be removed one by one.

    A state dict carries its number of heads: one with fewer heads than the layer was built with changes the layer as
    it is loaded.

    Attributes:
        num_heads (int): Number of heads N_h there are now.
        built_heads (int): Number of heads that the layer was built with, the most that it can load.
    """

    def _init_heads(self, num_heads: int) -> None:
        self.num_heads = num_heads
        self.built_heads = num_heads
        self._follow_state_dicts()

    def head_parameters(self) -> HeadParameters:
        """Of every parameter with entries for single heads: the dimension of heads, and the entries of a head."""
        raise NotImplementedError

    def head_entries(self, heads: Sequence[int]) -> Dict[str, Tuple[int, Tensor]]:
        """Of every parameter with entries for single heads: the dimension of heads, and the entries of these heads."""
        found = {}
        for name, (dim, entries) in self.head_parameters().items():
            widths = [entries] * self.num_heads if isinstance(entries, int) else entries
            index = torch.tensor(_entries_of(heads, widths), dtype=torch.long, device=self.get_parameter(name).device)
            found[name] = dim, index
        return found

    @property
    def output(self) -> Any:
        """The linear map that takes the outputs of all heads, which lie one after the other."""
        return self.get_submodule('value')

    def output_entries(self, heads: Sequence[int]) -> Tensor:
        """The columns of the weight of :attr:`output` that take the outputs of some heads, ``(n,)``."""
        weight = self.output.weight
        return next(
            index for name, (_, index) in self.head_entries(heads).items() if self.get_parameter(name) is weight
        )

    def check_heads(self, heads: Sequence[int], allow_empty: bool = False) -> None:
        """Whether these heads can be removed.

        Raises:
            ValueError: A head that is not there, or all of them.
        """
        check_heads(heads, self.num_heads, allow_empty)

    @torch.no_grad()
    def prune_heads(self, heads: Sequence[int], allow_empty: bool = False) -> Dict[nn.Parameter, Successor]:
        """Removes heads; the layer computes what it did with their output at zero.

        Parameters with entries for heads are replaced by smaller ones: an optimizer has to be given the new ones, see
        :func:`~attncnn_plugin.pruning.replace_parameters`.

        Args:
            heads (Sequence[int]): Heads to remove, counted among those there are now.
            allow_empty (bool): Whether all heads may go, which leaves the layer its bias. Defaults to False.

        Returns:
            dict[Parameter, Successor]: What took the place of each old parameter.

        Raises:
            ValueError: A head that is not there, or all of them.
        """
        self.check_heads(heads, allow_empty)
        kept = [head for head in range(self.num_heads) if head not in heads]
        replaced = keep_entries(self, self.head_entries(kept))
        self._keep(kept)
        return replaced

    def _keep(self, heads: Sequence[int]) -> None:
        """The layer has these of its heads from now on."""
        self.num_heads = len(heads)

    @property
    def structure(self) -> Any:
        """The number of heads."""
        return self.num_heads

    def structure_in(self, state_dict: StateDict, prefix: str) -> Any:
        """The number of heads in a state dict; None where it has not all that there is of them: the rest would be 0."""
        counts = {}
        for name, (dim, entries) in self.head_parameters().items():
            loaded, own = state_dict.get(prefix + name), self.get_parameter(name)
            if loaded is None:
                continue
            others = [list(tensor.shape) for tensor in (loaded, own)]
            if loaded.ndim == own.ndim:
                heads, rest = divmod(others[0].pop(dim), entries)
                others[1].pop(dim)
            if loaded.ndim != own.ndim or others[0] != others[1] or rest:
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
        return next(iter(counts.values()), None) if len(counts) == len(self.head_parameters()) else None

    @torch.no_grad()
    def take_structure(self, structure: Any) -> None:
        """Takes a number of heads; the values are yet to be loaded.

        The parameters stay the same objects, so that an optimizer that was built before, but has not made a step, goes
        with them.
        """
        logger.info('An attention layer takes %d heads in place of %d.', structure, self.num_heads)
        for name, (dim, entries) in self.head_parameters().items():
            resize_parameter(self, name, dim, structure * entries)
        self.num_heads = structure


def check_heads(heads: Sequence[int], num_heads: int, allow_empty: bool) -> None:
    """Whether these heads can be removed from a layer of ``num_heads``.

    Raises:
        ValueError: A head that is not there, or all of them.
    """
    heads = list(heads)
    if len(set(heads)) < len(heads) or any(not isinstance(head, int) or not 0 <= head < num_heads for head in heads):
        raise ValueError(f'heads={heads} must be different heads from 0 to {num_heads - 1}')
    if len(heads) == num_heads and not allow_empty:
        raise ValueError(
            f'heads={heads} are all heads of the layer: keep one, or set allow_empty=True to leave the layer its bias'
        )


def keep_entries(module: nn.Module, entries: Dict[str, Tuple[int, Tensor]]) -> Dict[nn.Parameter, Successor]:
    """Replaces parameters of a module by some of their entries.

    Args:
        module (nn.Module): The module.
        entries (dict[str, tuple[int, Tensor]]): By the name of the parameter, a dimension and the entries along it.

    Returns:
        dict[Parameter, Successor]: What took the place of each old parameter.
    """
    replaced = {}
    for name, (dim, index) in entries.items():
        old = module.get_parameter(name)
        new = nn.Parameter(old.index_select(dim, index), requires_grad=old.requires_grad)
        if old.grad is not None:
            new.grad = old.grad.index_select(dim, index)
        replaced[old] = Successor({name: new}, new, functools.partial(_kept, dim, index))
        _set_parameter(module, name, new)
    return replaced


def _kept(dim: int, index: Tensor, x: Tensor) -> Tensor:
    return x.index_select(dim, index.to(x.device))


def resize_parameter(module: nn.Module, name: str, dim: int, entries: int) -> None:
    """Another number of entries, all 0, along a dimension of a parameter, which stays the same object."""
    parameter = module.get_parameter(name)
    shape = list(parameter.shape)
    shape[dim] = entries
    parameter.data, parameter.grad = parameter.data.new_zeros(shape), None
    _set_parameter(module, name, parameter)


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition('.')
    owner = module.get_submodule(path)
    setattr(owner, leaf, parameter)
    if isinstance(owner, nn.Linear):
        owner.out_features, owner.in_features = owner.weight.shape


def _entries_of(heads: Sequence[int], widths: Sequence[int]) -> List[int]:
    """The entries of some heads, where each has as many as ``widths`` says."""
    starts = list(itertools.accumulate(widths, initial=0))
    return [entry for head in heads for entry in range(starts[head], starts[head + 1])]
