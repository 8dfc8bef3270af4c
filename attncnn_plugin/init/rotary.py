"""Gaussian heads of rotary position embeddings (Su et al. 2021).

With the same query and key for all patches the score is a function of the shift alone, Σ_j a_j cos(ω_j·δ) +
b_j sin(ω_j·δ) over the frequencies ω_j of the model. The coefficients are those nearest to −α‖δ − Δ‖². A query and a
key that are the same for all patches come from a constant in the tokens: keys of EVA02 and DINOv3 have no bias, and
with biases class tokens would have them too, without a rotation.
"""

from functools import partial
from typing import Any, List, Tuple

import torch
from torch import Tensor

from ..analysis.vision_transformer import num_prefix_tokens
from .channels import PositionChannels
from .parts import Attention
from .shifts import Size, log_share_of_peak, squared_distances

# Scores below −FLOOR are not approached: with them the coefficients would be ten times as large.
FLOOR = 100.0
LEAST_WEIGHT = 1e-5  # of the error at a shift that gets no attention
RIDGE = 1e-5


def start_rotary(
    network: Any,
    attentions: List[Attention],
    chosen: List[Tuple[Attention, Tensor]],
    alpha: float,
    size: Size,
    scale_values: bool,
    generator: torch.Generator,
) -> List[Any]:
    """Puts a constant into the tokens now, and sets queries and keys of each layer when it gets them.

    Args, returns and errors: see :func:`~attncnn_plugin.init.absolute.start_absolute`.
    """
    channels = PositionChannels(network, attentions, 1, generator)
    channels.hold_constant()
    peak = log_share_of_peak(alpha, size[0] * size[1]) if num_prefix_tokens(network) else 0.0
    setters = []
    for attention, shifts in chosen:
        angles = rotation_angles(network, attentions.index(attention), attention, size)
        queries, keys = constant_queries_and_keys(angles, shifts.to(angles), alpha, size, peak)
        setters.append(partial(_set_heads, attention, queries, keys, channels, size[0] * size[1]))
    handles = channels.keep_content(attentions, scale_values)
    return handles + [
        attention.module.register_forward_pre_hook(setter) for (attention, _), setter in zip(chosen, setters)
    ]


def rotation_angles(network: Any, layer: int, attention: Attention, size: Size) -> Tensor:
    """The angle by which each pair of channels is rotated at each patch, ``(N_h or 1, patches, d/2)``, float64."""
    embedding = network.rope.get_embed(shape=size) if _takes_shape(network.rope) else network.rope.get_embed()
    embedding = embedding.double()
    if embedding.ndim == 4:  # a layer has angles of its own
        embedding = embedding[layer]
    if embedding.ndim == 2:
        embedding = embedding[None]
    sines, cosines = embedding.chunk(2, -1)
    angles = torch.atan2(sines, cosines)
    return angles[..., : angles.shape[-1] // 2] if _is_half(attention) else angles[..., ::2]


def _takes_shape(rope: Any) -> bool:
    return getattr(rope, 'feat_shape', None) is None


def _is_half(attention: Attention) -> bool:
    """Whether channel i is rotated with channel i + d/2, not 2i with 2i + 1."""
    return bool(getattr(attention.module, 'rotate_half', False))


def constant_queries_and_keys(
    angles: Tensor, shifts: Tensor, alpha: float, size: Size, peak: float
) -> Tuple[Tensor, Tensor]:
    """A query and a key for each head whose scores, q·k after rotation, are nearest to peak − α‖δ − Δ‖².

    Least squares over the shifts of the grid, weighted by exp(−α‖δ − Δ‖²/2).

    Args:
        angles (Tensor): ``(N_h or 1, patches, d/2)``.
        shifts (Tensor): ``(N_h, 2)``.
        alpha (float): α.
        size (tuple[int, int]): Of the grid.
        peak (float): The largest score.

    Returns:
        tuple[Tensor, Tensor]: Queries and keys as complex numbers, ``(N_h, d/2)``: a pair of channels is one.
    """
    height, width = size
    index = torch.arange(height * width, device=angles.device).reshape(size)
    rows, columns = torch.meshgrid(
        *(torch.arange(1 - n, n, device=angles.device) for n in size), indexing='ij'
    )  # all shifts, each from a query to a key in the grid
    query = index[(-rows).clamp(min=0), (-columns).clamp(min=0)].flatten()
    key = index[rows.clamp(min=0), columns.clamp(min=0)].flatten()
    turned = angles[:, key] - angles[:, query]  # (N_h or 1, shifts, d/2)
    waves = torch.cat([turned.cos(), turned.sin()], -1)
    distances = alpha * squared_distances(shifts, size).flatten(1)
    weights = torch.exp(-distances / 2).clamp(min=LEAST_WEIGHT).sqrt()[..., None]
    wanted = (peak - distances.clamp(max=FLOOR))[..., None]
    design = waves * weights
    ridge = RIDGE * torch.eye(waves.shape[-1], dtype=waves.dtype, device=waves.device)
    solution = torch.linalg.solve(design.mT @ design + ridge, design.mT @ (wanted * weights))[..., 0]
    cosines, sines = solution.chunk(2, -1)
    # Re(conj(q e^{iθ_q}) k e^{iθ_k}) = Re(conj(q) k e^{iθ}), θ = θ_k − θ_q: conj(q) k = a − ib makes a cos θ + b sin θ.
    product = torch.complex(cosines, -sines)
    keys = product.abs().sqrt()
    return (product.conj() / keys.where(keys > 0, 1)), keys.to(product)


def _set_heads(
    attention: Attention,
    queries: Tensor,
    keys: Tensor,
    channels: PositionChannels,
    patches: int,
    module: Any,
    args: Tuple[Tensor, ...],
) -> None:
    """Queries and keys of a layer for the tokens that it gets, ``(B, N, D)``: all read the constant alone."""
    factor = channels.read(args[0])[:, -patches:, 0].mean()  # the constant after LayerNorm, mean over patches
    scale = attention.head_dim**0.25 / factor
    attention.set_queries_and_keys(
        *(
            (scale * _as_channels(pairs, _is_half(attention))[..., None] * channels.directions[:, 0]).to(args[0])
            for pairs in (queries, keys)
        )
    )


def _as_channels(pairs: Tensor, half: bool) -> Tensor:
    """Complex numbers ``(N_h, d/2)`` as the channels that are rotated together, ``(N_h, d)``."""
    return torch.cat([pairs.real, pairs.imag], -1) if half else torch.view_as_real(pairs).flatten(-2)
