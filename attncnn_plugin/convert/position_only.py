"""Attention that depends on positions alone: the only kind that a convolution can replace."""

from torch import nn

from ..layers.attention_layer import AttentionLayer


def check_position_only(layer: nn.Module) -> None:
    """Refuses a layer that is not attention by positions alone.

    Raises:
        TypeError: ``layer`` is no attention of this package.
        ValueError: Its probabilities depend on its input.
    """
    if not isinstance(layer, AttentionLayer):
        raise TypeError(
            f'layer is a {type(layer).__name__}, but only attention layers of this package have heads with '
            'probabilities of positions'
        )
    if layer.depends_on_content:
        raise ValueError(
            f'the probabilities of layer, {type(layer).__name__}({layer.extra_repr()}), depend on the input: only '
            "those of attention by positions alone do not, of a ContentAttention with terms=('vr',)"
        )
