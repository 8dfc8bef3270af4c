"""Errors in one line, for the end of a tool's output."""

import difflib
import re
import traceback
from typing import Optional

from mmengine.registry import Registry
from mmpretrain.datasets.utils import download_and_extract_archive
from mmpretrain.models.necks import GlobalAveragePooling

from .config_paths import missing_file

FOLDERS = ' '.join(f'{phase}_dataloader.dataset.data_root=FOLDER' for phase in ('train', 'val', 'test'))


def one_line(error: BaseException, folder_option: str = f'--cfg-options {FOLDERS}') -> str:
    """The last line of Python's report of an error; of several lines of a message, the first.

    Of a file that is not there, a data set that could not be downloaded, and features that are averaged twice it is a
    sentence that says which, and what to do.

    Args:
        error (BaseException): The error.
        folder_option (str): How the tool is told another folder of a data set. Defaults to that of mmpretrain's tools.

    Returns:
        str: Its type and its sentence.
    """
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ['no reason is given']
    if lines[0].startswith('Caught ') and ' in DataLoader worker process ' in lines[0]:
        return lines[-1]  # of a traceback in the message
    unknown = re.match(r'(\S+) is not in the \S+::(.+) registry', lines[0])
    reason = f'{type(error).__name__}: {_unknown_type(*unknown.groups()) if unknown else lines[0]}'
    return missing_file(error) or _missing_data(error, reason, folder_option) or _averaged_twice(error) or reason


def _missing_data(error: BaseException, reason: str, folder_option: str) -> Optional[str]:
    """A sentence on a data set whose files were to be downloaded when an error came; None for other errors."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for caller, called in zip(frames, frames[1:]):
        if called.f_code is download_and_extract_archive.__code__ and 'self' in caller.f_locals:
            name, download = type(caller.f_locals['self']).__name__, called.f_locals
            return (
                f'{name} is not in {download["download_root"]} and cannot be downloaded ({reason}): put '
                f'{download["filename"]} there, from {download["url"]}, or name another folder: {folder_option}'
            )
    return None


def _averaged_twice(error: BaseException) -> Optional[str]:
    """A sentence on a neck that averages over pixels and got vectors; None for other errors."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        features = frame.f_locals.get('inputs') if frame.f_code is GlobalAveragePooling.forward.__code__ else None
        if isinstance(features, tuple) and any(x.ndim == 2 for x in features):
            return (
                'the neck GlobalAveragePooling got features that are averaged already, (B, C): write neck=None in '
                "model, or leave out out_type='avg_featmap' of its backbone"
            )
    return None


def _unknown_type(name: str, kind: str) -> str:
    """A sentence on a ``type`` that is in no registry of a kind, such as 'model', with names that may be meant."""
    import mmpretrain.registry as registries  # and mmengine's, which it inherits from

    known = {
        known
        for registry in vars(registries).values()
        if isinstance(registry, Registry) and registry.name == kind
        for known in registry.module_dict
    }
    similar = difflib.get_close_matches(name, known)
    advice = f'did you mean {" or ".join(similar)}?' if similar else 'is its module in custom_imports?'
    return f'type={name!r} is no {kind} of mmpretrain or this plugin: {advice}'
