"""Self-attention as convolution, for mmpretrain and timm.

Cordonnier et al. 2020 (C20), "On the Relationship between Self-Attention and Convolutional Layers", and Li et al. 2021
(L21), "Can Vision Transformers Perform Convolution?".

Importing the package registers names, and does nothing else:

- timm has its models: ``timm.create_model('sa_quadratic_cifar')``.
- Where mmpretrain is installed, mmpretrain's registries have its backbones, hooks, datasets, metrics and optimizer
  wrapper; its model index has the shipped configs: ``mmpretrain.get_model('sa_quadratic_cifar10')``; mmengine has the
  file backend ``'atomic'``, the initializers ``'ConvolutionalHeads'`` and ``'SineCosineEmbedding'``, and a loader of
  :mod:`~attncnn_plugin.weights` by names such as ``attncnn://sa_quadratic_small``.

Importing :mod:`attncnn_plugin.mm.safe_loading` replaces mmengine's loader of local checkpoint files. The shipped
configs and tools import it.
"""

import importlib
import warnings

from . import analysis, attention, convert, models, pruning, transformers, weights
from .structure import follow_state_dict
from .utils.config_paths import MIM, config_path
from .utils.frameworks import config_problem, has_mmpretrain, import_problem
from .version import __version__

ON_DEMAND = ('apis', 'explorer', 'visualization')

__all__ = [
    '__version__',
    'analysis',
    'attention',
    'config_path',
    'convert',
    'follow_state_dict',
    'models',
    'pruning',
    'transformers',
    'weights',
    *ON_DEMAND,
]


def __getattr__(name: str):
    """Imports a folder when it is asked for: figures need matplotlib, for instance."""
    if name in ON_DEMAND:
        return importlib.import_module(f'.{name}', __name__)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def _register_with_mmpretrain() -> None:
    from mmengine.runner import CheckpointLoader
    from mmpretrain import ModelHub

    from . import datasets, evaluation  # noqa: F401
    from .engine import hooks, initializers, reliability, speed  # noqa: F401
    from .mm import backbones, conv_to_attention  # noqa: F401
    from .utils.checkpoint_files import PACKAGE_SCHEME, load_from_package

    CheckpointLoader.register_scheme(prefixes=PACKAGE_SCHEME, loader=load_from_package, force=True)
    if not ModelHub.has('sa_quadratic_cifar10'):  # it takes no name twice
        ModelHub.register_model_index(MIM / 'model-index.yml', config_prefix=MIM)


if has_mmpretrain():
    _problem = import_problem()
    if _problem is None:
        _register_with_mmpretrain()
        _problem = config_problem()
    if _problem is not None:
        warnings.warn(_problem, stacklevel=2)
