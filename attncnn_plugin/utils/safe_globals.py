"""mmengine's checkpoints on torch >= 2.6, which loads with ``weights_only=True``."""

import pickle
from typing import Any, Callable

import numpy as np
import torch
from mmengine.logging import HistoryBuffer


def register_safe_globals() -> None:
    """Tells torch that what the logs in mmengine's checkpoints are made of is safe to load, and nothing else.

    A training checkpoint holds, in its message hub, ``HistoryBuffer`` objects, which are arrays of numbers and
    references to methods of their own class, and numpy scalars. Anything else that is not a tensor or plain data
    stays refused.
    """
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
    """What ``getattr`` means in a checkpoint: a statistics method of ``HistoryBuffer``, such as ``min``."""
    methods = HistoryBuffer()._statistics_methods  # of the class, filled in by its first instance
    if owner is HistoryBuffer and name in methods:
        return methods[name]
    raise pickle.UnpicklingError(f'the checkpoint asks for the attribute {name!r} of {owner!r}, which is refused')
