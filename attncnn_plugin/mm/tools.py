"""mmpretrain's own tools with this plugin, and errors in one line for the end of a tool's output."""

import contextlib
import gc
import logging
import os
import runpy
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any
from urllib.error import URLError

import mmpretrain
import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.logging import print_log

from ..installation import config_path


def run_mmpretrain_tool(name: str) -> None:
    """Runs one of mmpretrain's own tools with this process's arguments.

    A config of this package needs no path. Tools that load a checkpoint by a ``Runner`` get a ``FollowStateDictHook``.
    An error ends the process with status 1, its traceback in the log and, as the last line of the output, its sentence.
    So does the name of no tool.

    Where several ranks end without an error, each waits for the others, and ends the process group with its threads.
    Ranks were seen to abort as their interpreter ended with threads of the group, while the first one still saved the
    best checkpoint, and torchrun ends all ranks when one aborts.

    Args:
        name (str): Path of the tool below mmpretrain's ``tools`` folder, for instance ``'train.py'``.
    """
    from . import safe_loading  # noqa: F401

    warnings.filterwarnings('ignore', 'Fail to import|pkg_resources is deprecated')  # as the tool imports the rest
    tools = Path(mmpretrain.__file__).parent / '.mim' / 'tools'
    if 'TORCHELASTIC_RUN_ID' in os.environ and get_device() == 'cpu':  # mmengine would select a GPU first, and fail
        torch.distributed.init_process_group('gloo')
    sys.argv[1:] = [_find_config(word) if word.endswith('.py') else word for word in sys.argv[1:]]
    if name in ('train.py', 'test.py', 'analysis_tools/confusion_matrix.py'):
        sys.argv += ['--cfg-options', 'default_hooks.follow_state_dict.type=mmpretrain.FollowStateDictHook']
    try:
        runpy.run_path(str(tools / name), run_name='__main__')
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
            gc.collect()  # the runner, a cycle, holds the model, and this the group with its threads
    except Exception as error:  # the others may wait in the middle of something: nothing here waits for them
        print_log(traceback.format_exc(), logger='current', level=logging.ERROR)
        sys.exit(one_line(error))


def _find_config(path: str) -> str:
    """Returns the config of this package that has a name, where no file has it."""
    with contextlib.suppress(FileNotFoundError):
        return path if os.path.exists(path) else config_path(path)
    return path


def read_config(path: str) -> Any:
    """Reads a config, as ``Config.fromfile`` of mmengine does; one of this package needs no path."""
    return Config.fromfile(_find_config(path))


FOLDERS = ' '.join(f'{phase}_dataloader.dataset.data_root=FOLDER' for phase in ('train', 'val', 'test'))


def one_line(error: BaseException) -> str:
    """Returns the last line of Python's report of an error; of several lines of a message, the first.

    Of a file that is not there it says which, and of a data set that could not be downloaded, what to do.
    """
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ['no reason is given']
    if lines[0].startswith('Caught ') and ' in DataLoader worker process ' in lines[0]:
        return lines[-1]  # of a traceback in the message
    reason = f'{type(error).__name__}: {lines[0]}'
    if lines[0].startswith('Input dimension should be at least 3'):  # of the pooling in mmpretrain's necks
        reason += '; the features are pooled already: write neck=None in model, or out_type="featmap" in its backbone'
    folders = [Path(frame.f_code.co_filename).parent.name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if 'shapes cannot be multiplied' in lines[0] and 'heads' in folders:  # of mmpretrain
        reason += (
            '; the head does not fit: without a neck, write out_type="avg_featmap" in backbone; or in_channels in head'
        )
    if isinstance(error, URLError):  # mmpretrain has printed what it downloads to where
        return f'a data set is not there and cannot be downloaded ({reason}): name its folder: --cfg-options {FOLDERS}'
    return reason
