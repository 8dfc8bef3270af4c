"""Gaussian heads of absolute position embeddings.

−α‖k − q − Δ‖² = [1, q₁, q₂, ‖q‖²] M [1, k₁, k₂, ‖k‖²]ᵀ with a matrix M of rank 4 (C20, eq. 9, multiplied out). It has
rank 3 up to a constant of the query, but then the score of the key that a head looks at is a large number that
LayerNorm's factor of the key multiplies. As it stands the largest score is 0 whatever that factor is, and content
changes the width α alone.
"""

from functools import partial
from typing import Any, List, Tuple

import torch
from torch import Tensor

from ..analysis.vision_transformer import num_prefix_tokens
from .channels import PositionChannels
from .embeddings import sine_cosine_embedding
from .parts import Attention, position_embedding
from .shifts import Size, log_share_of_peak

RANK = 4
# How much of the embedding each function has: a constant, row and column, squared distance from the centre.
WEIGHTS = (0.5, 1.0, 1.0, 0.5)


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
    for attention, _ in chosen:
        if attention.head_dim < RANK:
            raise ValueError(
                f'the heads of {attention.name} have {attention.head_dim} channels: a Gaussian head of absolute '
                f'positions needs {RANK}'
            )
    patches = size[0] * size[1]
    if embedding == 'sine-cosine':
        rows = position_embedding(network, patches)
        rows[-patches:] = sine_cosine_embedding(size, rows.shape[1]).to(rows)
    has_prefix = num_prefix_tokens(network) > 0
    channels = PositionChannels(network, attentions, 5 + has_prefix, generator)
    held, functions = _held(size, channels, has_prefix)
    prefix = torch.zeros_like(held[0])
    if has_prefix:
        prefix[-1] = channels.norm  # only prefix tokens are there
    channels.hold(held, prefix)
    of_functions = torch.linalg.pinv(held) @ functions  # held @ of_functions = functions
    return channels.keep_content(attentions, scale_values) + [
        attention.module.register_forward_pre_hook(
            partial(_set_heads, attention, shifts, alpha, channels, held, of_functions)
        )
        for attention, shifts in chosen
    ]


def _held(size: Size, channels: PositionChannels, has_prefix: bool) -> Tuple[Tensor, Tensor]:
    """What the channels hold, ``(patches, channels)``, of the same norm everywhere, and [1, k₁, k₂, ‖k‖²]."""
    grid = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64) - (n - 1) / 2 for n in size))
    grid = grid.to(channels.directions.device)
    squares = grid.square().sum(1)
    functions = torch.stack([torch.ones_like(squares), *grid.T, squares], 1)
    held = torch.stack([torch.ones_like(squares), *grid.T, squares - squares.mean()], 1)
    scale = held.square().mean(0).sqrt()
    held = held / scale.where(scale > 0, 1) * torch.tensor(WEIGHTS, dtype=held.dtype, device=held.device)
    rest = (held.square().sum(1).amax() - held.square().sum(1)).clamp(min=0).sqrt()  # makes the norm constant
    held = torch.cat([held, rest[:, None]], 1)
    held = channels.norm * held / held.norm(dim=1, keepdim=True)
    return torch.nn.functional.pad(held, (0, int(has_prefix))), functions


def _set_heads(
    attention: Attention,
    shifts: Tensor,
    alpha: float,
    channels: PositionChannels,
    held: Tensor,
    of_functions: Tensor,
    module: Any,
    args: Tuple[Tensor, ...],
) -> None:
    """Queries and keys of a layer for the tokens that it gets, ``(B, N, D)``."""
    read = channels.read(args[0])
    prefix = read.shape[1] - len(held)
    # LayerNorm's factor g, mean over the patches of all images.
    factor = (read[:, prefix:] * held).sum(-1).mean() / held.square().sum(-1).mean()
    matrices = of_functions @ gaussian_matrices(shifts.to(read), alpha) @ of_functions.T  # of what the channels hold
    if prefix:
        factor_of_prefix = read[:, :prefix, -1].mean() / channels.norm
        log_share = log_share_of_peak(alpha, len(held))
        matrices[:, :, -1] = -log_share * of_functions[:, 0] / channels.norm * factor / factor_of_prefix
    head_dim = attention.head_dim
    matrices = matrices * head_dim**0.5 / factor**2
    left, values, right = torch.linalg.svd(matrices)
    roots = values[:, :RANK, None].sqrt()
    queries = torch.zeros_like(attention.weight('q'))  # content begins at 0 and learns, since keys are not 0
    keys = attention.weight('k').clone()
    queries[:, :RANK] = (roots * left.mT[:, :RANK] @ channels.directions.T).to(queries)
    keys[:, :RANK] = (roots * right[:, :RANK] @ channels.directions.T).to(keys)
    attention.set_queries_and_keys(queries, keys)


def gaussian_matrices(shifts: Tensor, alpha: float) -> Tensor:
    """M of each head: [1, q₁, q₂, ‖q‖²] M [1, k₁, k₂, ‖k‖²]ᵀ = −α‖k − q − Δ‖², ``(N_h, 4, 4)``.

    Examples:
        >>> M = gaussian_matrices(torch.tensor([[0.0, 1.0]]), 2.0)[0]
        >>> query, key = torch.tensor([1.0, 3, 4, 25]), torch.tensor([1.0, 3, 6, 45])  # at (3, 4) and (3, 6)
        >>> (query @ M @ key).item()
        -2.0
    """
    matrices = shifts.new_zeros(len(shifts), 4, 4)
    matrices[:, 0, 0] = -shifts.square().sum(1)
    matrices[:, 0, 1:3] = 2 * shifts
    matrices[:, 1:3, 0] = -2 * shifts
    matrices[:, 1, 1] = matrices[:, 2, 2] = 2
    matrices[:, 0, 3] = matrices[:, 3, 0] = -1
    return alpha * matrices
