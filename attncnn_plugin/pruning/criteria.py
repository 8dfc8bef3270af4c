"""How degenerate the heads of position-only attention are (Cordonnier et al. 2020 (C20), appendix E).

A Gaussian head, quadratic or generalized quadratic, has the eigenvalues λ₁ ≥ λ₂ of Σ⁻¹ = MMᵀ, in 1/tokens². With λ₁
near 0 it attends to all keys alike, with λ₁ ≫ λ₂ to a stripe. All is computed in float64 on the CPU.
"""

import math
from typing import Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.attention_layer import AttentionLayer
from ..attention.window import per_axis
from ..convert.shift_operators import check_position_only


@torch.no_grad()
def largest_eigenvalue(layer: AttentionLayer) -> Tensor:
    """λ₁ of each Gaussian head, ``(N_h,)`` in 1/tokens², float64; 2α for the quadratic encoding.

    Raises:
        TypeError: The heads of ``layer`` are not Gaussian.
        ValueError: A width is not finite.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> largest_eigenvalue(QuadraticAttention(dim=8, num_heads=3, spread_std=0))  # at the start σ = 1
        tensor([1., 1., 1.], dtype=torch.float64)
    """
    return largest_eigenvalue_of_factor(gaussian_factor(layer))


@torch.no_grad()
def condition_number(layer: AttentionLayer) -> Tensor:
    """λ₁/λ₂ of each Gaussian head, ``(N_h,)``, float64; 1 for the quadratic encoding and for Σ⁻¹ = 0.

    Raises:
        TypeError: The heads of ``layer`` are not Gaussian.
        ValueError: A width is not finite.

    Examples:
        >>> from attncnn_plugin.attention import GeneralizedQuadraticAttention
        >>> layer = GeneralizedQuadraticAttention(dim=8, num_heads=2)
        >>> layer.encoding.sqrt_precision.data = torch.tensor([[[2.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]])
        >>> condition_number(layer)
        tensor([4., inf], dtype=torch.float64)
    """
    return condition_number_of_factor(gaussian_factor(layer))


def relative_entropy(layer: AttentionLayer, size: Union[int, Sequence[int]]) -> Tensor:
    """Entropy of each head, mean over queries, relative to that of uniform attention on a grid.

    Args:
        layer (AttentionLayer): Attention by positions alone.
        size (int | Sequence[int]): Height and width of the grid in tokens.

    Returns:
        Tensor: ``(N_h,)``, from 0, one key for each query, to 1, all keys alike; float64.

    Raises:
        TypeError: ``layer`` is no attention of this package.
        ValueError: The probabilities of ``layer`` depend on content; ``size`` is no size of a grid, or that of a single
            token; the parameters give probabilities that are not finite.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=2)
        >>> layer.encoding.sqrt_precision.data = torch.tensor([0.0, 40.0])  # uniform, hard
        >>> relative_entropy(layer, size=(8, 8)).round(decimals=3)
        tensor([1., 0.], dtype=torch.float64)
    """
    return relative_entropy_of_maps(exact_maps(layer, size))


def relative_entropy_of_maps(maps: Tensor) -> Tensor:
    """Entropy of given attention maps, mean over queries, relative to that of uniform attention.

    Args:
        maps (Tensor): Probabilities, ``(…, Q, K)``.

    Returns:
        Tensor: ``(…,)``, from 0, one key for each query, to 1, all keys alike.

    Raises:
        ValueError: There is a single key, to which every head is uniform.

    Examples:
        >>> relative_entropy_of_maps(torch.stack([torch.eye(4), torch.full((4, 4), 0.25)]))
        tensor([0., 1.])
    """
    if maps.shape[-1] < 2:
        raise ValueError('the grid is a single token, on which every head is uniform: at least two are needed')
    entropy = torch.special.entr(maps).sum(-1).mean(-1)  # −Σ_k P[q, k] log P[q, k]
    return (entropy / math.log(maps.shape[-1])).clamp(max=1)


def least_uniform_head(layer: AttentionLayer, size: Union[int, Sequence[int]]) -> int:
    """The head with the lowest :func:`relative_entropy`, the first of equal ones: the one to keep if one has to be.

    Args:
        layer (AttentionLayer): Attention by positions alone.
        size (int | Sequence[int]): Height and width of the grid in tokens.

    Raises:
        TypeError: ``layer`` is no attention of this package.
        ValueError: ``layer`` has no heads, or as :func:`relative_entropy`.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=3)
        >>> layer.encoding.sqrt_precision.data = torch.tensor([0.1, 2.0, 0.0])
        >>> least_uniform_head(layer, size=(8, 8))
        1
    """
    check_position_only(layer)
    if layer.num_heads == 0:
        raise ValueError('layer has num_heads=0, but at least one head is needed to keep one')
    return int(relative_entropy(layer, size).argmin())


