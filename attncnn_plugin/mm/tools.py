"""mmpretrain's own tools with this plugin, and errors in one line for the end of a tool's output."""

import logging
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Optional

import mmpretrain
import torch
from mmengine.device import get_device
from mmengine.logging import print_log
from mmengine.utils import get_installed_path
from mmpretrain.datasets.utils import download_and_extract_archive

TOOLS_OF_RUNNERS = ('train.py', 'test.py', 'analysis_tools/confusion_matrix.py')


def config_problem() -> Optional[str]:
    """Returns why configs cannot inherit from mmpretrain's, although it can be imported; None if they can."""
    try:
        get_installed_path('mmpretrain')
    except ModuleNotFoundError as error:
        return (
            f'mmengine cannot find the configs of packages ({error}; setuptools has it up to version 81): '
            'pip install "setuptools<82"'
        )
    return None


def run_mmpretrain_tool(name: str) -> None:
    """Runs one of mmpretrain's own tools with this process's arguments.

    Those that load a checkpoint by a ``Runner`` have a ``FollowStateDictHook`` among the default hooks of the config:
    models of other libraries take the structure of the checkpoint.

    An error ends the process with status 1, its traceback in the log and, as the last line of the output, its sentence.
    So does the name of no tool.

    Args:
        name (str): Path of the tool below mmpretrain's ``tools`` folder, for instance ``'train.py'``.
    """
    problem = config_problem()
    if problem is not None:
        sys.exit(problem)
    from . import safe_loading  # noqa: F401

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
    """Joins the processes of torchrun on a machine without GPUs, where mmengine would select a GPU first, and fail."""
    if 'TORCHELASTIC_RUN_ID' in os.environ and get_device() == 'cpu':
        torch.distributed.init_process_group('gloo')


FOLDERS = ' '.join(f'{phase}_dataloader.dataset.data_root=FOLDER' for phase in ('train', 'val', 'test'))


def one_line(error: BaseException, folder_option: str = f'--cfg-options {FOLDERS}') -> str:
    """Returns the last line of Python's report of an error; of several lines of a message, the first.

    Of a data set that could not be downloaded it says which file goes where.

    Args:
        error (BaseException): The error.
        folder_option (str): The option that names another folder. Defaults to that of mmpretrain's tools.
    """
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ['no reason is given']
    if lines[0].startswith('Caught ') and ' in DataLoader worker process ' in lines[0]:
        return lines[-1]  # of a traceback in the message
    reason = f'{type(error).__name__}: {lines[0]}'
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is download_and_extract_archive.__code__:
            own = frame.f_locals
            return (
                f'{own["url"]} cannot be downloaded ({reason}): put {own["filename"]} into {own["download_root"]}, or '
                f'name another folder: {folder_option}'
            )
    return reason
