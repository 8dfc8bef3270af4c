"""Any backbone whose convolutions become attention (d'Ascoli et al. 2021, "Transformed CNNs", arXiv 2106.05795)."""

import copy
import functools
import inspect
from typing import Any, Dict, List, Optional, Sequence, Type, Union

import torch
from mmpretrain.registry import MODELS
from torch import nn

from ..attention.state_dicts import Restructurable, StateDict
from ..attention.window import CONVOLUTIONS, check_choice
from ..change import Change
from ..convert import convs_to_attention
from ..convert.models import apply, check_convertible
from ..convert.pixels import check_settings
from ..models.cmhsa import PHASES
from ..structure import plan
from .backbones import refuse_unknown
from .runner import record_new_parameters


class ConvToAttention(Restructurable):
    """Adds the two phases to the class of a backbone, see :func:`conv_to_attention`."""

    conversion: Dict[str, Any]  # arguments of conv_to_attention, with names of convolutions as ``layers``

    @property
    def phase(self) -> str:
        """``'conv'`` or ``'attn'``."""
        return 'conv' if self._convolutions() else 'attn'

    def to_attention(self, generator: Optional[torch.Generator] = None) -> Change:
        """Turns the chosen convolutions into attention, by :func:`~attncnn_plugin.convert.convs_to_attention`.

        Args:
            generator (torch.Generator, optional): Of the CPU; draws W^K, where there is attention by content.

        Raises:
            TypeError: There is no convolution any more.
            ValueError: A layer cannot be replaced, for instance because of a hook.
        """
        settings = {name: value for name, value in self.conversion.items() if name != 'backbone'}
        return convs_to_attention(self, **{**settings, 'layers': self._convolutions()}, generator=generator)

    def convert_state_dict(self, state_dict: StateDict, prefix: str) -> None:
        """Converts the layers, not the entries."""
        self._replaced_by_loading |= bool(apply(self, plan(self, state_dict, prefix)).replaced)

    def init_weights(self) -> None:
        """Initializes attention to compute what the convolutions do that the backbone would have initialized."""
        if self.phase == 'conv':
            super().init_weights()  # type: ignore[misc]
            return
        cnn = conv_to_attention(**self.conversion)  # init_cfg can load attention
        cnn.init_weights()
        self.load_state_dict(cnn.state_dict())
        self.is_init = True

    def _convolutions(self) -> List[str]:
        """Returns the chosen layers that still are convolutions."""
        layers = {name: nn.Module.get_submodule(self, name) for name in self.conversion['layers']}
        return [name for name, layer in layers.items() if isinstance(layer, CONVOLUTIONS)]


@functools.cache
def _with_phases(own: Type[nn.Module]) -> Any:
    """Returns the class of a backbone with phases: it inherits from :class:`ConvToAttention`, then from its own."""
    names = {'__module__': own.__module__, '__doc__': own.__doc__}
    return type(f'{own.__name__}ToAttention', (ConvToAttention, own), names)


@MODELS.register_module('ConvToAttention')
def conv_to_attention(
    backbone: dict, layers: Union[str, Sequence[str]], phase: str = 'conv', **settings: Any
) -> nn.Module:
    """Builds a backbone whose convolutions become attention that computes the same: ``type='ConvToAttention'``.

    It is the backbone itself, of a class that inherits from its own: features, ``out_indices``, ``frozen_stages``,
    ``init_cfg``, layer depths and names of parameters are its own, and checkpoints of it load as they are.

    With ``phase='conv'`` it is the CNN until ``to_attention()``, which
    :class:`~attncnn_plugin.mm.phase_transition.PhaseTransitionHook` calls at an epoch or an iteration. With
    ``phase='attn'`` it is attention at once, that of the CNN's initial weights or of a checkpoint of the CNN that is
    loaded. A checkpoint of attention loads in either phase.

    Args:
        backbone (dict): The config of the backbone.
        layers (str | Sequence[str]): The convolutions: names in the backbone, or globs, whose ``*`` stands for dots
            too. ``'layer4.*.conv2'`` are the 3×3 convolutions of the last stage of a ResNet-50.
        phase (str): ``'conv'`` or ``'attn'``. Defaults to ``'conv'``.
        **settings (Any): As of :func:`~attncnn_plugin.convert.conv_to_mhsa`. To train on, heads need ``alpha=6`` or
            so: the default's do not learn.

    Raises:
        TypeError: ``backbone`` is no config, or a layer cannot be converted.
        ValueError: An unknown ``phase``; a backbone that turns to attention by itself; ``layers`` chooses no
            convolution, or one that cannot be replaced; or an argument does not go with a layer.

    Examples:
        >>> cnn = dict(type='mmpretrain.ResNet', depth=18)
        >>> model = conv_to_attention(cnn, layers='layer4.*.conv2', content='additive', alpha=6)
        >>> print(model.to_attention())
        layer           before      after    parameters
        layer4.0.conv2  3×3 kernel  9 heads  2,359,296 → 2,884,635    error 0.011
        layer4.1.conv2  3×3 kernel  9 heads  2,359,296 → 2,884,635    error 0.011
        model                                11,176,512 → 12,227,190
    """
    known = inspect.signature(check_settings).parameters
    refuse_unknown('ConvToAttention', [name for name in settings if name not in known])
    check_choice('phase', phase, PHASES)
    model: Any = MODELS.build(copy.deepcopy(backbone))
    if hasattr(model, 'to_attention'):
        raise ValueError(f'{backbone["type"]} turns to attention by itself: use it without ConvToAttention')
    chosen = check_convertible(model, layers, settings)
    model.__class__ = _with_phases(type(model))
    model.conversion = dict(settings, backbone=copy.deepcopy(backbone), layers=chosen)
    model.register_load_state_dict_post_hook(record_new_parameters)
    if phase == 'attn':
        model.to_attention()
    return model
