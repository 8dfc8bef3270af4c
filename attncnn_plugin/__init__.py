"""Self-attention as convolution, for mmpretrain and timm.

Cordonnier et al. 2020 (C20), "On the Relationship between Self-Attention and Convolutional Layers", and Li et al. 2021
(L21), "Can Vision Transformers Perform Convolution?".

Importing the package has these side effects:

- timm has its models: ``timm.create_model('sa_quadratic_cifar')``.
- ``load_state_dict`` of every module puts the attention that a state dict has in the place of convolutions first, see
  :mod:`~attncnn_plugin.layers.structure_loading`; other state dicts are loaded as ever.

Where mmpretrain is installed, too:

- mmpretrain's registries have its backbones, hooks, datasets, metrics and optimizer wrapper; its model index has the
  shipped configs: ``mmpretrain.get_model('sa_quadratic_cifar10')``; mmengine has the file backend ``'atomic'`` and the
  initializers ``'ConvolutionalHeads'`` and ``'SineCosineEmbedding'``.
- mmengine's function ``load_state_dict`` does so too.
- PyTorch's list of names that are safe to load has the classes of the logs in mmengine's checkpoints.
- mmengine's loader of local checkpoint files is :func:`~attncnn_plugin.utils.checkpoint_files.load_from_local`, which
  runs nothing that is in them and refuses damaged ones. The function of onedl-mmengine that would run them all the same
  is replaced.
- mmengine loads :mod:`~attncnn_plugin.weights` by names such as ``attncnn://sa_quadratic_small``.

All but the entries in registries is in :mod:`attncnn_plugin.utils.mmengine_patches`, and does no harm when done twice.
"""

import importlib
import warnings

from . import analysis, convert, init, layers, models, pruning, weights
from .layers import structure_loading
from .utils.config_paths import config_path
from .utils.frameworks import config_problem, has_mmpretrain, import_problem
from .version import __version__

ON_DEMAND = ('apis', 'explorer', 'visualization')

__all__ = [
    '__version__',
    'analysis',
    'config_path',
    'convert',
    'init',
    'layers',
    'models',
    'pruning',
    'weights',
    *ON_DEMAND,
]


def __getattr__(name: str):
    """Imports a folder when it is asked for: figures need matplotlib, for instance."""
    if name in ON_DEMAND:
        return importlib.import_module(f'.{name}', __name__)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


structure_loading.patch_load_state_dict()


def _register_with_mmpretrain() -> None:
    from . import datasets, evaluation  # noqa: F401
    from .engine import hooks, initializers, reliability, speed  # noqa: F401
    from .models import backbones  # noqa: F401
    from .utils.mmengine_patches import patch_load_state_dict, patch_mmengine

    patch_load_state_dict(structure_loading.replace_before_loading)
    problem = patch_mmengine()
    if problem is not None:
        warnings.warn(problem, stacklevel=3)


if has_mmpretrain():
    _problem = import_problem()
    if _problem is None:
        _register_with_mmpretrain()
        _problem = config_problem()
    if _problem is not None:
        warnings.warn(_problem, stacklevel=2)
