"""Where the configs that come with the package lie, and configs that are not there."""

import difflib
import re
from pathlib import Path
from typing import Any, Optional

MIM = Path(__file__).parents[1] / '.mim'  # configs, tools and the model index, as OpenMMLab's packages have them


def config_path(name: str) -> str:
    """The file of a config that comes with the package, to inherit from or to load.

    Args:
        name (str): The config, such as ``'sa_quadratic_cifar10.py'`` or ``'_base_/default_runtime.py'``.

    Returns:
        str: Its path.

    Raises:
        FileNotFoundError: There is no such config.

    Examples:
        A config of mmengine takes an expression as its base:

        >>> _base_ = __import__('attncnn_plugin').config_path('sa_quadratic_cifar10.py')
    """
    path = MIM / 'configs' / name
    if not path.is_file():
        folder = MIM / 'configs'
        patterns = ('*.py', 'downstream/*.py', 'pretrained/*.py', 'small/*.py')
        found = [path for pattern in patterns for path in folder.glob(pattern)]
        paths = [path.relative_to(folder) for path in found]
        known = sorted(path.as_posix() for path in paths)
        raise FileNotFoundError(f'name={name!r} is no config of attncnn_plugin, which are {known}')
    return str(path)


def read_config(path: str) -> Any:
    """Reads a config, as ``Config.fromfile`` of mmengine does.

    Raises:
        FileNotFoundError: It is not there, or one that it inherits from; the message has similar names in its folder.
    """
    from mmengine.config import Config

    try:
        return Config.fromfile(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(missing_file(error) or str(error)) from error


def missing_file(error: BaseException) -> Optional[str]:
    """A sentence on the file that an error says is not there, with similar names in its folder; None for others."""
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
