"""Attention that depends on positions alone: the only kind that a convolution can replace."""

import copy
from typing import Sequence

import torch
from torch import Tensor, nn

from ..attention.attention_layer import AttentionLayer
from ..attention.content_image_attention import ContentImageAttention


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
            'those of attention by positions alone do not'
        )


def ignores_content(layer: nn.Module) -> bool:
    """Returns whether attention by content has no queries or no keys yet: all images have the same probabilities."""
    return isinstance(layer, ContentImageAttention) and not (layer.query.weight.any() and layer.key.weight.any())


@torch.no_grad()
def exact_probs(layer: AttentionLayer, size: Sequence[int]) -> Tensor:
    """Returns the probabilities of attention that does not see content (yet), ``(N_h, Q, pixels)``, float64."""
    if not isinstance(layer, ContentImageAttention):
        return layer.exact_attention_probs(size)
    exact = copy.deepcopy(layer).cpu().double()
    image = torch.zeros(1, layer.in_channels, *size, dtype=torch.float64)
    return exact.attention_scores(image)[0, ..., :-1].exp()  # without the null key
