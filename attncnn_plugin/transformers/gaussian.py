"""Gaussian heads, P[q, k] = softmax_k(−α‖k − q − Δ‖²) (C20, eq. 9), by each encoding of positions.

**Tables of relative biases**, b_δ = −α‖δ − Δ‖², are exact. Queries are 0, so that the scores are only the biases. Keys
are random, so that queries learn: with both at 0 neither would have a gradient. Entries of a table for class tokens
stay as they are. Where there are some, a constant is added to those of the patches: it changes nothing among patches,
and leaves class tokens the share of about 1/N that they have in uniform attention.

**Embeddings of absolute positions**. Tokens hold a constant and waves of their position, cos(ω_f k) and sin(ω_f k) of
row and column. A score is a product of such functions of the query and of the key,

    Σ_f a_f (cos(ω_f (k − q − Δ)) − 1), summed over the two axes,

with ω_f = πf/r for f = 1 … F, where r is the largest distance |k − q − Δ| of an axis: there all waves have an extreme.
A softmax needs no more of −α‖k − q − Δ‖² than its values near 0, and that all others are low. So the coefficients a are
those whose softmax is nearest to the Gaussian's, and they are small. As it stands the largest score is 0: else
LayerNorm's factor of a key would multiply a large number, and content would move the centre.

The parabola itself is a product too, of [1, q₁, q₂, ‖q‖²] and [1, k₁, k₂, ‖k‖²]. But its queries and keys would have to
be several times as large, and steps of Adam, which are as large for all weights, would soon lead such heads away.

**Rotations** (Su et al. 2021). With the same query and key for all patches the score is a function of only the shift,
Σ_j a_j cos(ω_j·δ) + b_j sin(ω_j·δ) over the frequencies ω_j of the model. The coefficients are those nearest to
−α‖δ − Δ‖². A query and a key that are the same for all patches come from a constant in the tokens: keys of EVA02 and
DINOv3 have no bias, and with biases class tokens would have them too, without a rotation.
"""

import math
from typing import List, Tuple

import torch
from torch import Tensor

from ..attention.shifts import at_grid_shifts
from .embeddings import PositionChannels, patch_positions, set_sine_cosine_embedding
from .mimetic import factors
from .vision_transformer import Attention, Transformer

FEWEST = 5  # functions of an absolute position: a constant, and a cosine and a sine of each axis
SHORTEST = 8  # patches: the period of the shortest wave, at most
# Scores below −FLOOR are not approached by rotations: with them the coefficients would be ten times as large.
FLOOR = 100.0
LEAST_WEIGHT = 1e-5  # of the error at a shift that gets no attention
RIDGE = 1e-5


def start_relative(
    network: Transformer, attentions: List[Attention], alpha: float, images: Tensor, generator: torch.Generator
) -> None:
    """Sets the position biases of all layers, which have to be tables, and their queries; nothing is drawn."""
    for attention in attentions:
        table, index, size = attention.table()
        patches, tokens = size[0] * size[1], len(index)
        index = index[tokens - patches :, tokens - patches :]  # class tokens come first
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


