"""The first step of the tools: a model and its images from a config and a checkpoint, or images of a folder."""

from .images import image_files

__all__ = ['ConfigModel', 'image_files']


def __getattr__(name: str):
    """Imports ``ConfigModel``, which needs mmpretrain, when it is asked for."""
    if name == 'ConfigModel':
        from ..utils.frameworks import require_mmpretrain

        require_mmpretrain()
        from .config_model import ConfigModel

        return ConfigModel
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
