"""How degenerate the heads of position-only attention are (C20, appendix E), and two ways to repair them.

A Gaussian head, quadratic or generalized quadratic, has the eigenvalues λ₁ ≥ λ₂ of Σ⁻¹ = MMᵀ, in 1/tokens². With λ₁
near 0 it attends to all keys alike, with λ₁ ≫ λ₂ to a stripe. All but the penalty is computed in float64 on the CPU.
"""

import copy
import math
from typing import Optional, Sequence, Union

import torch
from torch import Tensor, nn

from ..convert.to_conv import position_probs
from ..layers.encodings import GeneralizedQuadraticEncoding, LearnedEncoding, QuadraticEncoding
from ..layers.precision import at_least_float32
from ..layers.window import per_axis


@torch.no_grad()
def largest_eigenvalue(layer: nn.Module) -> Tensor:
    """λ₁ of each Gaussian head, ``(N_h,)`` in 1/tokens², float64; 2α for the quadratic encoding.

    Raises:
        TypeError: The heads of ``layer`` are not Gaussian.
        ValueError: A width is not finite.
    """
    return _largest_singular_value(_finite_factor(layer)).square()


@torch.no_grad()
def condition_number(layer: nn.Module) -> Tensor:
    """λ₁/λ₂ of each Gaussian head, ``(N_h,)``, float64; 1 for the quadratic encoding and for Σ⁻¹ = 0.

    Raises:
        TypeError: The heads of ``layer`` are not Gaussian.
        ValueError: A width is not finite.
    """
    factor = _finite_factor(layer)
    largest = _largest_singular_value(factor).square()
    # s₁/s₂ = s₁²/|det M|. The products of float32 entries are exact in float64: a singular M has the determinant 0.
    return torch.where(largest > 0, (largest / _determinant(factor).abs()).square(), 1.0)


@torch.no_grad()
def relative_entropy(layer: nn.Module, size: Union[int, Sequence[int]]) -> Tensor:
    """Entropy of each head, mean over queries, relative to that of uniform attention on a grid.

    Args:
        layer (nn.Module): Attention by positions alone.
        size (int | Sequence[int]): Height and width of the grid in tokens.

    Returns:
        Tensor: ``(N_h,)``, from 0, one key for each query, to 1, all keys alike; float64.

    Raises:
        TypeError, ValueError: See :func:`attention_maps`; the grid has a single token.
    """
    maps = attention_maps(layer, size)
    if maps.shape[-1] < 2:
        raise ValueError(f'size={size!r} is a single token, on which every head is uniform: at least two are needed')
    entropy = torch.special.entr(maps).sum(-1).mean(-1)  # −Σ_k P[q, k] log P[q, k]
    return (entropy / math.log(maps.shape[-1])).clamp(max=1)


def least_uniform_head(layer: nn.Module, size: Union[int, Sequence[int]]) -> int:
    """The head with the lowest :func:`relative_entropy`, the first of equal ones: the one to keep if one has to be.

    Raises:
        TypeError, ValueError: See :func:`relative_entropy`; ``layer`` has no heads.
    """
    check_position_only(layer)
    if layer.num_heads == 0:
        raise ValueError('layer has num_heads=0, but at least one head is needed to keep one')
    entropy = relative_entropy(layer, size).tolist()
    return entropy.index(min(entropy))


@torch.no_grad()
def attention_maps(layer: nn.Module, size: Union[int, Sequence[int], None]) -> Tensor:
    """The probabilities of every query for every key of a grid, ``(N_h, H*W, H*W)``, float64.

    Raises:
        TypeError: ``layer`` has no probabilities of positions.
        ValueError: The scores of ``layer`` depend on content; ``size`` is no size of a grid; the parameters give
            probabilities that are not finite.
    """
    check_position_only(layer)
    if size is None:
        raise ValueError('size=None, but attention maps are those of a grid: give its height and width in tokens')
    maps = position_probs(layer, per_axis('size', size, 2))
    if not maps.isfinite().all():
        raise ValueError('the attention maps of layer hold values that are not finite: its parameters must be finite')
    return maps


def map_distance(first: Tensor, second: Tensor) -> float:
    """Total-variation distance ½ Σ_k |P[q, k] − P'[q, k]| of two maps, ``(Q, K)``, mean over queries, 0 to 1."""
    return (first - second).abs().sum(-1).mean().item() / 2


