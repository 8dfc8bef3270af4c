"""Starts of mmengine's ``init_cfg`` for the vision transformers of mmpretrain."""

import inspect
import logging

from mmengine.logging import print_log
from mmengine.model import BaseModule, PretrainedInit, update_init_info
from mmengine.registry import WEIGHT_INITIALIZERS
from torch import nn

from ..transformers import init_as_convolution, set_sine_cosine_embedding

OPTIONS = list(inspect.signature(init_as_convolution).parameters)[1:]  # all but the model


class _LastInitializer:
    """An initializer whose ``start`` comes after all others, those of the modules inside too."""

    def __call__(self, module: nn.Module) -> None:
        """Starts a module; raises ``ValueError`` if other initializers follow, or a ``Pretrained`` one is beside it."""
        is_initializing = hasattr(module, '_params_init_info')  # in the middle of its init_weights
        if is_initializing:
            _initialize_the_rest(module, type(self))
        self.start(module)
        if is_initializing:
            update_init_info(module, init_info=type(self).__name__)


@WEIGHT_INITIALIZERS.register_module()
class ConvolutionalHeads(_LastInitializer):
    """Attention that starts as a convolution, :func:`~attncnn_plugin.transformers.init_as_convolution`.

    It is for the ``init_cfg`` of a vision transformer, or of a classifier with one, after all other initializers.

    Args:
        **options: Those of ``init_as_convolution``.

    Raises:
        TypeError: An option is none of these.

    Examples:
        >>> from mmpretrain.models import VisionTransformer
        >>> start = dict(type='ConvolutionalHeads', kernel_size=3)
        >>> model = VisionTransformer(arch='deit-tiny', img_size=64, init_cfg=[start])
        >>> model.init_weights()
    """

    def __init__(self, **options):
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise TypeError(f'ConvolutionalHeads has no option {unknown[0]!r}: it has {", ".join(OPTIONS)}')
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


def _initialize_the_rest(module: BaseModule, last: type) -> None:
    """Does all that ``init_weights`` does after its initializers, but for a checkpoint.

    Vision transformers draw their position embeddings after all of ``BaseModule.init_weights``, unless their
    ``init_cfg`` is a ``Pretrained`` one: it is made one when all that is done.
    """
    configs = [module.init_cfg] if isinstance(module.init_cfg, dict) else module.init_cfg or []
    types = [config['type'] for config in configs]
    name = last.__name__
    if 'Pretrained' in types or PretrainedInit in types:
        raise ValueError(
            f'init_cfg of {type(module).__name__} has Pretrained beside {name}, whose start would be lost, since '
            'mmengine loads a checkpoint last: leave out one of the two'
        )
    if types and types[-1] not in (name, last):
        raise ValueError(f'init_cfg of {type(module).__name__} has {types[-1]} after {name}: put that last')
    module.init_cfg = None
    module.init_weights()
    module.init_cfg = dict(type='Pretrained', checkpoint=f'none: its start is that of {name}')
