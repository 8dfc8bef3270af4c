"""Errors in one line, for the end of a tool's output."""

import difflib
import re

from mmengine.registry import Registry


def one_line(error: BaseException) -> str:
    """The last line of Python's report of an error; of several lines of a message, the first.

    Args:
        error (BaseException): The error.

    Returns:
        str: Its type and its sentence.
    """
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ['no reason is given']
    if lines[0].startswith('Caught ') and ' in DataLoader worker process ' in lines[0]:
        return lines[-1]  # of a traceback in the message
    unknown = re.match(r'(\S+) is not in the \S+::(.+) registry', lines[0])
    return f'{type(error).__name__}: {_unknown_type(*unknown.groups()) if unknown else lines[0]}'


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
