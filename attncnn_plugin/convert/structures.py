"""The attention of a state dict: its names and shapes say in the place of which convolutions it is, and what it is.

:func:`attncnn_plugin.follow_state_dict` puts it in the place of convolutions, and of attention of another kind.
"""

import math
from typing import Mapping, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from ..attention.content_image_attention import ContentImageAttention
from ..attention.image_attention import ImageAttention, QuadraticImageAttention, WindowImageAttention
from ..attention.positions import QuadraticEncoding
from ..attention.structure import StructureError
from ..attention.window import CONVOLUTIONS
from .origins import Origin, settings_in
from .position_heads import options
from .timm_convolutions import plain_convolution, window_of

CENTERS, TABLE = 'encoding.center', 'encoding.weight'


class Kind(NamedTuple):
    """What kind of attention a layer is.

    Attributes:
        position (str): ``'gaussian'`` or ``'table'``.
        qk_dim (int | None): Channels of a head's queries and keys; None for attention by position alone.
        gated (bool): Whether there is a gate.
        window_size (tuple[int, ...] | None): The neighbourhood that the keys of a query are in, if it is not all.
    """

    position: str
    qk_dim: Optional[int] = None
    gated: bool = False
    window_size: Optional[Tuple[int, ...]] = None

    @classmethod
    def of(cls, layer: ImageAttention) -> 'Kind':
        """The kind of a layer."""
        position = 'gaussian' if isinstance(layer.encoding, QuadraticEncoding) else 'table'
        if not isinstance(layer, ContentImageAttention):
            return cls(position)
        return cls(position, layer.qk_dim, layer.gate is not None, layer.window_size)

    @classmethod
    def of_entries(cls, state_dict: Mapping[str, Tensor], prefix: str) -> 'Kind':
        """The kind of the layer that a state dict has."""
        position = 'gaussian' if prefix + CENTERS in state_dict else 'table'
        query, near = state_dict.get(f'{prefix}query.weight'), state_dict.get(f'{prefix}neighbourhood')
        if query is None:
            return cls(position)
        return cls(
            position,
            len(query) // max(1, heads_in(state_dict, prefix)),
            f'{prefix}gate' in state_dict,
            None if near is None else tuple(near.tolist()),
        )


def heads_in(state_dict: Mapping[str, Tensor], prefix: str) -> int:
    """Number of heads of the layer that a state dict has."""
    return len(state_dict[prefix + (CENTERS if prefix + CENTERS in state_dict else TABLE)])


def attention_in(module: nn.Module, state_dict: Mapping[str, Tensor], prefix: str) -> Optional[ImageAttention]:
    """The attention that a state dict has in the place of a module, with values that are yet to be loaded.

    Args:
        module (nn.Module): Any module.
        state_dict (Mapping[str, Tensor]): With the names of a model.
        prefix (str): Name of the module with a dot.

    Returns:
        ImageAttention | None: None where the module is neither a convolution nor attention of another kind in the place
        of one, or the entries are not those of attention.

    Raises:
        StructureError: The module is a convolution that cannot be converted.
    """
    if f'{prefix}value.weight' not in state_dict or not {prefix + CENTERS, prefix + TABLE} & state_dict.keys():
        return None
    kind = Kind.of_entries(state_dict, prefix)
    if isinstance(module, ImageAttention):
        if isinstance(module.from_conv, Origin) and kind != Kind.of(module):
            origin = Origin(module.from_conv.conv, settings_in(state_dict, prefix))
            return _new_attention(origin, kind, heads_in(state_dict, prefix), module.value, module.training)
    elif isinstance(module, CONVOLUTIONS):
        origin = Origin.of(module, settings_in(state_dict, prefix))
        return _new_attention(origin, kind, heads_in(state_dict, prefix), module, module.training)
    return None


def _new_attention(origin: Origin, kind: Kind, num_heads: int, like: nn.Module, training: bool) -> ImageAttention:
    """Attention in the place of a convolution, with values that are yet to be loaded.

    Args:
        origin (Origin): The convolution.
        kind (Kind): The kind of attention.
        num_heads (int): Number of heads.
        like (nn.Module): What the weight and the bias have their device, dtype and ``requires_grad`` of.
        training (bool): The mode.
    """
    conv = plain_convolution(origin.conv)
    try:
        window = window_of(conv)
    except TypeError as error:
        raise StructureError(f'attention of the state dict cannot be in its place: {error}') from error
    # Of the heads that there were at first, one for each kernel position if they are Gaussian, some can be gone.
    most = math.prod(window.kernel_size)
    if kind.position == 'table':
        most = num_heads if origin.settings is None else origin.settings['num_heads'] or most
    if num_heads > most:
        raise StructureError(
            f'the state dict has attention of {num_heads} heads in the place of a convolution whose kernel of '
            f'{window.kernel_size} has {most} positions'
        )
    arguments = conv.in_channels, conv.out_channels, most, window
    settings = {**options(conv), 'device': like.weight.device, 'dtype': like.weight.dtype}
    attention: ImageAttention
    with torch.random.fork_rng(devices=[]):  # layers draw weights, which are yet to be loaded
        if kind.qk_dim is not None:
            attention = ContentImageAttention(
                *arguments, kind.qk_dim, kind.position, kind.gated, kind.window_size, **settings
            )
        elif kind.position == 'gaussian':
            attention = QuadraticImageAttention(*arguments, **settings)
        else:
            attention = WindowImageAttention(*arguments, **settings)
    if num_heads < most:
        attention.take_structure(num_heads)
    origin.attach(attention)
    attention.requires_grad_(like.get_parameter('weight').requires_grad)
    if attention.value.bias is not None:
        attention.value.bias.requires_grad_(like.get_parameter('bias').requires_grad)
    attention.train(training)
    return attention
