"""A cache of results that depend on a layer's parameters and on the size of a grid."""

from typing import Any, Callable, Dict, Hashable, List, Tuple

import torch
from torch import Tensor, nn

MAX_SIZES = 8
# Parameters with at most as many entries are compared by their values on CPUs, where it costs some microseconds.
FEW_ENTRIES = 4096


class GridCache:
    """Results of functions of a module by the size of the grid, as long as its parameters are what they were.

    Small parameters on the CPU are compared by their values. Others count as changed if they are other tensors or were
    changed in place; a change in place through ``.data`` is not seen. Nothing is kept while parameters learn.
    """

    def __init__(self) -> None:
        self._results: Dict[Tuple[Hashable, ...], Tuple[_Snapshot, Any]] = {}

    def __call__(self, module: nn.Module, function: Callable[..., Any], *key: Hashable) -> Any:
        """``function(*key)``, computed once for a function and a key.

        Args:
            module (nn.Module): The module whose parameters the function uses.
            function (Callable): A method or a part of the module, or another function of the key, known by its name.
            key (Hashable): The size of the grid, and whatever else the result depends on.
        """
        parameters: List[Tensor] = list(module.parameters())
        if torch.compiler.is_compiling() or torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            return function(*key)
        name = getattr(function, '__name__', type(function).__name__), *key  # a module has no name of its own
        known = self._results.get(name)
        if known is None or not known[0].matches(parameters):
            with torch.inference_mode(False), torch.no_grad():  # a result for calls outside of inference mode too
                known = _Snapshot(parameters), function(*key)
            if len(self._results) >= MAX_SIZES:
                self._results.clear()
            self._results[name] = known
        return known[1]

    def __len__(self) -> int:
        return len(self._results)

    def __reduce__(self) -> Tuple[Any, ...]:
        return GridCache, ()  # a copy begins empty


class _Snapshot:
    """The state of parameters. It keeps them alive, so that no other tensor can take their place in memory."""

    def __init__(self, parameters: List[Tensor]) -> None:
        self._parameters = parameters
        self._versions = [_version(p) for p in parameters]
        self._values = [p.detach().clone() if _is_cheap(p) else None for p in parameters]

    def matches(self, parameters: List[Tensor]) -> bool:
        """Whether the parameters are still the same, with the same values."""
        return len(parameters) == len(self._parameters) and all(
            _equal(p, value) if value is not None else p is known and _version(p) == version
            for p, known, version, value in zip(parameters, self._parameters, self._versions, self._values)
        )


def _equal(parameter: Tensor, value: Tensor) -> bool:
    same = parameter.device == value.device and parameter.dtype == value.dtype and parameter.shape == value.shape
    return same and torch.equal(parameter, value)


def _is_cheap(parameter: Tensor) -> bool:
    return parameter.device.type == 'cpu' and parameter.numel() <= FEW_ENTRIES


def _version(parameter: Tensor) -> Tuple[int, int]:
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version
