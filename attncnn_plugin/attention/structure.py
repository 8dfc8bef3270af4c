"""State dicts of another structure than the module that loads them.

A checkpoint carries its structure in its names and shapes: heads that were removed, position tables for another grid,
the second phase. A :class:`Restructurable` module reads the structure from the state dict, then either takes that
structure or converts the entries to its own. This happens in one pre-hook of ``load_state_dict``, so
checkpoints load everywhere with the config that they came from.

Modules of other libraries do not change when they load. :func:`attncnn_plugin.follow_state_dict` changes them.
"""

import warnings
from collections import OrderedDict
from contextlib import contextmanager
from typing import Any, Callable, Dict, Hashable, Iterator, List, Mapping, Optional

import torch
from torch import Tensor, nn

StateDict = Dict[str, Tensor]

MEMBERS = ('_parameters', '_buffers', '_modules', '_non_persistent_buffers_set')


class StructureError(ValueError, RuntimeError):
    """A state dict that no structure of a module explains: PyTorch has a RuntimeError for one that does not fit."""


def too_many_heads(prefix: str, loaded: int, built: int) -> StructureError:
    """The refusal of a state dict that has more heads than the layer was built with."""
    return StructureError(
        f'{prefix.rstrip(".")} has {loaded} heads in the state dict, but num_heads={built} in the model: build it with '
        'as many'
    )


class Restructurable(nn.Module):
    """A module that loads state dicts of several structures.

    Subclasses call :meth:`_follow_state_dicts` at the end of their constructor, and define :attr:`structure`,
    :meth:`structure_in`, and :meth:`take_structure`, :meth:`convert_state_dict` or both.

    A state dict that cannot be loaded is refused as PyTorch refuses a wrong shape: ``load_state_dict`` collects the
    message and raises ``RuntimeError``. The module then has the structure that it had before.
    """

    _training_advice: Optional[str] = None

    def _follow_state_dicts(self) -> None:
        self.register_load_state_dict_pre_hook(_adapt)

    @property
    def structure(self) -> Hashable:
        """The structure that the module has."""
        raise NotImplementedError

    def structure_in(self, state_dict: StateDict, prefix: str) -> Optional[Hashable]:
        """Returns the structure that a state dict has for this module; changes nothing.

        Args:
            state_dict (dict[str, Tensor]): With the module's names, each after ``prefix``.
            prefix (str): Name of the module with a dot, or empty.

        Returns:
            Hashable | None: The structure; None where the entries are missing, as for any other missing key.

        Raises:
            StructureError: No structure of this module explains the entries.
        """
        raise NotImplementedError

    def structure_to_load(self, loaded: Any) -> Hashable:
        """Returns the structure to have while a state dict of another structure is loaded. Defaults to that one."""
        return loaded

    def take_structure(self, structure: Any) -> None:
        """Gives the module another structure, with values that are yet to be loaded.

        Raises:
            StructureError: The module cannot have it.
        """
        raise NotImplementedError

    def convert_state_dict(self, state_dict: StateDict, prefix: str) -> None:
        """Converts the entries of a state dict to the structure of the module, in place.

        Raises:
            StructureError: They cannot be converted.
        """
        raise NotImplementedError

    def follow(self, state_dict: StateDict, prefix: str) -> bool:
        """Takes the structure that the module is to have while a state dict is loaded.

        Returns:
            bool: Whether that is another one than before.

        Raises:
            StructureError: No structure of this module explains the entries.
        """
        loaded = self.structure_in(state_dict, prefix)
        if loaded is None or loaded == self.structure:
            return False
        target = self.structure_to_load(loaded)
        if target == self.structure:
            return False
        self.take_structure(target)
        return True

    def training_advice(self, structure: Any) -> Optional[str]:
        """The warning for someone who trains the module after loading has given it this structure; None for none."""
        return None

    def train(self, mode: bool = True) -> 'Restructurable':
        if mode and self._training_advice is not None:
            advice, self._training_advice = self._training_advice, None
            warnings.warn(advice, stacklevel=2)
        return super().train(mode)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state dict, as of any module; the structure stays as it was where it is refused."""
        with structure_kept_on_error(self):
            return super().load_state_dict(state_dict, strict, assign)


def remember_structure(model: nn.Module) -> Callable[[], None]:
    """Returns a function that gives a model back the structure that it has now.

    Parameters that have been resized since get back their values, too; others keep the ones that they have then.
    """
    modules = [(module, type(module), dict(vars(module))) for module in model.modules()]
    members = [
        (member, member.copy())
        for _, _, attributes in modules
        for member in map(attributes.get, MEMBERS)
        if isinstance(member, (dict, set))
    ]
    parameters = [
        (parameter, parameter.data, parameter.grad, parameter.requires_grad) for parameter in model.parameters()
    ]

    def give_back() -> None:
        for module, cls, attributes in modules:
            module.__class__ = cls
            vars(module).clear()
            vars(module).update(attributes)
        for member, content in members:
            member.clear()
            member.update(content)
        for parameter, values, grad, requires_grad in parameters:
            parameter.grad = None
            parameter.data, parameter.grad = values, grad
            parameter.requires_grad_(requires_grad)

    return give_back


@contextmanager
def structure_kept_on_error(model: nn.Module) -> Iterator[None]:
    """Gives a model back its structure if an error leaves the context."""
    give_back = remember_structure(model)
    try:
        yield
    except BaseException:
        give_back()
        raise


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


@torch.no_grad()
def _adapt(
    module: Restructurable,
    state_dict: StateDict,
    prefix: str,
    local_metadata: Dict[str, Any],
    strict: bool,
    missing_keys: List[str],
    unexpected_keys: List[str],
    error_msgs: List[str],
) -> None:
    """The pre-hook: the module takes the structure of the state dict, or converts it."""
    try:
        loaded = module.structure_in(state_dict, prefix)
        if loaded is None or loaded == module.structure:
            return
        target = module.structure_to_load(loaded)
        if target != module.structure:
            advice = module.training_advice(target)
            module.take_structure(target)
            module._training_advice = advice
        if target != loaded:
            module.convert_state_dict(state_dict, prefix)
    except StructureError as error:
        error_msgs.append(str(error))
