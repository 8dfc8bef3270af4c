"""Local checkpoint files: read as only tensors and plain data, and compared with the checksums that they carry.

The weights in the package too, by names of their own.
"""

import os
import pickle
import re
import warnings
import zipfile
from typing import Any, Callable

import numpy as np
import torch
from safetensors.torch import load_file

from . import weights


def register_safe_globals() -> None:
    """Adds the types in the logs of mmengine's checkpoints to PyTorch's list of safe ones, if mmengine is installed.

    These are ``HistoryBuffer`` objects, of arrays of numbers and references to methods of their own class, and numpy
    scalars. Anything else that is not a tensor or plain data stays refused.
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
    """Returns a statistics method of ``HistoryBuffer``, such as ``min``: no ``getattr`` in a checkpoint gets more."""
    from mmengine.logging import HistoryBuffer

    methods = HistoryBuffer()._statistics_methods  # of the class, filled in by its first instance
    if owner is HistoryBuffer and name in methods:
        return methods[name]
    raise pickle.UnpicklingError(f'the checkpoint asks for the attribute {name!r} of {owner!r}')


PACKAGE_SCHEME = 'attncnn://'


def load_from_local(filename: str, map_location=None, *, mmap: bool = False) -> dict:
    """Loads a local checkpoint file; nothing in it is run.

    Every file is read with PyTorch's unpickler for tensors and plain data, whatever mmengine or the environment say. A
    zip file, as ``torch.save`` writes them, is first compared with its CRC-32 checksums, which costs about what reading
    it costs.

    Args:
        filename (str): The file; ``~`` is the home folder.
        map_location: As in :func:`torch.load`. Defaults to None.
        mmap (bool): Whether tensors stay in the file until they are used. Defaults to False.

    Raises:
        FileNotFoundError: There is no such file.
        pickle.UnpicklingError: It is damaged, of another kind, or asks for something that is not safe to load.
        TypeError: It holds something else than a dictionary.
    """
    path = os.path.expanduser(filename)
    if not os.path.isfile(path):
        raise FileNotFoundError(f'{filename} can not be found.')
    with open(path, 'rb') as file:  # a file without permission is no damaged one
        is_zip = file.read(4) == b'PK\x03\x04'
    register_safe_globals()  # again: another library's ``torch.serialization.safe_globals`` may have removed them
    is_whole = False
    try:
        is_whole = is_zip and _compare_checksums(path)
        loaded = torch.load(path, map_location, weights_only=True, mmap=mmap and is_zip)
    except Exception as error:  # damage makes PyTorch raise anything
        raise pickle.UnpicklingError(f'{filename} {_reason(error, is_whole)}') from error
    if not isinstance(loaded, dict):
        raise TypeError(
            f'{filename} holds a {type(loaded).__name__}, but a checkpoint is a dictionary of weights, or '
            "one that has them as its 'state_dict'"
        )
    if not is_whole:
        warnings.warn(f'{filename} has no checksums: damage to its weights is not noticed', stacklevel=2)
    return loaded


def load_from_package(filename: str, map_location='cpu') -> dict:
    """Loads weights in the package, ``'attncnn://'`` and the name in timm, as a checkpoint of mmpretrain's classifier.

    Raises:
        FileNotFoundError: The package has no weights of this network.
    """
    name = filename[len(PACKAGE_SCHEME) :]
    path = weights.weights_file(name)
    if path is None:
        known = ', '.join(sorted(path.stem for path in weights.FOLDER.glob('*.safetensors')))
        raise FileNotFoundError(f'attncnn_plugin has no weights of {name}, but of {known}')
    loaded = load_file(path, device=str(map_location or 'cpu'))
    state_dict = {
        key if key.startswith('head.') else f'backbone.{key}': value
        for key, value in weights.in_single_precision(loaded, None).items()
    }
    return dict(state_dict=state_dict, meta=dict(dataset_meta=dict(classes=weights.CLASSES)))


def _compare_checksums(path: str) -> bool:
    """Compares every record of a zip file with its CRC-32; returns False if it has none, raises if it is damaged."""
    try:
        with zipfile.ZipFile(path) as file:
            records = file.infolist()
            if not any(record.CRC for record in records):
                return False
            damaged = file.testzip()
    except Exception as error:  # damage to the structure makes zipfile raise anything
        raise zipfile.BadZipFile(str(error)) from error
    if damaged is not None or any(record.external_attr & 0x10 for record in records):
        # The bit is that of a folder, which torch.save does not write, and of which PyTorch reads no byte.
        raise zipfile.BadZipFile(f'{damaged or "a folder"} is not what was saved')
    return True


def _reason(error: Exception, is_whole: bool) -> str:
    """Says why a file was not loaded: the end of a sentence that begins with its name."""
    message = str(error)
    unsafe_name = re.search(r'GLOBAL (\S+)', message)
    if unsafe_name:
        return f'was refused and nothing in it was run: it asks for {unsafe_name[1]}, but may hold only plain data'
    if is_whole and isinstance(error, pickle.UnpicklingError):
        reason = message.split('WeightsUnpickler error:')[-1].strip().splitlines()[0]
        return f'was refused and nothing in it was run: {reason}'
    if isinstance(error, (MemoryError, RuntimeError)) and 'PytorchStreamReader' not in message:
        return f'cannot be loaded: {message.splitlines()[0] if message else type(error).__name__}'  # no memory, no GPU
    return 'is damaged or no checkpoint at all: give a whole file that torch.save has written'
