"""The convolution that attention was made from, without its weights: what it takes to convert others.

The metadata of a state dict has the arguments of the conversion, which no name and no shape says.
"""

import copy
import zlib
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Dict, Mapping, Optional

import torch
from torch import Tensor

from ..attention.image_attention import ImageAttention
from ..attention.structure import StateDict
from .kernels import Convolution
from .pixels import conv_to_mhsa
from .timm_convolutions import window_of

METADATA = 'from_conv'


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a layer comes from: its ``from_conv``.

    Attributes:
        conv (nn.Module): The convolution on the meta device, with all its options.
        settings (dict[str, Any] | None): The arguments of :func:`~attncnn_plugin.convert.conv_to_mhsa`; None where they
            are not known, for a layer that was taken from a state dict without metadata.
    """

    conv: Convolution
    settings: Optional[Dict[str, Any]]

    @classmethod
    def of(cls, conv: Convolution, settings: Optional[Dict[str, Any]] = None) -> 'Origin':
        """The origin of a layer that is about to be made from a convolution."""
        plain = None if settings is None else {name: _plain(value) for name, value in settings.items()}
        return cls(copy.deepcopy(conv).to('meta'), plain)

    def attach(self, attention: ImageAttention) -> None:
        """Makes this the origin of a layer, which its state dicts say from now on."""
        attention.from_conv = self
        attention.register_state_dict_post_hook(_write_settings)

    def conv_with(self, entries: Dict[str, Tensor]) -> Convolution:
        """The convolution with the entries of a state dict, on their device and of their dtype.

        Raises:
            ValueError: They are of another convolution.
        """
        conv = copy.deepcopy(self.conv)
        try:
            conv.load_state_dict(entries, assign=True)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return conv

    def as_it_was(self, conv: Convolution) -> Convolution:
        """A convolution with the options as those of the original, where these mean the same, ``'valid'`` for 0."""
        if type(self.conv) is not type(conv) or window_of(self.conv) != window_of(conv):
            return conv
        return self.conv_with(conv.state_dict()).train(conv.training)

    def __call__(self, entries: StateDict, name: str) -> StateDict:
        """Converts a state dict of the convolution to one of its attention.

        Args:
            entries (dict[str, Tensor]): ``'weight'`` and, where there is one, ``'bias'``.
            name (str): Name of the layer in its model: the seed of W^K, which is the same on every rank.

        Raises:
            ValueError: The entries are of another convolution, or the settings are not known.
        """
        if self.settings is None:
            raise ValueError(
                'the attention in its place was taken from a state dict that does not say how it was converted: '
                'load the convolution into a model of convolutions, and convert that with convs_to_attention'
            )
        seed = zlib.crc32(name.encode())
        generator = None if self.settings['content'] is None else torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):  # layers draw weights, which are then set
            attention, _ = conv_to_mhsa(self.conv_with(entries), **self.settings, generator=generator)
        return attention.state_dict()


def settings_in(state_dict: Mapping[str, Tensor], prefix: str) -> Optional[Dict[str, Any]]:
    """The arguments of the conversion of a layer that a state dict has; None where its metadata is lost.

    Args:
        state_dict (Mapping[str, Tensor]): With the names of a model.
        prefix (str): Name of the layer with a dot.
    """
    metadata = getattr(state_dict, '_metadata', None) or {}
    return metadata.get(prefix[:-1], {}).get(METADATA)


def _write_settings(module: Any, state_dict: StateDict, prefix: str, local_metadata: Dict[str, Any]) -> None:
    if module.from_conv.settings is not None:
        local_metadata[METADATA] = module.from_conv.settings


def _plain(value: Any) -> Any:
    """A setting of Python's own types: files that are loaded with ``weights_only`` have no others."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item) for item in value)
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value
