"""Attention that depends on positions alone, the only kind that a convolution can stand for."""

import copy
from typing import Tuple

from torch import Tensor, nn


def check_position_only(layer: nn.Module) -> None:
    """Refuses a layer that is not attention by positions alone.

    Raises:
        TypeError: ``layer`` has no heads with probabilities.
        ValueError: Its scores depend on its input.
    """
    if not hasattr(layer, 'attention_probs') or not hasattr(layer, 'num_heads'):
        raise TypeError(
            f'layer is a {type(layer).__name__}, but only attention over a grid of pixels has heads with probabilities '
            'of positions'
        )
    if not getattr(layer, 'position_only', True):
        raise ValueError(
            f'the scores of layer, {type(layer).__name__}({layer.extra_repr()}), depend on the input: only attention by '
            "positions alone has probabilities without one, of a ContentAttention that with terms=('vr',)"
        )


def exact_attention_probs(layer: nn.Module, size: Tuple[int, ...]) -> Tensor:
    """``layer.attention_probs(*size)`` in float64 throughout, on the CPU, ``(N_h, Q, pixels)``."""
    return copy.deepcopy(layer).cpu().double().attention_probs(*size).detach()
