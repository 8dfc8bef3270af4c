"""mmengine's checkpoints on torch >= 2.6, which loads with ``weights_only=True``."""
import numpy as np
import torch


def register_safe_globals() -> None:
    """Tells torch that the classes of the logs in mmengine's checkpoints are safe to load, and no others.

    A training checkpoint holds, in its message hub, ``HistoryBuffer`` objects, which are pairs of numpy arrays of
    floats and integers, and numpy scalars. Anything else that is not a tensor or plain data stays refused.
    """
    from mmengine.logging import HistoryBuffer

    array_of_floats = np.zeros(1)
    reconstruct = array_of_floats.__reduce__()[0]  # where it lives depends on numpy's version
    scalar = array_of_floats[0].__reduce__()[0]
    dtypes = {type(np.dtype(name)) for name in ('float32', 'float64', 'int32', 'int64')}
    torch.serialization.add_safe_globals([HistoryBuffer, np.ndarray, np.dtype, reconstruct, scalar, *dtypes])
