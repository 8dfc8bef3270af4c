"""A convolution takes the attention of a state dict: names and shapes say which layer it has become, and how.

The mechanism is :func:`~attncnn_plugin.layers.structure.register_replacement`.
"""

from typing import Mapping, Optional

import torch
from torch import Tensor, nn

from ..layers.image_attention import ImageAttention, QuadraticImageAttention, WindowImageAttention
from ..layers.structure import StructureError, register_replacement
from ..layers.window import Window
from .kernels import Convolution
from .origins import Origin
from .pixels import options

GAUSSIAN, TABLE = 'encoding.center', 'encoding.weight'


def attention_in(module: nn.Module, state_dict: Mapping[str, Tensor], prefix: str) -> Optional[ImageAttention]:
    """The attention that a state dict has in the place of a convolution, with values that are yet to be loaded.

    Args:
        module (nn.Module): Any module.
        state_dict (Mapping[str, Tensor]): With the names of a model.
        prefix (str): Name of the module with a dot.

    Returns:
        ImageAttention | None: None where the module or the entries are something else.

    Raises:
        StructureError: The module is a convolution of another kind or size than the one that became attention.
    """
    kind = next((kind for kind in (GAUSSIAN, TABLE) if prefix + kind in state_dict), None)
    is_attention = kind is not None and f'{prefix}value.weight' in state_dict
    if not is_attention or not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return None
    try:
        window = Window.of(module)
    except TypeError as error:
        raise StructureError(f'{prefix[:-1]} has attention in the state dict, but {error}') from error
    return _new_attention(module, window, len(state_dict[f'{prefix}{kind}']), kind == GAUSSIAN)


def _new_attention(conv: Convolution, window: Window, num_heads: int, gaussian: bool) -> ImageAttention:
    kind = QuadraticImageAttention if gaussian else WindowImageAttention
    with torch.random.fork_rng(devices=[]):  # layers draw weights, which are yet to be loaded
        attention = kind(conv.in_channels, conv.out_channels, num_heads, window, **options(conv))
    attention.from_conv = Origin.of(conv, None)
    attention.requires_grad_(conv.weight.requires_grad)
    if conv.bias is not None:
        attention.value.bias.requires_grad_(conv.bias.requires_grad)
    return attention.train(conv.training)


register_replacement(attention_in, (f'.{GAUSSIAN}', f'.{TABLE}'))
