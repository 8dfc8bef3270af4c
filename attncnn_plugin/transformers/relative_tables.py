"""Gaussian heads of relative position biases: b_δ = −α‖δ − Δ‖² (C20, eq. 9), exact.

Queries are 0, so that the scores are only the biases. Keys are random, so that queries learn: with both at 0 neither
would have a gradient. Entries of a table for class tokens stay as they are. Where there are some, a constant is added
to those of the patches: it changes nothing among patches, and leaves class tokens the share of about 1/N that they have
in uniform attention.
"""

import math
from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor, nn

from ..attention.shifts import at_grid_shifts
from .attention_parts import Attention
from .vision_transformer import Transformer

# Modules with biases: of an attention, its block, or the whole transformer for all its layers.
BIASES = 'rel_pos', 'relative_position_bias', 'shared_rel_pos', 'rel_pos_bias', 'shared_position_bias'


def bias_of(network: Transformer, attention: Attention) -> Optional[Any]:
    """Returns the module that holds an attention's position bias: itself, one in it or its block, or a shared one."""
    if isinstance(getattr(attention.module, 'relative_position_bias_table', None), nn.Parameter):
        return attention.module
    owners = attention.module, attention.block, network.module
    biases = (getattr(owner, name, None) for owner in owners for name in BIASES)
    return next((bias for bias in biases if isinstance(bias, nn.Module)), None)


def window_of(bias: Any) -> Tuple[int, int]:
    """Returns the height and width of the window, or of the whole grid, that a bias covers."""
    if getattr(bias, 'window_size', None) is None:
        raise ValueError(f'{type(bias).__name__} has a position bias, but no window_size that says for which grid')
    return int(bias.window_size[0]), int(bias.window_size[1])


def start_relative(
    network: Transformer, attentions: List[Attention], alpha: float, images: Tensor, generator: torch.Generator
) -> None:
    """Sets the position biases of all layers, which have to be tables, and their queries; nothing is drawn."""
    for attention in attentions:
        bias: Any = bias_of(network, attention)
        size = window_of(bias)
        table, index = (getattr(bias, f'relative_position_{part}', None) for part in ('bias_table', 'index'))
        if hasattr(bias, 'generate_relative_position_index'):  # Hugging Face's BEiT computes it for each image
            index = bias.generate_relative_position_index(size)
        if not (isinstance(table, nn.Parameter) and table.ndim == 2 and isinstance(index, Tensor)):
            raise ValueError(
                f'the relative positions of {attention.name} are a {type(bias).__name__} without a table of biases: a '
                "start needs such a table (BEiT, Swin, vit_relpos_* with rel_pos_type='bias'), rotations, or an "
                'embedding of absolute positions'
            )
        patches, tokens = size[0] * size[1], round(index.numel() ** 0.5)
        index = index.reshape(tokens, tokens)[tokens - patches :, tokens - patches :]  # class tokens come first
        constant = log_share_of_peak(alpha, patches) if tokens > patches else 0.0
        scores = constant + at_grid_shifts(gaussian_table(attention.shifts.to(table.device), alpha, size), size)
        table.data[index] = scores.permute(1, 2, 0).to(table)
        attention.set_maps('qk', torch.zeros_like(attention.weight('q')), attention.weight('k').clone())


def gaussian_table(shifts: Tensor, alpha: float, size: Tuple[int, int]) -> Tensor:
    """Computes −α‖δ − Δ‖² for each head and each shift δ of a grid, ``(N_h, 2·height − 1, 2·width − 1)``, float64."""
    rows, columns = (torch.arange(1 - n, n, dtype=torch.float64, device=shifts.device) for n in size)
    center = shifts.double()[:, :, None, None]
    return -alpha * ((rows[:, None] - center[:, 0]) ** 2 + (columns - center[:, 1]) ** 2)


def log_share_of_peak(alpha: float, patches: int) -> float:
    """Computes log(N / Z) with Z = Σ_δ exp(−α‖δ‖²) over a plane of shifts.

    A token whose score is lower than a head's largest one by this has a share of about 1/N in it, as in uniform
    attention over N patches.
    """
    axis = sum(math.exp(-alpha * shift * shift) for shift in range(-20, 21))
    return max(0.0, math.log(patches) - 2 * math.log(axis))
