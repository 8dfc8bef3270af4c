"""A convolution takes the attention of a state dict: names and shapes say which layer it has become, and how.

The mechanism is :func:`~attncnn_plugin.layers.structure.register_replacement`.
"""

from typing import Mapping, Optional

from torch import Tensor, nn

from ..layers.image_attention import ImageAttention, QuadraticImageAttention, WindowImageAttention
from ..layers.structure import StructureError, register_replacement
from ..layers.window import Window
from .pixels import options

GAUSSIAN, TABLE = '.encoding.center', '.encoding.weight'


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
    value = state_dict.get(f'{prefix}value.weight')
    encoding = next((state_dict[key] for key in (prefix[:-1] + GAUSSIAN, prefix[:-1] + TABLE) if key in state_dict), None)
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) or value is None or encoding is None:
        return None
    try:
        window = Window.of(module)
    except TypeError as error:
        raise StructureError(f'{prefix[:-1]} has attention in the state dict, but {error}') from error
    kind = QuadraticImageAttention if prefix[:-1] + GAUSSIAN in state_dict else WindowImageAttention
    attention = kind(module.in_channels, module.out_channels, len(encoding), window, **options(module))
    for parameter in attention.parameters():
        parameter.requires_grad_(module.weight.requires_grad)
    return attention.train(module.training)


register_replacement(attention_in, (GAUSSIAN, TABLE))
