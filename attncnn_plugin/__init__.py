"""Self-attention as convolution, for mmpretrain and timm.

Importing the package registers its models with timm and, where mmpretrain is installed, its backbones, hooks, datasets
and model index with mmpretrain; it also makes mmengine's checkpoints load on today's PyTorch.
"""

import warnings
from pathlib import Path

from . import models
from .utils.frameworks import config_problem, has_mmpretrain, import_problem
from .version import __version__

__all__ = ['__version__', 'models']


def _register_with_mmpretrain() -> None:
    from mmpretrain.apis.model import ModelHub

    from . import datasets  # noqa: F401
    from .engine import hooks, reliability  # noqa: F401
    from .models import backbones  # noqa: F401
    from .utils.config_paths import register_config_paths
    from .utils.safe_globals import register_safe_globals

    register_safe_globals()
    register_config_paths()
    mim = Path(__file__).parent / '.mim'
    ModelHub.register_model_index(mim / 'model-index.yml', config_prefix=mim)


if has_mmpretrain():
    _problem = import_problem()
    if _problem is None:
        _register_with_mmpretrain()
        _problem = config_problem()
    if _problem is not None:
        warnings.warn(_problem)
