"""Loading of state dicts whose structure differs from that of the module, such as fewer heads."""

import json
import warnings
from collections import OrderedDict
from typing import Any, Dict, Mapping, Optional

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from ..change import Change, undone

StateDict = Dict[str, Tensor]

EXTRA_STATE = '_extra_state'  # PyTorch's name of what get_extra_state() returns


class StructureError(ValueError, RuntimeError):
    """Raised for a state dict that fits no structure of a module; a RuntimeError, as PyTorch raises for shapes."""


def check_number(prefix: str, loaded: int, built: int) -> None:
    """Raises :class:`StructureError` for a number of heads in a state dict that the layer cannot have."""
    if not 1 <= loaded <= built:
        raise StructureError(
            f'{prefix.rstrip(".")} has {loaded} heads in the state dict, but num_heads={built} in the model: build it '
            'with as many'
        )


class Restructurable(nn.Module):
    """A module that takes the structure of the state dict that it loads, or converts the entries to its own.

    Subclasses may define :meth:`structure_in` with :meth:`take_structure`, and :meth:`convert_state_dict`. A state dict
    that cannot be loaded is refused as PyTorch refuses a wrong shape, with ``RuntimeError``; the module is then as it
    was before. Whoever trains a module that has got other parameters by loading is warned.
    """

    _replaced_by_loading = False

    def structure_in(self, state_dict: StateDict, prefix: str) -> Any:
        """Returns the structure that the entries after ``prefix`` need; None if it is the module's own.

        Raises:
            StructureError: No structure of this module explains the entries.
        """

    def take_structure(self, structure: Any) -> Optional[Change]:
        """Takes a structure that :meth:`structure_in` has returned; values are yet to be loaded.

        Returns:
            Change | None: What was replaced; None if all modules and parameters are the same objects.
        """

    def convert_state_dict(self, state_dict: StateDict, prefix: str) -> None:
        """Converts the entries of a state dict, in place, to the module's structure, or layers inside to theirs.

        Raises:
            StructureError: They cannot be converted.
        """

    def train(self, mode: bool = True) -> 'Restructurable':
        if mode and self._replaced_by_loading:
            self._replaced_by_loading = False
            warnings.warn(
                f'the {type(self).__name__} took attention instead of convolutions from the state dict that it loaded: '
                'an optimizer that was built before does not have its parameters. To train it further, build it with '
                "phase='attn', or call attncnn_plugin.follow_state_dict(model, state_dict) before you build the "
                'optimizer',
                stacklevel=2,
            )
        return super().train(mode)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state dict as any module does, but changes nothing if it is refused."""
        with undone([self]):
            try_loading(self, state_dict, strict)
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *args: Any) -> None:
        try:
            with torch.inference_mode(False), torch.no_grad():
                structure = self.structure_in(state_dict, prefix)
                if structure is not None:
                    self._replaced_by_loading |= bool(self.take_structure(structure))
                self.convert_state_dict(state_dict, prefix)
        except StructureError as error:
            args[-1].append(str(error))  # the messages of all errors
        super()._load_from_state_dict(state_dict, prefix, *args)


def try_loading(model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Loads a state dict inside of :func:`~attncnn_plugin.change.undone`, without copying any value.

    Raises:
        StructureError: It is refused.
    """
    for module in model.modules():
        vars(module)['set_extra_state'] = lambda state: None  # what it would set can be anywhere
        if isinstance(module, torch.jit.ScriptModule):  # its values are not in Python
            vars(module)['_load_from_state_dict'] = lambda *args: None
    entries: Any = OrderedDict(state_dict)
    entries.update({name: value.detach() for name, value in state_dict.items() if isinstance(value, Tensor)})
    # PyTorch writes in it that tensors are assigned.
    entries._metadata = {name: dict(own) for name, own in (getattr(state_dict, '_metadata', None) or {}).items()}
    try:
        nn.Module.load_state_dict(model, entries, strict, assign=True)
    except RuntimeError as error:
        raise StructureError(str(error)) from error


def write_extra_state(structure: Any) -> Tensor:
    """Encodes a structure of plain values as JSON in a ``uint8`` tensor, which every checkpoint format has."""
    return torch.tensor(list(json.dumps(structure).encode()), dtype=torch.uint8, device='cpu')


def read_extra_state(state_dict: Mapping[str, Any], prefix: str) -> Any:
    """Reads what :func:`write_extra_state` has put into a state dict for a module; None if there is nothing.

    Raises:
        StructureError: It is damaged.
    """
    entry = state_dict.get(prefix + EXTRA_STATE)
    if entry is None:
        return None
    try:
        entry = entry.round().to(torch.uint8)  # of floats where all entries were cast or averaged
        return dict(json.loads(bytes(entry.tolist())))
    except (AttributeError, TypeError, ValueError) as error:
        raise StructureError(f'{prefix}{EXTRA_STATE} of the state dict is damaged: {error}') from error


def without_prefix(state_dict: Mapping[str, Any], prefix: str) -> 'OrderedDict[str, Any]':
    """Returns a state dict, and its metadata, without a prefix of names; names that do not have it stay.

    Raises:
        StructureError: An entry is there under both names.
    """
    both = [name for name in state_dict if name.startswith(prefix) and name[len(prefix) :] in state_dict]
    if both:
        raise StructureError(
            f'the state dict has both {both[0][len(prefix) :]} and {both[0]}, which are one entry of the model: leave '
            'out one'
        )
    renamed: Any = OrderedDict(state_dict)
    renamed._metadata = OrderedDict(getattr(state_dict, '_metadata', None) or {})
    consume_prefix_in_state_dict_if_present(renamed, prefix)
    return renamed
