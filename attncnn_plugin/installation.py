"""Finds what is installed: mmpretrain, and the configs that come with this package."""

import importlib
import importlib.util
from pathlib import Path
from typing import Optional

MIM = Path(__file__).parent / '.mim'  # configs, tools and the model index, as OpenMMLab's packages have them


def config_path(name: str) -> str:
    """Returns the file of a config that comes with the package, to inherit from or to load.

    Args:
        name (str): The name of its file, such as ``'sa_quadratic_cifar10.py'``, with or without its folder.

    Raises:
        FileNotFoundError: There is no such config.

    Examples:
        >>> _base_ = __import__('attncnn_plugin').config_path('sa_quadratic_cifar10.py')
    """
    files = sorted((MIM / 'configs').rglob('*.py'))
    for path in files:  # no two have one name
        if path.as_posix().endswith(f'/configs/{name}') or path.name == name:
            return str(path)
    raise FileNotFoundError(f'name={name!r} is no config of attncnn_plugin, which are {[path.name for path in files]}')


INSTALL = 'pip install mmpretrain "mmengine<1.0" "mmcv-lite>=2.0,<2.4" "setuptools<82"'


def has_mmpretrain() -> bool:
    """Returns True if mmpretrain is installed, working or not."""
    return importlib.util.find_spec('mmpretrain') is not None


def import_problem() -> Optional[str]:
    """Returns why mmpretrain or its configs cannot be used and what to install, in one sentence; None if they can."""
    if not has_mmpretrain():
        return f'mmpretrain is not installed: {INSTALL}'
    try:
        for name in ('mmpretrain', 'mmpretrain.models', 'mmpretrain.datasets'):
            importlib.import_module(name)
        importlib.import_module('mmengine.utils').get_installed_path('mmpretrain')  # of its configs, by setuptools
    except Exception as error:  # it refuses versions by assertions, and breaks on others in any other way
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip('.')
        return f'mmpretrain does not work with the versions that are installed ({reason}): {INSTALL}'
    return None
