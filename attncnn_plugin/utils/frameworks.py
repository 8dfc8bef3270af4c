"""Whether mmpretrain is here, and its own tools."""
import importlib
import importlib.util
import os
import runpy
import sys
from pathlib import Path
from typing import Optional

import torch

INSTALL = 'pip install mmpretrain "mmengine<1.0" "mmcv-lite>=2.0,<2.4" "setuptools<82"'


def has_mmpretrain() -> bool:
    """Whether mmpretrain is installed, working or not."""
    return importlib.util.find_spec('mmpretrain') is not None


def mmpretrain_problem() -> Optional[str]:
    """Why mmpretrain cannot be used here and what to install, in one sentence; None if all is well."""
    if not has_mmpretrain():
        return f'mmpretrain is not installed: {INSTALL}'
    if importlib.util.find_spec('pkg_resources') is None:
        return ('mmengine needs pkg_resources, which setuptools 82 and later do not have: '
                'pip install "setuptools<82"')
    try:
        importlib.import_module('mmpretrain')
    except Exception as error:  # it refuses versions by assertions, and breaks on others in any other way
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip('.')
        return f'mmpretrain cannot be imported with the versions that are installed ({reason}): {INSTALL}'
    return None


def require_mmpretrain() -> None:
    """Does nothing if mmpretrain can be used.

    Raises:
        ImportError: It cannot; the message says why and what to install.
    """
    problem = mmpretrain_problem()
    if problem is not None:
        raise ImportError(problem)


def run_mmpretrain_tool(name: str) -> None:
    """Runs one of mmpretrain's own tools with this process's arguments.

    Args:
        name (str): Path of the tool below mmpretrain's ``tools`` folder, for instance ``'train.py'``.
    """
    problem = mmpretrain_problem()
    if problem is not None:
        sys.exit(problem)
    import mmpretrain
    _join_process_group_without_gpu()
    runpy.run_path(str(Path(mmpretrain.__file__).parent / '.mim' / 'tools' / name), run_name='__main__')


def _join_process_group_without_gpu() -> None:
    """Where torchrun started this process on a machine without a GPU: mmengine would select a GPU first, and fail."""
    if 'TORCHELASTIC_RUN_ID' in os.environ and not torch.cuda.is_available():
        torch.distributed.init_process_group('gloo')
