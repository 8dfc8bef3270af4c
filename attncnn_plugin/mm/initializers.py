"""Initializers for mmengine's ``init_cfg``: starts of the vision transformers of mmpretrain."""

import logging
from typing import Any

from mmengine.logging import print_log
from mmengine.model import PretrainedInit, update_init_info
from mmengine.registry import WEIGHT_INITIALIZERS
from torch import nn

from ..transformers import init_as_convolution, set_sine_cosine_embedding


class _LastInitializer:
    """An initializer whose ``start`` comes after all others, those of the modules inside too."""

    def __call__(self, module: Any) -> None:
        """Starts a module; raises ``ValueError`` if other initializers follow, or a ``Pretrained`` one is beside it."""
        is_initializing = hasattr(module, '_params_init_info')  # in the middle of its init_weights
        name = type(self).__name__
        if is_initializing:
            configs = [module.init_cfg] if isinstance(module.init_cfg, dict) else module.init_cfg or []
            types = [config['type'] for config in configs]
            if 'Pretrained' in types or PretrainedInit in types:
                raise ValueError(
                    f'init_cfg of {type(module).__name__} has Pretrained beside {name}, whose start is lost: drop one'
                )
            if types and types[-1] not in (name, type(self)):
                raise ValueError(f'init_cfg of {type(module).__name__} has {types[-1]} after {name}: put that last')
            # All that init_weights does after its initializers, which is then told that it has loaded a checkpoint:
            # vision transformers draw their position embeddings after all of BaseModule.init_weights otherwise.
            module.init_cfg = None
            module.init_weights()
            module.init_cfg = dict(type='Pretrained', checkpoint=f'none: its start is that of {name}')
        self.start(module)
        if is_initializing:
            update_init_info(module, init_info=name)


@WEIGHT_INITIALIZERS.register_module()
class ConvolutionalHeads(_LastInitializer):
    """Attention that starts as a convolution, :func:`~attncnn_plugin.transformers.init_as_convolution`.

    It is for the ``init_cfg`` of a vision transformer, or of a classifier with one, after all other initializers.

    Args:
        **options: Those of ``init_as_convolution``, which refuses others when the model is initialized.

    Examples:
        >>> from mmpretrain.models import VisionTransformer
        >>> start = dict(type='ConvolutionalHeads', kernel_size=3)
        >>> model = VisionTransformer(arch='deit-tiny', img_size=64, init_cfg=[start])
        >>> model.init_weights()
    """

    def __init__(self, **options):
        self.options = options

    def start(self, module: nn.Module) -> None:
        report = init_as_convolution(module, **self.options)
        print_log(f'{type(module).__name__} starts with the heads of a convolution:\n{report}', 'current', logging.INFO)


@WEIGHT_INITIALIZERS.register_module()
class SineCosineEmbedding(_LastInitializer):
    """Sines and cosines as the position embedding, :func:`~attncnn_plugin.transformers.set_sine_cosine_embedding`.

    It is ``ConvolutionalHeads`` without the heads, for comparisons.
    """

    def start(self, module: nn.Module) -> None:
        set_sine_cosine_embedding(module)
