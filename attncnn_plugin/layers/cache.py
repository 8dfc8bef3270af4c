"""What a layer computes from its parameters and the size of a grid, kept for inference."""

from typing import Any, Callable

import torch
from torch import nn

MAX_SIZES = 8  # sizes


class GridCache:
    """Results of a module's functions by the size of the grid, as long as the parameters are what they were.

    Changes in place and other parameters are seen, changes through ``.data`` in place are not.
    """

    def __init__(self) -> None:
        self._results = {}

    def __call__(self, module: nn.Module, make: Callable[..., Any], *size: int) -> Any:
        """``make(*size)``, computed once for a size.

        Args:
            module (nn.Module): Whose parameters ``make`` uses.
            make (Callable): A function of the size.
            size (int): The size, and whatever else the result depends on.
        """
        if torch.compiler.is_compiling() or (
            torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        ):
            return make(*size)
        parameters = list(module.parameters())
        state = [(id(p), p.data_ptr(), 0 if p.is_inference() else p._version) for p in parameters]
        kept = self._results.get(size)
        if kept is None or kept[0] != state:
            with torch.inference_mode(False), torch.no_grad():  # a result for calls outside of inference mode too
                # The parameters stay alive with it, so that no other one can have their identity.
                kept = state, make(*size), parameters
            if len(self._results) >= MAX_SIZES:
                self._results.clear()
            self._results[size] = kept
        return kept[1]

    def __len__(self) -> int:
        return len(self._results)

    def __reduce__(self):
        return GridCache, ()  # a copy begins anew
