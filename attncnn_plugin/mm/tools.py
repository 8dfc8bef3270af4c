"""mmpretrain's own tools with this plugin, and errors in one line for the end of a tool's output."""

import contextlib
import difflib
import logging
import os
import re
import runpy
import shlex
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, List, Optional

import mmpretrain
import mmpretrain.registry as registries  # and mmengine's, which it inherits from
import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import is_main_process
from mmengine.logging import MessageHub, print_log
from mmengine.registry import Registry
from mmengine.utils import get_installed_path
from mmpretrain.datasets.utils import download_and_extract_archive

from ..installation import config_path

TOOLS_OF_RUNNERS = ('train.py', 'test.py', 'analysis_tools/confusion_matrix.py')
# Warnings that every training without a GPU or with several ranks repeats, and the modules that they are of.
KNOWN_WARNINGS = {
    "'pin_memory' argument is set as true": r'torch\.utils\.data\.',
    'pkg_resources is deprecated': r'(mmengine\.utils\.|importlib)',
    'Setting (MKL|OMP)_NUM_THREADS environment variable': r'mmengine\.utils\.',
    '`broadcast_buffers` is deprecated': r'mmengine\.model\.wrappers\.',
}


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

    A config of this package needs no path. Tools that load a checkpoint by a ``Runner`` get a ``FollowStateDictHook``.
    ``train.py`` and ``test.py`` say what they do before mmengine does, and a training which checkpoint is the best. An
    error ends the process with status 1, its traceback in the log and, as the last line of the output, its sentence. So
    does the name of no tool.

    Where several ranks end without an error, each waits for the others, and leaves the process group. Ranks were seen
    to abort as their interpreter ended with the group's threads, while the first one still saved the best checkpoint,
    and torchrun ends all ranks when one aborts.

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
    sys.argv[1:] = [_find_config(word) if word.endswith('.py') else word for word in sys.argv[1:]]
    if name in TOOLS_OF_RUNNERS:
        sys.argv += ['--cfg-options', 'default_hooks.follow_state_dict.type=mmpretrain.FollowStateDictHook']
    for message, module in KNOWN_WARNINGS.items():
        warnings.filterwarnings('ignore', message, module=module)
    try:
        test = _say_what_begins(tools / name) if name in ('train.py', 'test.py') else []
        runpy.run_path(str(tools / name), run_name='__main__')
        if name == 'train.py' and is_main_process():
            _say_what_is_best(test)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        _leave_process_group()
    except SystemExit:  # of PreemptionHook, whose ranks have met
        _leave_process_group()
        raise
    except Exception as error:  # the others may wait in the middle of something: nothing here waits for them
        print_log(traceback.format_exc(), logger='current', level=logging.ERROR)
        sys.exit(one_line(error))


def _say_what_begins(tool: Path) -> List[str]:
    """Prints what a tool is going to do, on the first rank; returns the words of test.py, but for the checkpoint."""
    functions = runpy.run_path(str(tool))
    args = functions['parse_args']()
    config = functions['merge_args'](Config.fromfile(args.config), args)
    test = tool.name == 'test.py'
    loader = config.get('test_dataloader' if test else 'train_dataloader') or {}
    what = f'{_type(config.model.get("backbone", config.model))} of {args.config}'
    if {os.environ.get(rank, '0') for rank in ('RANK', 'SLURM_PROCID', 'OMPI_COMM_WORLD_RANK')} == {'0'}:
        what += f' with {args.checkpoint}' if test else ''
        print(f'{"Testing" if test else "Training"} {what} on {_type(loader.get("dataset", {}))}')
        print(f'{"The log goes" if test else "Logs and checkpoints go"} to {config.work_dir}', flush=True)
    own = {key: value for key, value in args.cfg_options.items() if not key.startswith('default_hooks.follow_')}
    options = [f'{key}={value}'.replace(' ', '') for key, value in own.items()]
    return [args.config, *(['--cfg-options', *options] if own else [])]


def _type(settings: Any) -> str:
    """Returns the name of the type that settings build, without its registry."""
    kind = settings.get('type', 'unknown')
    return getattr(kind, '__name__', str(kind)).rpartition('.')[2]


