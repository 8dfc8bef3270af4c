"""``load_state_dict`` of every module asks for replacements first: a fresh CNN takes the attention of its state dict.

PyTorch has no hook for the loading of all modules, so its method is wrapped. A state dict without entries of a
registered replacement is loaded as ever.
"""

import functools
from typing import Any, Mapping

from torch import nn

from .structure import Restructurable, StructureError, replace_modules

ADVICE = (
    'the model took attention in the place of convolutions from the state dict that it loaded: an optimizer that was '
    'built before does not have its parameters, nor has a wrapper for distributed training. Call '
    'attncnn_plugin.layers.follow_state_dict(model, state_dict) before they are built to train it further'
)


def replace_before_loading(model: nn.Module, state_dict: Any) -> None:
    """Puts the modules of a state dict in their places, and warns whoever trains the model after that.

    Raises:
        RuntimeError: A module of the state dict does not fit in the place that it has, as PyTorch refuses a wrong
            shape.
    """
    if not isinstance(state_dict, Mapping):
        return  # PyTorch says so
    try:
        replaced = replace_modules(model, state_dict)
    except StructureError as error:
        raise RuntimeError(f'Error(s) in loading state_dict for {type(model).__name__}:\n\t{error}') from error
    for module in replaced[:1]:  # one warning is enough
        if isinstance(module, Restructurable):
            module._training_advice = ADVICE


def patch_load_state_dict() -> None:
    """Wraps ``nn.Module.load_state_dict``; may be done twice."""
    load = nn.Module.load_state_dict
    if hasattr(load, 'replaces_modules'):
        return

    @functools.wraps(load)
    def load_state_dict(self: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        replace_before_loading(self, state_dict)
        return load(self, state_dict, *args, **kwargs)

    load_state_dict.replaces_modules = True  # type: ignore[attr-defined]
    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]
