"""The convolution that attention was made from, without its weights: what it takes to convert others."""

import copy
from dataclasses import dataclass
from typing import Any, Dict, Optional

import torch
from torch import Tensor

from ..layers.structure import StateDict
from .kernels import Convolution
from .pixels import conv_to_mhsa
from .timm_convolutions import window_of


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a layer comes from: its ``from_conv``.

    Attributes:
        conv (nn.Module): The convolution on the meta device, with all its options.
        settings (dict[str, Any] | None): The arguments of :func:`~attncnn_plugin.convert.conv_to_mhsa`; None where they
            are not known, for a layer that was taken from a state dict: it does not say how wide heads were at first.
    """

    conv: Convolution
    settings: Optional[Dict[str, Any]]

    @classmethod
    def of(cls, conv: Convolution, settings: Optional[Dict[str, Any]] = None) -> 'Origin':
        """The origin of a layer that is about to be made from a convolution."""
        return cls(copy.deepcopy(conv).to('meta'), settings)

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

    def __call__(self, entries: StateDict) -> StateDict:
        """Converts a state dict of the convolution to one of its attention.

        Raises:
            ValueError: The entries are of another convolution, or the settings are not known.
        """
        if self.settings is None:
            raise ValueError(
                'the attention in its place was taken from a state dict, which does not say how it was converted: '
                'load the convolution into a model of convolutions, and convert that with convs_to_attention'
            )
        # W^K, the same on every rank
        generator = None if self.settings['content'] is None else torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):  # layers draw weights, which are then set
            attention, _ = conv_to_mhsa(self.conv_with(entries), **self.settings, generator=generator)
        return attention.state_dict()
