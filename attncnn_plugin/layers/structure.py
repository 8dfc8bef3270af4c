"""State dicts of another structure than the module that loads them: one mechanism for the whole package.

A checkpoint carries its structure in its names and shapes: heads that were removed, position tables for another grid,
matrices that were multiplied, attention in the place of convolutions. A :class:`Restructurable` module reads the
structure from the state dict, then either takes that structure or converts the entries to its own. This happens in one
pre-hook of ``load_state_dict``, so checkpoints load everywhere with the config that they came from.

Where a state dict has a module of another kind than the model, one that is not of this package, a *replacement* puts
the other one in its place. No hook of a module can do that to itself, so ``load_state_dict`` itself asks for
replacements first, see :mod:`~attncnn_plugin.layers.structure_loading`.
"""

import warnings
from typing import Any, Callable, Dict, Hashable, Iterator, List, Mapping, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor, nn

StateDict = Dict[str, Tensor]
# Of a module, a state dict and the module's prefix in it: what to have in its place, or how it changes itself; None to
# leave it.
Replace = Callable[[nn.Module, Mapping[str, Tensor], str], Union[nn.Module, Callable[[], None], None]]

_replacements: Dict[Replace, Tuple[str, ...]] = {}


class StructureError(ValueError):
    """A state dict that no structure of a module explains."""


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
    message and raises ``RuntimeError``.
    """

    _training_advice: Optional[str] = None

    def _follow_state_dicts(self) -> None:
        self.register_load_state_dict_pre_hook(_adapt)

    @property
    def structure(self) -> Hashable:
        """The structure that the module has."""
        raise NotImplementedError

    def structure_in(self, state_dict: StateDict, prefix: str) -> Optional[Hashable]:
        """The structure that a state dict has for this module; changes nothing.

        Args:
            state_dict (dict[str, Tensor]): With the module's names, each after ``prefix``.
            prefix (str): Name of the module with a dot, or empty.

        Returns:
            Hashable | None: The structure; None where the entries are missing, as for any other missing key.

        Raises:
            StructureError: No structure of this module explains the entries.
        """
        raise NotImplementedError

    def can_take(self, structure: Any) -> bool:
        """Whether the module can have the structure of a state dict."""
        return True

    def structure_to_load(self, loaded: Any) -> Hashable:
        """The structure to have while a state dict of another structure is loaded: that one, or the module's own."""
        return loaded if self.can_take(loaded) else self.structure

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

    def training_advice(self, structure: Any) -> Optional[str]:
        """The warning for someone who trains the module after loading has given it this structure; None for none."""
        return None

    def train(self, mode: bool = True) -> 'Restructurable':
        if mode and self._training_advice is not None:
            advice, self._training_advice = self._training_advice, None
            warnings.warn(advice, stacklevel=2)
        return super().train(mode)


def follow_state_dict(model: nn.Module, state_dict: StateDict, prefix: str = '') -> bool:
    """Brings every module of a model to the structure of a state dict; the values are yet to be loaded.

    Optimizers hold parameters: someone who builds one before a checkpoint is loaded calls this function first, and
    builds it after.

    Args:
        model (nn.Module): Any model.
        state_dict (dict[str, Tensor]): With the model's names, each after ``prefix``.
        prefix (str): Defaults to no prefix.

    Returns:
        bool: Whether a module has changed.

    Raises:
        StructureError: No structure of a module explains its entries.
    """
    changed = bool(replace_modules(model, state_dict, prefix))
    return _take_structures(model, state_dict, prefix) or changed


def register_replacement(replace: Replace, suffixes: Tuple[str, ...]) -> None:
    """Lets state dicts that have another kind of module put it in the place of a model's.

    Args:
        replace (callable): Gives for a module, a state dict and the module's prefix in it what belongs in its place,
            with values that are yet to be loaded, or a function that gives the module itself the structure of the state
            dict; None where the module stays as it is. It changes nothing: that is done once all modules are known
            to fit.
        suffixes (tuple[str, ...]): Ends of the names that show that a state dict has such a module: for others nothing
            is asked.
    """
    _replacements[replace] = suffixes


def replace_modules(model: nn.Module, state_dict: Mapping[str, Tensor], prefix: str = '') -> List[nn.Module]:
    """Puts the modules that a state dict has in the place of those that a model has.

    Args:
        model (nn.Module): Any model; it stays itself, what it consists of can be replaced.
        state_dict (Mapping[str, Tensor]): With the model's names, each after ``prefix``.
        prefix (str): Defaults to no prefix.

    Returns:
        list[nn.Module]: The modules that are new, or of a new structure; their values are yet to be loaded.

    Raises:
        StructureError: A module of the state dict does not fit in the place that it has; nothing has changed.
    """
    wanted = [
        replace for replace, suffixes in _replacements.items() if any(key.endswith(suffixes) for key in state_dict)
    ]
    for replace in wanted:
        change = replace(model, state_dict, prefix)
        if change is not None and not isinstance(change, nn.Module):  # the model stays itself
            change()
            return [model]
    replaced = []
    for place in list(_places(model, state_dict, prefix, wanted)):  # all are found before the first changes
        if isinstance(place.new, nn.Module):
            setattr(place.parent, place.name, place.new)
        else:
            place.new()
        replaced.append(getattr(place.parent, place.name))
    return replaced


class _Place(NamedTuple):
    """A module that a state dict has another one for, or another structure of it."""

    parent: nn.Module
    name: str
    new: Union[nn.Module, Callable[[], None]]


def _places(
    parent: nn.Module, state_dict: Mapping[str, Tensor], prefix: str, wanted: List[Replace]
) -> Iterator[_Place]:
    for name, child in parent.named_children():
        path = f'{prefix}{name}.'
        new = next((new for new in (replace(child, state_dict, path) for replace in wanted) if new is not None), None)
        if new is None:
            yield from _places(child, state_dict, path, wanted)
        else:
            yield _Place(parent, name, new)


def _take_structures(model: nn.Module, state_dict: StateDict, prefix: str) -> bool:
    changed = False
    if isinstance(model, Restructurable):
        structure = model.structure_in(state_dict, prefix)
        if structure is not None and structure != model.structure and model.can_take(structure):
            model.take_structure(structure)
            changed = True
    for name, child in model.named_children():
        changed |= _take_structures(child, state_dict, f'{prefix}{name}.')
    return changed


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
