"""State dicts of another structure than the module that loads them, with fewer heads for instance."""

import copy
import json
import warnings
from collections import OrderedDict
from typing import Any, Dict, List, Mapping, Optional

import torch
from torch import Tensor, nn

StateDict = Dict[str, Tensor]

EXTRA_STATE = '_extra_state'  # PyTorch's name of what get_extra_state() returns
HOOKS = ('_forward_pre_hooks', '_forward_hooks', '_backward_pre_hooks', '_backward_hooks')


class StructureError(ValueError, RuntimeError):
    """A state dict that fits no structure of a module; a RuntimeError too, as PyTorch raises for a wrong shape."""


def too_many_heads(prefix: str, loaded: int, built: int) -> StructureError:
    """Returns the refusal of a state dict that has more heads than the layer was built with."""
    return StructureError(
        f'{prefix.rstrip(".")} has {loaded} heads in the state dict, but num_heads={built} in the model: build it with '
        'as many'
    )


class Restructurable(nn.Module):
    """A module that takes the structure of the state dict that it loads, or converts the entries to its own.

    Subclasses may define :meth:`follow` and :meth:`convert_state_dict`. A state dict that cannot be loaded is refused
    as PyTorch refuses a wrong shape, with ``RuntimeError``; the module is then as it was before.

    Attributes:
        training_advice (str | None): The warning for someone who trains the module after loading has given it another
            structure; None for none.
    """

    training_advice: Optional[str] = None
    _changed_by_loading = False

    def follow(self, state_dict: StateDict, prefix: str) -> Any:
        """Takes the structure that a state dict has for this module after ``prefix``; values are yet to be loaded.

        Returns:
            bool | Change | None: Something true if the structure has changed; a ``Change`` if layers were replaced.

        Raises:
            StructureError: No structure of this module explains the entries.
        """
        return False

    def convert_state_dict(self, state_dict: StateDict, prefix: str) -> None:
        """Converts the entries of a state dict to the structure of the module, in place.

        Raises:
            StructureError: They cannot be converted.
        """

    def train(self, mode: bool = True) -> 'Restructurable':
        if mode and self._changed_by_loading and self.training_advice is not None:
            warnings.warn(self.training_advice, stacklevel=2)
        if mode:
            self._changed_by_loading = False
        return super().train(mode)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state dict, as of any module; where it is refused, nothing has changed."""
        check_loading(copy_without_values(self), state_dict, strict)
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self,
        state_dict: StateDict,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: List[str],
        unexpected_keys: List[str],
        error_msgs: List[str],
    ) -> None:
        try:
            with torch.no_grad():
                self._changed_by_loading |= bool(self.follow(state_dict, prefix))
                self.convert_state_dict(state_dict, prefix)
        except StructureError as error:
            error_msgs.append(str(error))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def copy_without_values(model: nn.Module) -> Any:
    """Returns a copy of a model on the meta device, where things can be tried out.

    Hooks, and tensors that are plain attributes, such as an output that a hook has kept, are shared.
    """
    known: Dict[int, Any] = {}
    for parameter in model.parameters():
        known[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device='meta'), requires_grad=False)
    for buffer in model.buffers():
        known[id(buffer)] = torch.empty_like(buffer, device='meta')
    for module in model.modules():
        known.update({id(getattr(module, name)): getattr(module, name) for name in HOOKS})  # can hold anything
        known.update({id(value): value for value in vars(module).values() if isinstance(value, Tensor)})
    return copy.deepcopy(model, known)


def check_loading(trial: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Loads a state dict into a :func:`copy_without_values`, without copying any value.

    Raises:
        StructureError: It is refused.
    """
    entries: Any = OrderedDict(
        (name, value.detach() if isinstance(value, Tensor) else value) for name, value in state_dict.items()
    )
    if hasattr(state_dict, '_metadata'):
        entries._metadata = copy.deepcopy(state_dict._metadata)  # PyTorch writes in it that tensors are assigned
    try:
        nn.Module.load_state_dict(trial, entries, strict, assign=True)
    except RuntimeError as error:
        raise StructureError(str(error)) from error


def write_extra_state(structure: Any) -> Tensor:
    """Returns a structure of plain values as JSON in a ``uint8`` tensor, which every format of checkpoints has."""
    return torch.tensor(list(json.dumps(structure).encode()), dtype=torch.uint8, device='cpu')


def read_extra_state(state_dict: Mapping[str, Any], prefix: str) -> Any:
    """Returns what :func:`write_extra_state` has put into a state dict for a module; None where it has nothing.

    Raises:
        StructureError: It is damaged.
    """
    entry = state_dict.get(prefix + EXTRA_STATE)
    if entry is None:
        return None
    try:
        entry = entry.round().to(torch.uint8)  # of floats where all entries were cast or averaged
        return json.loads(bytes(entry.tolist()))
    except (AttributeError, TypeError, ValueError) as error:
        raise StructureError(f'{prefix}{EXTRA_STATE} of the state dict is damaged: {error}') from error


def without_prefix(state_dict: Mapping[str, Any], prefix: str) -> 'OrderedDict[str, Any]':
    """Returns a state dict, and its metadata, whose names begin after a prefix; names without it stay.

    Raises:
        StructureError: An entry is there under both names.
    """

    def short(name: str) -> str:
        return name[len(prefix) :] if name.startswith(prefix) else name

    both = [name for name in state_dict if name.startswith(prefix) and short(name) in state_dict]
    if both:
        raise StructureError(
            f'the state dict has both {short(both[0])} and {both[0]}, which are one entry of the model: leave out one'
        )
    renamed: Any = OrderedDict((short(name), value) for name, value in state_dict.items())
    metadata = getattr(state_dict, '_metadata', None) or {}
    renamed._metadata = OrderedDict((short(f'{name}.')[:-1], value) for name, value in metadata.items())
    return renamed