def start_absolute(
    network: Transformer, attentions: List[Attention], alpha: float, images: Tensor, generator: torch.Generator
) -> None:
    """Sets the embedding, and queries and keys of each layer for the tokens that it gets of the images.

    Raises:
        ValueError: Heads or tokens are too narrow.
    """
    narrowest = min(attentions, key=lambda attention: attention.head_dim)
    room = min(narrowest.head_dim, narrowest.width // 2 - 1)
    if room < FEWEST:
        have = f'the heads of {narrowest.name} have {narrowest.head_dim} channels, its tokens {narrowest.width}'
        raise ValueError(f'{have}: absolute positions need {FEWEST} and {2 * FEWEST + 2}')
    set_sine_cosine_embedding(network.module, overwrite=True)
    size = network.grid
    patches, has_prefix = size[0] * size[1], network.num_prefix_tokens > 0
    omega = wave_frequencies(size, torch.cat([attention.shifts for attention in attentions]), room)
    functions = _functions(size, omega)
    rank = functions.shape[1]
    channels = PositionChannels(network, attentions, rank + has_prefix, generator)
    scale = channels.norm / float(functions[0].norm())  # cos² + sin² = 1: the norm is the same everywhere
    held = torch.nn.functional.pad(scale * functions, (0, int(has_prefix))).to(channels.directions)
    prefix = torch.zeros_like(held[0])
    prefix[rank:] = channels.norm  # only prefix tokens are there
    channels.hold(held, prefix)

    def set_heads(attention: Attention, tokens: Tensor) -> None:
        read = channels.read(tokens)
        # LayerNorm's factor g, mean over the patches of all images.
        factor = (read[:, -patches:] * held).sum(-1).mean() / held.square().sum(-1).mean()
        scores = read.new_zeros(attention.num_heads, len(prefix), len(prefix))  # of what the tokens hold
        scores[:, :rank, :rank] = score_matrices(attention.shifts, alpha, size, omega).to(read) / scale**2
        if has_prefix:
            # Its factor is in what is read there.
            scores[:, 0, -1] = -log_share_of_peak(alpha, patches) * factor / (scale * read[:, :-patches, -1].mean())
        # Of the other channels queries begin at 0, and learn, since keys are as they were.
        others = torch.zeros_like(attention.weight('q'))[:, rank:], attention.weight('k')[:, rank:]
        of_position = [x @ channels.directions.T for x in factors(scores * attention.head_dim**0.5 / factor**2, rank)]
        attention.set_maps('qk', *(torch.cat([own.to(x), x], 1) for own, x in zip(of_position, others)))

    channels.in_turn(images, set_heads)


def wave_frequencies(size: Tuple[int, int], shifts: Tensor, room: int) -> List[Tensor]:
    """Computes ω of both axes, ``(F,)`` each, for some shifts ``(N, 2)``.

    The shortest wave has a period of 8 patches at most, and an axis two waves at least, unless there is no room for so
    many functions of the position, at least ``FEWEST``; an axis of one patch needs none.
    """
    reaches = [max(1, math.ceil(n - 1 + shift)) for n, shift in zip(size, shifts.abs().amax(0).tolist())]
    numbers = [max(2, math.ceil(2 * reach / SHORTEST)) if n > 1 else 0 for reach, n in zip(reaches, size)]
    while 1 + 2 * sum(numbers) > room:
        numbers[numbers.index(max(numbers))] -= 1
    return [math.pi * torch.arange(1, f + 1, device='cpu').double() / reach for reach, f in zip(reaches, numbers)]


def _functions(size: Tuple[int, int], omega: List[Tensor]) -> Tensor:
    """Computes [1, cos ωk₁, sin ωk₁, …, cos ωk₂, sin ωk₂, …] of patches k, ``(patches, 1 + 2F)``, F waves."""
    angles = torch.cat([axis[:, None] * own for axis, own in zip(patch_positions(size).T, omega)], 1)  # (patches, F)
    waves = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
    return torch.nn.functional.pad(waves, (1, 0), value=1.0)


def score_matrices(shifts: Tensor, alpha: float, size: Tuple[int, int], omega: List[Tensor]) -> Tensor:
    """Computes M of each head: the scores are functions(q) M functions(k)ᵀ, ``(N_h, 1 + 2F, 1 + 2F)``, float64."""
    matrices = []
    for shift in shifts.tolist():
        a = torch.cat([nearest_waves(alpha, *axis) for axis in zip(shift, size, omega)])
        phases = torch.cat([own * delta for own, delta in zip(omega, shift)])
        cosines, sines = a * phases.cos(), a * phases.sin()
        blocks = torch.stack([cosines, sines, -sines, cosines], -1).view(-1, 2, 2)
        matrices.append(torch.block_diag(-a.sum(), *blocks))
    return torch.stack(matrices)


def nearest_waves(alpha: float, shift: float, length: int, omega: Tensor) -> Tensor:
    """Computes the coefficients a whose softmax is nearest to a Gaussian's, on one axis.

    They have the smallest divergence KL(P ‖ softmax_k Σ_f a_f cos(ω_f (k − q − Δ))) to P[q, k] = softmax_k(−α(k − q −
    Δ)²), mean over the queries, plus ``RIDGE``·‖a‖². The problem is convex: Newton's method, with steps that are halved
    while they lead up.

    Args:
        alpha (float): α.
        shift (float): Δ, in patches.
        length (int): Of the axis, in patches.
        omega (Tensor): ω, ``(F,)``.

    Examples:
        >>> omega = math.pi * torch.tensor([1 / 8, 2 / 8]).double()
        >>> a = nearest_waves(2.0, 1.0, 8, omega)
        >>> k = torch.arange(8.0).double()
        >>> (torch.cos((k[:, None] - 3 - 1) * omega) @ a).softmax(0)[3:6]  # of the query 3
        tensor([0.1048, 0.7891, 0.1048], dtype=torch.float64)
        >>> (-2 * (k - 3 - 1) ** 2).softmax(0)[3:6]
        tensor([0.1065, 0.7866, 0.1065], dtype=torch.float64)
    """
    keys = torch.arange(length, dtype=torch.float64, device=omega.device)
    distances = keys - keys[:, None] - shift  # k − q − Δ, (q, k)
    waves = torch.cos(distances[..., None] * omega)  # (q, k, F)
    wanted = (-alpha * distances.square()).softmax(1)
    of_wanted = (wanted[..., None] * waves).sum(1).mean(0)  # E_P[cos]

    def loss(a: Tensor) -> Tensor:
        return -(wanted * (waves @ a).log_softmax(1)).sum(1).mean() + RIDGE * a.square().sum()

    a = torch.zeros_like(omega)
    ridge = 2 * RIDGE * torch.eye(len(omega), dtype=torch.float64, device=omega.device)
    for _ in range(100 if len(omega) else 0):
        probs = (waves @ a).softmax(1)
        mean = (probs[..., None] * waves).sum(1)
        gradient = mean.mean(0) - of_wanted + ridge @ a
        centred = waves - mean[:, None]
        hessian = torch.einsum('qk,qkf,qkg->fg', probs, centred, centred) / length + ridge
        step = torch.linalg.solve(hessian, gradient)
        while loss(a - step) > loss(a) and step.abs().max() > 1e-9:
            step = step / 2
        a = a - step
        if step.abs().max() < 1e-9:
            break
    return a


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
        in_halves = network.rotates_halves(attention)
        angles = network.rotation_angles(attentions.index(attention), in_halves, images)
        pairs = constant_queries_and_keys(angles, attention.shifts.to(angles), alpha, size, peak)
        factor = channels.read(tokens)[:, -patches:, 0].mean()  # the constant after LayerNorm, mean over patches
        scale = attention.head_dim**0.25 / factor
        heads = (torch.cat([x.real, x.imag], -1) if in_halves else torch.view_as_real(x).flatten(-2) for x in pairs)
        attention.set_maps('qk', *(scale * x[..., None] * channels.directions[:, 0] for x in heads))

    channels.in_turn(images, set_heads)


def constant_queries_and_keys(
    angles: Tensor, shifts: Tensor, alpha: float, size: Tuple[int, int], peak: float
) -> Tuple[Tensor, Tensor]:
    """Computes a query and a key for each head whose scores, q·k after rotation, are nearest to peak − α‖δ − Δ‖².

    Least squares over the shifts of the grid, weighted by exp(−α‖δ − Δ‖²/2).

    Args:
        angles (Tensor): Those of :meth:`~attncnn_plugin.transformers.vision_transformer.Transformer.rotation_angles`.
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


STARTS = {'absolute': start_absolute, 'relative': start_relative, 'rotary': start_rotary}
