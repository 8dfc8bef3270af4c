"""The first step of the tools: a model and its images from a config and a checkpoint, or of timm."""

from .images import image_files
from .loaded_model import LoadedModel

__all__ = ['ConfigModel', 'LoadedModel', 'TimmModel', 'image_files']


def __getattr__(name: str):
    """Imports ``ConfigModel``, which needs mmpretrain, and ``TimmModel`` when they are asked for."""
    if name == 'ConfigModel':
        from ..utils.frameworks import require_mmpretrain

        require_mmpretrain()
        from .config_model import ConfigModel

        return ConfigModel
    if name == 'TimmModel':
        from .timm_model import TimmModel

        return TimmModel
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