def exact_maps(layer: AttentionLayer, size: Union[int, Sequence[int], None]) -> Tensor:
    """The probabilities of every query for every key of a grid, ``(N_h, H*W, H*W)``, float64 on the CPU.

    Raises:
        TypeError: ``layer`` is no attention of this package.
        ValueError: The probabilities of ``layer`` depend on content; ``size`` is no size of a grid; the parameters give
            probabilities that are not finite.
    """
    check_position_only(layer)
    if size is None:
        raise ValueError('size=None, but attention maps are those of a grid: give its height and width in tokens')
    return check_finite_maps(layer.exact_attention_probs(per_axis('size', size, 2)))


def check_finite_maps(maps: Tensor) -> Tensor:
    """The maps, if all their values are finite."""
    if not maps.isfinite().all():
        raise ValueError('the attention maps of layer hold values that are not finite: its parameters must be finite')
    return maps


def map_distances(maps: Tensor) -> Tensor:
    """Total-variation distances ½ Σ_k |P_h[q, k] − P_g[q, k]| of all pairs of maps, mean over queries.

    Args:
        maps (Tensor): ``(N_h, Q, K)``.

    Returns:
        Tensor: ``(N_h, N_h)``, 0 to 1.

    Examples:
        >>> map_distances(torch.stack([torch.eye(4), torch.full((4, 4), 0.25)]))
        tensor([[0.0000, 0.7500],
                [0.7500, 0.0000]])
    """
    distances = maps.new_zeros(len(maps), len(maps))
    first, second = torch.triu_indices(len(maps), len(maps), offset=1)
    distances[first, second] = F.pdist(maps.flatten(1), p=1) / (2 * maps.shape[1])
    return distances + distances.T


def gaussian_factor(layer: nn.Module) -> Tensor:
    """M with Σ⁻¹ = MMᵀ of each head, ``(N_h, ndim, ndim)``, at least float32, differentiable.

    Raises:
        TypeError: The heads of ``layer`` are not Gaussian.
    """
    heads = layer.gaussian_heads() if isinstance(layer, AttentionLayer) else None
    if heads is None:
        raise TypeError(
            f'layer is a {type(layer).__name__}, but only heads with a quadratic or a generalized quadratic '
            "encoding have a Σ⁻¹: for others use the criteria 'entropy' and 'duplicate'"
        )
    return heads.factor


def largest_eigenvalue_of_factor(factor: Tensor) -> Tensor:
    """λ₁ of Σ⁻¹ = MMᵀ, ``(N_h,)`` in float64, for given M, ``(N_h, ndim, ndim)``."""
    largest, _ = _singular_values(factor)
    return largest.square()


def condition_number_of_factor(factor: Tensor) -> Tensor:
    """The largest eigenvalue of Σ⁻¹ = MMᵀ over the smallest, 1 for 0, for given M, ``(N_h, ndim, ndim)``."""
    largest, smallest = _singular_values(factor)
    return torch.where(largest > 0, (largest / smallest).square(), 1.0)


def determinant(factor: Tensor) -> Tensor:
    """The determinant of M of each head over two axes, ``(N_h,)``."""
    (a, b), (c, d) = (row.unbind(-1) for row in factor.unbind(1))
    return a * d - b * c


def _singular_values(factor: Tensor) -> Tuple[Tensor, Tensor]:
    """The largest and the smallest singular value of M, in float64 on the CPU."""
    if not factor.isfinite().all():
        raise ValueError('the widths of the heads hold values that are not finite, but a width must be finite')
    factor = factor.detach().cpu().double()
    if factor.shape[-1] != 2:
        values = torch.linalg.svdvals(factor)
        return values[:, 0], values[:, -1]
    # (s₁ ± s₂)² = (a ± d)² + (b ∓ c)² for det M ≥ 0, with the signs exchanged otherwise.
    (a, b), (c, d) = (row.unbind(-1) for row in factor.unbind(1))
    largest = (torch.hypot(a + d, b - c) + torch.hypot(a - d, b + c)) / 2
    # s₁ s₂ = |det M|. The products of float32 entries are exact in float64: a singular M has the determinant 0.
    return largest, determinant(factor).abs() / largest
