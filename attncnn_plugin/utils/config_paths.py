"""``attncnn_plugin::sa_quadratic_cifar10.py`` as a name of a config, in inheritance and in ``mmengine.hub``.

mmengine itself takes such names of OpenMMLab's own packages alone, only with a folder in them, and does not find the
files of an editable install.
"""

from pathlib import Path
from typing import Optional, Tuple

from mmengine.config import Config
from mmengine.hub import hub

PREFIX = 'attncnn_plugin::'
PACKAGE = Path(__file__).parents[1]


def register_config_paths() -> None:
    """Makes mmengine resolve the names that begin with ``attncnn_plugin::``; all others go their old way."""
    get_cfg_path = Config._get_cfg_path
    get_package_and_cfg_path = hub._get_package_and_cfg_path
    get_installed_path = hub.get_installed_path

    def plugin_cfg_path(cfg_path: str, filename: str) -> Tuple[str, Optional[str]]:
        if not cfg_path.startswith(PREFIX):
            return get_cfg_path(cfg_path, filename)
        configs = PACKAGE / '.mim' / 'configs'
        path = configs / cfg_path[len(PREFIX) :]
        if not path.is_file():
            known = sorted(config.name for config in configs.glob('*.py'))
            raise FileNotFoundError(f'{filename} inherits from {cfg_path}, but the configs are {known}')
        return str(path), 'mmpretrain'  # the registries in which the types of the config are

    def plugin_package_and_cfg_path(cfg_path: str) -> Tuple[str, str]:
        if cfg_path.startswith(PREFIX):
            return PACKAGE.name, cfg_path[len(PREFIX) :]
        return get_package_and_cfg_path(cfg_path)

    def plugin_installed_path(package: str) -> str:
        return str(PACKAGE) if package == PACKAGE.name else get_installed_path(package)

    Config._get_cfg_path = staticmethod(plugin_cfg_path)
    hub._get_package_and_cfg_path = plugin_package_and_cfg_path
    hub.get_installed_path = plugin_installed_path
