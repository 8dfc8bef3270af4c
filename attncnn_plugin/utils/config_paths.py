"""Where the configs that come with the package lie."""

from pathlib import Path

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
