"""Gaussian heads of rotary position embeddings (Su et al. 2021).

With the same query and key for all patches the score is a function of only the shift, Σ_j a_j cos(ω_j·δ) +
b_j sin(ω_j·δ) over the frequencies ω_j of the model. The coefficients are those nearest to −α‖δ − Δ‖². A query and a
key that are the same for all patches come from a constant in the tokens: keys of EVA02 and DINOv3 have no bias, and
with biases class tokens would have them too, without a rotation.
"""

from typing import Any, List, Tuple

import torch
from torch import Tensor

from .attention_parts import Attention
from .embeddings import PositionChannels
from .relative_tables import gaussian_table, log_share_of_peak
from .vision_transformer import Transformer

# Scores below −FLOOR are not approached: with them the coefficients would be ten times as large.
FLOOR = 100.0
LEAST_WEIGHT = 1e-5  # of the error at a shift that gets no attention
RIDGE = 1e-5


def start_rotary(
    network: Transformer, attentions: List[Attention], alpha: float, images: Tensor, generator: torch.Generator
) -> None:
    """Puts a constant into the tokens, and sets queries and keys of each layer for the tokens that it gets."""
    size = network.grid
    patches = size[0] * size[1]
    peak = log_share_of_peak(alpha, patches) if network.num_prefix_tokens else 0.0
    channels = PositionChannels(network, attentions, 1, generator)
    channels.hold_constant()

    def set_heads(attention: Attention, tokens: Tensor) -> None:
        # Channel i is rotated with channel i + d/2, or 2i with 2i + 1.
        in_halves = bool(getattr(attention.module, 'rotate_half', hasattr(network.module, 'rope_embeddings')))
        angles = rotation_angles(network.rope, attentions.index(attention), in_halves, size, images)
        pairs = constant_queries_and_keys(angles, attention.shifts.to(angles), alpha, size, peak)
        factor = channels.read(tokens)[:, -patches:, 0].mean()  # the constant after LayerNorm, mean over patches
        scale = attention.head_dim**0.25 / factor
        heads = (torch.cat([x.real, x.imag], -1) if in_halves else torch.view_as_real(x).flatten(-2) for x in pairs)
        attention.set_maps('qk', *(scale * x[..., None] * channels.directions[:, 0] for x in heads))

    channels.in_turn(images, set_heads)


def rotation_angles(rope: Any, layer: int, in_halves: bool, size: Tuple[int, int], images: Tensor) -> Tensor:
    """Returns the angle by which each pair of channels is rotated at each patch, ``(N_h or 1, patches, d/2)``."""
    if hasattr(rope, 'get_embed'):
        embedding = rope.get_embed(**dict(shape=size) if getattr(rope, 'feat_shape', None) is None else {}).double()
    else:
        try:
            cosines, sines = rope(images)  # of Hugging Face
        except TypeError as error:
            what = f'the angles of the rotations of a {type(rope).__name__}'
            raise ValueError(f'{what} cannot be read: give a model of timm') from error
        embedding = torch.cat([sines, cosines], -1).double()
    if embedding.ndim == 4:  # a layer has angles of its own
        embedding = embedding[layer]
    sines, cosines = embedding.reshape(-1, *embedding.shape[-2:]).chunk(2, -1)
    angles = torch.atan2(sines, cosines)
    return angles[..., : angles.shape[-1] // 2] if in_halves else angles[..., ::2]


def constant_queries_and_keys(
    angles: Tensor, shifts: Tensor, alpha: float, size: Tuple[int, int], peak: float
) -> Tuple[Tensor, Tensor]:
    """Computes a query and a key for each head whose scores, q·k after rotation, are nearest to peak − α‖δ − Δ‖².

    Least squares over the shifts of the grid, weighted by exp(−α‖δ − Δ‖²/2).

    Args:
        angles (Tensor): Those of :func:`rotation_angles`.
        shifts (Tensor): Δ, ``(N_h, 2)``.
        alpha (float): α.
        size (tuple[int, int]): Of the grid.
        peak (float): The largest score.

    Returns:
        tuple[Tensor, Tensor]: Queries and keys as complex numbers, ``(N_h, d/2)``: a pair of channels is one.
    """
    # All shifts, each from a query to a key in the grid.
    rows, columns = torch.cartesian_prod(*(torch.arange(1 - n, n, device=angles.device) for n in size)).T
    query, key = (i.clamp(min=0) * size[1] + j.clamp(min=0) for i, j in ((-rows, -columns), (rows, columns)))
    turned = angles[:, key] - angles[:, query]  # (N_h or 1, shifts, d/2)
    waves = torch.cat([turned.cos(), turned.sin()], -1)
    scores = gaussian_table(shifts, alpha, size).flatten(1)
    weights = torch.exp(scores / 2).clamp(min=LEAST_WEIGHT).sqrt()[..., None]
    wanted = (peak + scores.clamp(min=-FLOOR))[..., None]
    design = waves * weights
    ridge = RIDGE * torch.eye(waves.shape[-1], dtype=waves.dtype, device=waves.device)
    solution = torch.linalg.solve(design.mT @ design + ridge, design.mT @ (wanted * weights))[..., 0]
    cosines, sines = solution.chunk(2, -1)
    # Re(conj(q e^{iθ_q}) k e^{iθ_k}) = Re(conj(q) k e^{iθ}), θ = θ_k − θ_q: conj(q) k = a − ib makes a cos θ + b sin θ.
    product = torch.complex(cosines, -sines)
    keys = product.abs().sqrt()
    return (product.conj() / keys.where(keys > 0, 1)), keys.to(product)
