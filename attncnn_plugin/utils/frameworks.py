"""Whether mmpretrain is here, and its own tools."""

import importlib
import importlib.util
import logging
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Optional

import torch

INSTALL = 'pip install mmpretrain "mmengine<1.0" "mmcv-lite>=2.0,<2.4" "setuptools<82"'

TOOLS_OF_RUNNERS = ('train.py', 'test.py', 'analysis_tools/confusion_matrix.py')


def has_mmpretrain() -> bool:
    """Whether mmpretrain is installed, working or not."""
    return importlib.util.find_spec('mmpretrain') is not None


def import_problem() -> Optional[str]:
    """Why mmpretrain cannot be imported here and what to install, in one sentence; None if it can."""
    if not has_mmpretrain():
        return f'mmpretrain is not installed: {INSTALL}'
    try:
        for name in ('mmpretrain', 'mmpretrain.models', 'mmpretrain.datasets'):
            importlib.import_module(name)
    except Exception as error:  # it refuses versions by assertions, and breaks on others in any other way
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip('.')
        return f'mmpretrain cannot be imported with the versions that are installed ({reason}): {INSTALL}'
    return None


def config_problem() -> Optional[str]:
    """Why configs cannot inherit from mmpretrain's, although it can be imported; None if they can."""
    from mmengine.utils import get_installed_path

    try:
        get_installed_path('mmpretrain')
    except ModuleNotFoundError as error:
        return (
            f'mmengine cannot find the configs of packages ({error}; setuptools has it up to version 81): '
            'pip install "setuptools<82"'
        )
    return None


def require_mmpretrain() -> None:
    """Does nothing if mmpretrain can be imported.

    Raises:
        ImportError: It cannot; the message says why and what to install.
    """
    problem = import_problem()
    if problem is not None:
        raise ImportError(problem)


def run_mmpretrain_tool(name: str) -> None:
    """Runs one of mmpretrain's own tools with this process's arguments.

    Those that load a checkpoint by a ``Runner`` have a ``FollowStateDictHook`` among the default hooks of the config:
    models of other libraries take the structure of the checkpoint.

    An error ends the process with status 1, its traceback in the log and, as the last line of the output, its sentence.
    So does the name of no tool.

    Args:
        name (str): Path of the tool below mmpretrain's ``tools`` folder, for instance ``'train.py'``.
    """
    problem = import_problem() or config_problem()
    if problem is not None:
        sys.exit(problem)
    import mmpretrain
    from mmengine.logging import print_log

    from .errors import one_line

    tools = Path(mmpretrain.__file__).parent / '.mim' / 'tools'
    if not (tools / name).is_file():
        sys.exit(f'{name} is no tool of mmpretrain, which are in {tools}')
    _join_process_group_without_gpu()
    if name in TOOLS_OF_RUNNERS:
        sys.argv += ['--cfg-options', 'default_hooks.follow_state_dict.type=mmpretrain.FollowStateDictHook']
    try:
        runpy.run_path(str(tools / name), run_name='__main__')
    except Exception as error:
        print_log(traceback.format_exc(), logger='current', level=logging.ERROR)
        sys.exit(one_line(error))


def _join_process_group_without_gpu() -> None:
    """Where torchrun started this process on a machine with CPUs alone: mmengine would select a GPU first, and fail."""
    from mmengine.device import get_device

    if 'TORCHELASTIC_RUN_ID' in os.environ and get_device() == 'cpu':
        torch.distributed.init_process_group('gloo')