def singular_penalty(layer: nn.Module, max_condition: float = 100.0, min_eigenvalue: float = 1e-3) -> Tensor:
    """A penalty on Gaussian heads that come near a singular Σ⁻¹, uniform or a stripe.

        Σ_h max(0, 1 − u_h/u₀)²,    u = 2√(λ₁λ₂) / (λ₁ + λ₂ + 2ε) = 2|det M| / (‖M‖² + 2ε)

    u is 2√κ/(κ + 1) for a condition number κ and λ ≫ ε, and λ/(λ + ε) for λ₁ = λ₂ = λ. u₀ and ε are such that the
    penalty begins at κ = ``max_condition`` for the first and at λ = ``min_eigenvalue`` for the second. A head adds 1 at
    most. (C20's code has the mean of (κ − 1)² instead, which has no bound and punishes every shape but the circle.)

    It has a gradient wherever M ≠ 0, also where det M = 0; at M = 0 the gradient is 0, and :func:`reset_heads` helps.
    At a learning rate of 0.1 a weight of 0.01 repairs a head within some tens of steps of SGD.

    Args:
        layer (nn.Module): ``QuadraticAttention``, whose heads have κ = 1, or ``GeneralizedQuadraticAttention``.
        max_condition (float): κ up to which a head is free of it, above 1. Defaults to 100.
        min_eigenvalue (float): λ in 1/tokens² from which on a round head is free of it. Defaults to 1e-3, a
            standard deviation of 32 tokens.

    Returns:
        Tensor: A scalar, differentiable, at least float32.

    Raises:
        TypeError: The heads of ``layer`` are not Gaussian.
        ValueError: A setting out of range.
    """
    if not 1 < max_condition < math.inf:
        raise ValueError(f'max_condition={max_condition} must be a number above 1')
    if not 0 < min_eigenvalue < math.inf:
        raise ValueError(f'min_eigenvalue={min_eigenvalue} must be a number above 0')
    factor = at_least_float32(_factor(layer))
    least = 2 * math.sqrt(max_condition) / (max_condition + 1)  # u₀
    epsilon = min_eigenvalue * (1 / least - 1)  # λ/(λ + ε) = u₀
    determinant = _determinant(factor)
    # |det M| with the slope 1 at 0, where that of abs() is 0: an exact stripe has a way out.
    determinant = torch.where(determinant >= 0, determinant, -determinant)
    roundness = 2 * determinant / (factor.square().sum((1, 2)) + 2 * epsilon)
    return (1 - roundness / least).clamp(min=0).square().sum()


@torch.no_grad()
def reset_heads(layer: nn.Module, heads: Sequence[int], generator: Optional[torch.Generator] = None) -> None:
    """Draws the centres and widths of some heads, or v for the learned encoding, anew, as when the layer was built.

    In place, and nothing else changes: not the other heads, not the value matrix, not an optimizer's momentum. The
    numbers are drawn on the CPU: equal generators give equal heads on every rank and device.

    Args:
        layer (nn.Module): ``QuadraticAttention``, ``GeneralizedQuadraticAttention`` or ``LearnedAttention``.
        heads (Sequence[int]): The heads, from 0 to N_h − 1.
        generator (torch.Generator, optional): Of the CPU; one number is drawn from it. Defaults to PyTorch's own.

    Raises:
        TypeError: ``layer`` has none of these encodings.
        ValueError: A head that is not there.
    """
    encoding = getattr(layer, 'encoding', None)
    if not isinstance(encoding, (QuadraticEncoding, GeneralizedQuadraticEncoding, LearnedEncoding)):
        raise TypeError(
            f'layer is a {type(layer).__name__}, but only heads with a quadratic, a generalized quadratic '
            'or a learned encoding can be reset'
        )
    heads = list(heads)
    if any(type(head) is not int or not 0 <= head < layer.num_heads for head in heads):
        raise ValueError(f'heads={heads} must be heads from 0 to {layer.num_heads - 1}')
    seed = torch.randint(2**63 - 1, (), generator=generator).item()
    fresh = copy.deepcopy(encoding).cpu()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the devices
        fresh.reset_parameters()
    for own, new in zip(encoding.parameters(recurse=False), fresh.parameters(recurse=False)):
        own[heads] = new[heads].to(own.device)


def check_position_only(layer: nn.Module) -> None:
    """Refuses a layer that is not attention by positions alone."""
    if not hasattr(layer, 'attention_probs') or not hasattr(layer, 'num_heads'):
        raise TypeError(
            f'layer is a {type(layer).__name__}, but only attention with attention_probs(height, width) '
            'and num_heads has heads to judge by positions'
        )
    if getattr(layer, 'depends_on_content', False):
        raise ValueError(
            f'the scores of layer, terms={layer.terms}, depend on the input: only attention by positions '
            "alone can be judged without one, terms=('vr',)"
        )


def _factor(layer: nn.Module) -> Tensor:
    """M with Σ⁻¹ = MMᵀ of each head, ``(N_h, 2, 2)``."""
    encoding = getattr(layer, 'encoding', None)
    if isinstance(encoding, QuadraticEncoding):
        return torch.diag_embed(encoding.sqrt_precision[:, None].expand(-1, 2))  # I/σ
    if isinstance(encoding, GeneralizedQuadraticEncoding):
        return encoding.sqrt_precision
    raise TypeError(
        f'layer is a {type(layer).__name__}, but only heads with a quadratic or a generalized quadratic '
        "encoding have a Σ⁻¹: for others use the criteria 'entropy' and 'duplicate'"
    )


def _finite_factor(layer: nn.Module) -> Tensor:
    """M in float64 on the CPU."""
    factor = _factor(layer).cpu().double()
    if not factor.isfinite().all():
        raise ValueError('layer.encoding.sqrt_precision holds values that are not finite, but a width must be finite')
    return factor


def _determinant(factor: Tensor) -> Tensor:
    (a, b), (c, d) = (row.unbind(-1) for row in factor.unbind(1))
    return a * d - b * c


def _largest_singular_value(factor: Tensor) -> Tensor:
    """s₁ of M, ``(N_h,)``: (s₁ ± s₂)² = (a ± d)² + (b ∓ c)² for det M ≥ 0, with the signs exchanged otherwise."""
    (a, b), (c, d) = (row.unbind(-1) for row in factor.unbind(1))
    return (torch.hypot(a + d, b - c) + torch.hypot(a - d, b + c)) / 2
