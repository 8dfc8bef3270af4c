"""Heads of an attention layer: which entries of which parameter belong to them, and loading with fewer of them."""

from typing import Any, Dict, Sequence, Tuple

import torch
from torch import Tensor, nn

from ..change import resize
from .attention_layer import AttentionLayer
from .state_dicts import Restructurable, StateDict, StructureError, check_number

# By name of a parameter: its dimension of heads, and how many entries a head has there, one number for all or for each.
HeadParameters = Dict[str, Tuple[int, Any]]


class PrunableHeads(Restructurable, AttentionLayer):
    """An attention layer that can lose heads, also by loading a state dict with fewer of them.

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

    def head_owners(self) -> Dict[str, Tuple[int, Tensor]]:
        """Returns, for each of these parameters, the dimension of heads and which head has each entry.

        The latter is ``(entries, N_h)``, bool.
        """
        heads = torch.eye(self.num_heads, dtype=torch.bool, device='cpu')
        return {
            name: (dim, torch.cat([head.expand(width, -1) for head, width in zip(heads, self._widths(entries))]))
            for name, (dim, entries) in self.head_parameters().items()
        }

    @property
    def output(self) -> Any:
        """The linear map that takes the outputs of all heads, which lie one after the other."""
        return self.get_submodule(self.output_name)

    @property
    def output_widths(self) -> Sequence[int]:
        """How many channels of the input of :attr:`output` each head has."""
        return self._widths(self.head_parameters()[f'{self.output_name}.weight'][1])

    def note_kept(self, heads: Sequence[int]) -> None:
        """Notes that the layer has only these of its heads from now on; its parameters have lost the others."""
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
        if counts:
            check_number(prefix, max(counts.values()), self.built_heads)
        number = next(iter(counts.values()), None) if len(counts) == len(places) else None
        return None if number == self.num_heads else number

    def take_structure(self, structure: Any) -> None:
        """Takes a number of heads, all 0 until they are loaded. The parameters stay the same objects."""
        self.num_heads = structure
        for name, (dim, entries) in self.head_parameters().items():
            parameter = self.get_parameter(name)
            resize(self, name, [*parameter.shape[:dim], sum(self._widths(entries)), *parameter.shape[dim + 1 :]])
            set_parameter(self, name, parameter)

    def _widths(self, entries: Any) -> Sequence[int]:
        return [entries] * self.num_heads if isinstance(entries, int) else entries


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Sets a parameter of a module by its name, and the sizes of the linear map that has it."""
    path, _, leaf = name.rpartition('.')
    owner = module.get_submodule(path)
    setattr(owner, leaf, parameter)
    if isinstance(owner, nn.Linear):
        owner.out_features, owner.in_features = owner.weight.shape