def _say_what_is_best(words: List[str]) -> None:
    """Prints the best checkpoints of the training that has ended, or else its last one, and how to test them."""
    hub, tool = MessageHub.get_current_instance(), Path(sys.argv[0]).with_name('test.py')
    metrics = {name[4:].replace('/', '_'): name[4:] for name in hub.log_scalars if name.startswith('val/')}
    said = {}
    for key, path in hub.runtime_info.items():
        of_name = re.fullmatch(r'best_(.+)_(epoch|iter)_(\d+)\.pth', os.path.basename(str(path)))
        if key.startswith('best_ckpt') and of_name and Path(path).is_file():
            score = f'{metrics.get(of_name[1], of_name[1])} {hub.get_info(key.replace("ckpt", "score")):.4g}'
            said[path] = f'Best {of_name[2]}: {of_name[3]}, with {score}, saved as {path}'
    last = hub.runtime_info.get('last_ckpt', '')
    if not said and Path(last).is_file():
        said[last] = f'Last checkpoint: {last}'
    for path, sentence in said.items():
        print(sentence)
        if tool.is_file():
            print('Test it:', shlex.join(['python', str(tool), *words[:1], path, *words[1:]]), flush=True)


def _join_process_group_without_gpu() -> None:
    """Joins the processes of torchrun on a machine without GPUs, where mmengine would select a GPU first, and fail."""
    if 'TORCHELASTIC_RUN_ID' in os.environ and get_device() == 'cpu':
        torch.distributed.init_process_group('gloo')


def _leave_process_group() -> None:
    """Ends the threads of the process group, if there is one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _find_config(path: str) -> str:
    """Returns the config of this package that has a name, where no file has it."""
    with contextlib.suppress(FileNotFoundError):
        return path if os.path.exists(path) else config_path(path)
    return path


def read_config(path: str) -> Any:
    """Reads a config, as ``Config.fromfile`` of mmengine does; one of this package needs no path.

    Raises:
        FileNotFoundError: It is not there, or one that it inherits from; the message has similar names in its folder.
    """
    try:
        return Config.fromfile(_find_config(path))
    except FileNotFoundError as error:
        raise FileNotFoundError(missing_file(error) or str(error)) from error


def missing_file(error: BaseException) -> Optional[str]:
    """Returns a sentence on a file that is not there, with similar names in its folder; None for other errors."""
    if not isinstance(error, FileNotFoundError):
        return None
    of_mmengine = re.fullmatch(r'file "(.+)" does not exist', str(error))
    name = of_mmengine[1] if of_mmengine else error.filename
    if not isinstance(name, str):
        return None
    folder = Path(name).parent
    if not folder.is_dir():
        return f'{name} is not there: there is no folder {folder}'
    similar = difflib.get_close_matches(Path(name).name, [path.name for path in folder.iterdir()])
    return f'{name} is not there' + (f': did you mean {" or ".join(similar)}?' if similar else '')


FOLDERS = ' '.join(f'{phase}_dataloader.dataset.data_root=FOLDER' for phase in ('train', 'val', 'test'))


def one_line(error: BaseException, folder_option: str = f'--cfg-options {FOLDERS}') -> str:
    """Returns the last line of Python's report of an error; of several lines of a message, the first.

    Of a file that is not there, and of a data set that could not be downloaded, it says which, and what to do:
    ``folder_option`` is the tool's option that names another folder.
    """
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ['no reason is given']
    if lines[0].startswith('Caught ') and ' in DataLoader worker process ' in lines[0]:
        return lines[-1]  # of a traceback in the message
    unknown = re.match(r'(\S+) is not in the \S+::(.+) registry', lines[0])
    reason = f'{type(error).__name__}: {_unknown_type(*unknown.groups()) if unknown else lines[0]}'
    if lines[0].startswith('Input dimension should be at least 3'):  # of the pooling in mmpretrain's necks
        reason += '; the features are pooled already: write neck=None in model, or out_type="featmap" in its backbone'
    folders = [Path(frame.f_code.co_filename).parent.name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if 'shapes cannot be multiplied' in lines[0] and 'heads' in folders:  # of mmpretrain
        reason += (
            '; the head does not fit: without a neck, write out_type="avg_featmap" in backbone; or in_channels in head'
        )
    return missing_file(error) or _missing_data(error, reason, folder_option) or reason


def _missing_data(error: BaseException, reason: str, folder_option: str) -> Optional[str]:
    """Returns a sentence on a data set whose files were to be downloaded when an error came; None for other errors."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is download_and_extract_archive.__code__:
            of = frame.f_locals
            return (
                f'{of["filename"]} is not in {of["download_root"]} and cannot be downloaded ({reason}): put it there, '
                f'from {of["url"]}, or name another folder: {folder_option}'
            )
    return None


def _unknown_type(name: str, kind: str) -> str:
    """Returns a sentence on a ``type`` that is in no registry of a kind, such as 'model', with similar names."""
    known = {
        known
        for registry in vars(registries).values()
        if isinstance(registry, Registry) and registry.name == kind
        for known in registry.module_dict
    }
    similar = difflib.get_close_matches(name, known)
    advice = f'did you mean {" or ".join(similar)}?' if similar else 'is its module in custom_imports?'
    return f'type={name!r} is no {kind} of mmpretrain or this plugin: {advice}'
