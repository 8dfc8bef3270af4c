"""Gaussian heads of absolute position embeddings.

Tokens hold a constant and waves of their position, cos(ω_f k) and sin(ω_f k) of row and column. A score is a product of
such functions of the query and of the key,

    Σ_f a_f (cos(ω_f (k − q − Δ)) − 1), summed over the two axes,

whose softmax is nearly that of −α‖k − q − Δ‖² (C20, eq. 9; :mod:`~attncnn_plugin.init.waves`). As it stands the largest
score is 0: else LayerNorm's factor of a key would multiply a large number, and content would move the centre.

The parabola itself is a product too, of [1, q₁, q₂, ‖q‖²] and [1, k₁, k₂, ‖k‖²]. But its queries and keys would have to
be several times as large, and steps of Adam, which are as large for all weights, would soon lead such heads away.
"""

import math
from functools import partial
from typing import Any, List, Tuple

import torch
from torch import Tensor

from ..analysis.vision_transformer import num_prefix_tokens
from .channels import PositionChannels
from .embeddings import sine_cosine_embedding
from .parts import Attention, position_embedding
from .shifts import Size, log_share_of_peak
from .waves import frequencies, nearest_waves, number_of_waves, wave_matrix

FEWEST = 5  # functions of the position: a constant, and a cosine and a sine of each axis


def start_absolute(
    network: Any,
    attentions: List[Attention],
    chosen: List[Tuple[Attention, Tensor]],
    alpha: float,
    size: Size,
    embedding: str,
    scale_values: bool,
    generator: torch.Generator,
) -> List[Any]:
    """Sets the embedding now, and queries and keys of each layer when it gets its tokens.

    Args:
        network: The vision transformer.
        attentions (list[Attention]): All its attention.
        chosen (list[tuple[Attention, Tensor]]): What is to be started, with the heads' shifts ``(N_h, 2)``.
        alpha (float): α.
        size (tuple[int, int]): Of the grid of patches.
        embedding (str): What the other channels of the embedding hold: ``'sine-cosine'``, or their ``'own'``.
        scale_values (bool): Whether values make up for content that the position makes smaller.
        generator (torch.Generator): Draws the channels that hold the position.

    Returns:
        list: Handles of hooks, to be removed after a forward pass.

    Raises:
        ValueError: Heads or tokens are too narrow.
    """
    narrowest = min((attention for attention, _ in chosen), key=lambda attention: attention.head_dim)
    if narrowest.head_dim < FEWEST:
        raise ValueError(
            f'the heads of {narrowest.name} have {narrowest.head_dim} channels: a Gaussian head of absolute '
            f'positions needs {FEWEST}'
        )
    patches = size[0] * size[1]
    if embedding == 'sine-cosine':
        rows = position_embedding(network, patches)
        rows[-patches:] = sine_cosine_embedding(size, rows.shape[1]).to(rows)
    has_prefix = num_prefix_tokens(network) > 0
    omega = _frequencies(size, chosen, narrowest)
    functions = _functions(size, omega)
    channels = PositionChannels(network, attentions, functions.shape[1] + has_prefix, generator)
    functions = functions.to(channels.directions)
    scale = channels.norm / functions.norm(dim=1)[0]  # cos² + sin² = 1: the norm is the same everywhere
    held = torch.nn.functional.pad(scale * functions, (0, int(has_prefix)))
    prefix = torch.zeros_like(held[0])
    if has_prefix:
        prefix[-1] = channels.norm  # only prefix tokens are there
    channels.hold(held, prefix)
    log_share = log_share_of_peak(alpha, patches)
    return channels.keep_content(attentions, scale_values) + [
        attention.module.register_forward_pre_hook(
            partial(_set_heads, attention, score_matrices(shifts, alpha, size, omega), channels, held, log_share)
        )
        for attention, shifts in chosen
    ]


def _frequencies(size: Size, chosen: List[Tuple[Attention, Tensor]], narrowest: Attention) -> List[Tensor]:
    """ω of each axis, as many as a grid of this size needs, and no more than heads and tokens have room for."""
    largest = torch.cat([shifts for _, shifts in chosen]).abs().amax(0).tolist()
    reaches = [max(1, math.ceil(length - 1 + shift)) for length, shift in zip(size, largest)]
    numbers = [number_of_waves(reach) if length > 1 else 0 for reach, length in zip(reaches, size)]
    room = min(narrowest.head_dim, narrowest.weight('q').shape[-1] // 2 - 1)
    while 1 + 2 * sum(numbers) > max(room, FEWEST):
        numbers[numbers.index(max(numbers))] -= 1
    return [frequencies(reach, number) for reach, number in zip(reaches, numbers)]


def _functions(size: Size, omega: List[Tensor]) -> Tensor:
    """[1, cos ωk₁, sin ωk₁, …, cos ωk₂, sin ωk₂, …] of each patch k, ``(patches, 1 + 2F)``, F waves on both axes."""
    grid = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64) for n in size))  # (patches, 2)
    angles = torch.cat([position[:, None] * own for position, own in zip(grid.T, omega)], 1)  # (patches, F)
    waves = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
    return torch.nn.functional.pad(waves, (1, 0), value=1.0)


def score_matrices(shifts: Tensor, alpha: float, size: Size, omega: List[Tensor]) -> Tensor:
    """M of each head: the scores are functions(q) M functions(k)ᵀ, ``(N_h, 1 + 2F, 1 + 2F)``, float64."""
    matrices = []
    for shift in shifts.tolist():
        axes = [nearest_waves(alpha, *axis) for axis in zip(shift, size, omega)]
        peak = sum(a.sum() for a in axes)
        blocks = [wave_matrix(*axis) for axis in zip(axes, omega, shift)]
        matrices.append(torch.block_diag(-peak, *blocks))
    return torch.stack(matrices)


def _set_heads(
    attention: Attention,
    matrices: Tensor,
    channels: PositionChannels,
    held: Tensor,
    log_share: float,
    module: Any,
    args: Tuple[Tensor, ...],
) -> None:
    """Queries and keys of a layer for the tokens that it gets, ``(B, N, D)``."""
    read = channels.read(args[0])
    prefix, rank = read.shape[1] - len(held), matrices.shape[-1]
    scale = held[0, 0]  # of the functions in what is held: the first one is 1
    # LayerNorm's factor g, mean over the patches of all images.
    factor = (read[:, prefix:] * held).sum(-1).mean() / held.square().sum(-1).mean()
    of_held = read.new_zeros(len(matrices), read.shape[-1], read.shape[-1])
    of_held[:, :rank, :rank] = matrices.to(read) / scale**2
    if prefix:
        factor_of_prefix = read[:, :prefix, -1].mean() / channels.norm
        of_held[:, 0, -1] = -log_share / (scale * channels.norm) * factor / factor_of_prefix
    left, values, right = torch.linalg.svd(of_held * attention.head_dim**0.5 / factor**2)
    roots = values[:, :rank, None].sqrt()
    queries = torch.zeros_like(attention.weight('q'))  # content begins at 0 and learns, since keys are not 0
    keys = attention.weight('k').clone()
    queries[:, :rank] = (roots * left.mT[:, :rank] @ channels.directions.T).to(queries)
    keys[:, :rank] = (roots * right[:, :rank] @ channels.directions.T).to(keys)
    attention.set_queries_and_keys(queries, keys)
