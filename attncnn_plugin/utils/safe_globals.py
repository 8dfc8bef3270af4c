"""The names that a checkpoint of mmengine may refer to and that PyTorch does not know as safe by itself."""

import pickle
from typing import Any, Callable

import numpy as np
import torch


def register_safe_globals() -> None:
    """Adds what the logs in mmengine's checkpoints are made of to PyTorch's list of safe names.

    A training checkpoint holds, in its message hub, ``HistoryBuffer`` objects and numpy scalars. A ``HistoryBuffer``
    is made of arrays of numbers and of references to methods of its own class. Anything else that is not a tensor or
    plain data stays refused. The list is a set: adding the names again changes nothing. Without mmengine it stays as
    it is.
    """
    try:
        from mmengine.logging import HistoryBuffer
    except ImportError:
        return
    numbers = np.zeros(1)
    reconstruct_array, reconstruct_scalar = numbers.__reduce__()[0], numbers[0].__reduce__()[0]
    arrays = [
        (function, f'{module}.{name}')
        for module in ('numpy.core.multiarray', 'numpy._core.multiarray')  # of numpy 1 and of numpy 2
        for function, name in ((reconstruct_array, '_reconstruct'), (reconstruct_scalar, 'scalar'))
    ]
    dtypes = {type(np.dtype(name)) for name in ('float32', 'float64', 'int32', 'int64')}
    torch.serialization.add_safe_globals(
        [HistoryBuffer, np.ndarray, np.dtype, *arrays, *dtypes, (_statistics_method, 'builtins.getattr')]
    )


def _statistics_method(owner: Any, name: str) -> Callable:
    """A statistics method of ``HistoryBuffer`` such as ``min``: all that ``getattr`` may fetch in a checkpoint."""
    from mmengine.logging import HistoryBuffer

    methods = HistoryBuffer()._statistics_methods  # of the class, filled in by its first instance
    if owner is HistoryBuffer and name in methods:
        return methods[name]
    raise pickle.UnpicklingError(f'the checkpoint asks for the attribute {name!r} of {owner!r}')
