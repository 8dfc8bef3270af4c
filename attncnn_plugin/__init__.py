"""Self-attention as convolution, for models of timm, Hugging Face, torchvision and mmpretrain.

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
from .analysis.recorder import AttentionRecorder, attention_maps, rollout
from .hugging_face import load_hugging_face
from .installation import config_path, has_mmpretrain, import_problem
from .structure import follow_state_dict
from .version import __version__

ON_DEMAND = ('explorer', 'visualization')

__all__ = [
    'AttentionRecorder',
    '__version__',
    'analysis',
    'attention',
    'attention_maps',
    'config_path',
    'convert',
    'follow_state_dict',
    'load_hugging_face',
    'models',
    'pruning',
    'rollout',
    'transformers',
    'weights',
    *ON_DEMAND,
]


def __getattr__(name: str):
    """Imports a subpackage when it is first used: figures need matplotlib, for instance."""
    if name in ON_DEMAND:
        return importlib.import_module(f'.{name}', __name__)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


if has_mmpretrain():
    with warnings.catch_warnings():  # about parts of mmcv and setuptools that nothing here needs
        warnings.filterwarnings('ignore', 'Fail to import|pkg_resources is deprecated')
        _problem = import_problem()
        if _problem is None:
            from . import mm  # noqa: F401
    if _problem is not None:
        warnings.warn(_problem, stacklevel=2)
