"""Which shifts the heads of a layer can express (C20, Lemma 3)."""

from dataclasses import dataclass
from typing import List, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.image_attention import ImageAttention
from ..layers.window import Window, per_axis
from .to_conv import check_position_only, interior_queries, position_probs, targets

CHUNK_ELEMENTS = 2**21  # entries of the attention maps and shifts that are held at once, 16 MiB of float64


@dataclass(frozen=True, eq=False)
class Expressibility:
    """Which shifts of a kernel lie in the span of a layer's attention maps.

    Attributes:
        shifts (Tensor): δ = k − q of every kernel position, (row, column), ``(K, 2)``.
        residual (Tensor): Distance of S_δ from the span of the heads' maps P_h over all chosen queries at once,
            relative to ‖S_δ‖_F, ``(K,)``, 0 to 1, float64.
        query_residual (Tensor): Distance of the unit vector at q + δ from the span of the rows P_h[q, :], largest of
            the chosen queries, ``(K,)``, 0 to 1, float64: Lemma 3 as it is written. It being 0 is not enough.
        rank (int): Rank of the heads' maps over all chosen queries at once.
        query_rank (int): Smallest rank of the heads' rows of a chosen query.
        tolerance (float): Residual up to which a shift is expressible.
    """

    shifts: Tensor
    residual: Tensor
    query_residual: Tensor
    rank: int
    query_rank: int
    tolerance: float

    @property
    def expressible(self) -> Tensor:
        """Whether each shift can be expressed, ``(K,)``."""
        return self.residual <= self.tolerance

    @property
    def missing(self) -> List[Tuple[int, int]]:
        """The (row, column) shifts that cannot be expressed."""
        return [tuple(shift) for shift in self.shifts[~self.expressible].tolist()]

    @property
    def all_expressible(self) -> bool:
        """Whether the layer can express every convolution of the kernel size."""
        return bool(self.expressible.all())


@torch.no_grad()
def expressible_shifts(
    layer: nn.Module,
    kernel_size: Union[int, Sequence[int]],
    height: int,
    width: int,
    queries: str = 'all',
    tolerance: float = 1e-6,
) -> Expressibility:
    """Finds the shifts of a kernel that a layer can express, whatever its value matrix (C20, Lemma 3 and appendix D).

    Heads with maps P_h and matrices V_h give Σ_h P_h ⊗ V_h, a convolution is Σ_δ S_δ ⊗ W_δ with (S_δ x)_q = x_{q+δ}. As
    V_h is the same at every query, all kernels can be expressed if and only if each S_δ, over all queries at once, is
    in the span of the P_h. C20 asks instead, query by query, that the unit vectors of its receptive field are in the
    span of the rows P_h[q, :], with coefficients that may change from query to query: necessary, not sufficient.

    Args:
        layer (nn.Module): ``QuadraticAttention``, ``GeneralizedQuadraticAttention``, ``LearnedAttention``,
            ``ContentAttention`` with ``terms=('vr',)``, or an ``ImageAttention`` over two axes whose outputs are those
            of the pixels, one each.
        kernel_size (int | Sequence[int]): Size of the kernel, stride 1, ``padding='same'``.
        height, width (int): Size of the grid in tokens.
        queries (str): The queries at which the layer has to be the convolution.

            - ``'all'``: all of them, the convolution with zero padding: S_δ is 0 where q + δ is outside. A hard
              quadratic head attends to the nearest pixel inside there, so that it cannot express its own shift.
            - ``'interior'``: those whose whole window lies inside the grid.

            Defaults to ``'all'``.
        tolerance (float): Relative residual up to which a shift is expressible, and singular value, relative to the
            largest one of maps scaled to norm 1, up to which a direction of their span is not counted: it would take
            value matrices larger by the inverse. Defaults to 1e-6.

    Returns:
        Expressibility: The residuals, the ranks and the missing shifts.

    Raises:
        TypeError: ``layer`` has no probabilities of positions.
        ValueError: The scores of ``layer`` depend on content; it has other queries than the pixels; ``queries`` is
            unknown; ``tolerance`` is not between 0 and 1; the grid is too small for the kernel.
    """
    check_position_only(layer)
    if queries not in ('all', 'interior'):
        raise ValueError(f"queries={queries!r} is unknown: choose 'all' or 'interior'")
    if not 0 < tolerance < 1:
        raise ValueError(f'tolerance={tolerance} must be between 0 and 1')
    size = per_axis('(height, width)', (height, width), 2)
    kernel_size = per_axis('kernel_size', kernel_size, 2)
    _check_queries(layer, size)
    window = Window.of(nn.Conv2d(1, 1, kernel_size, padding='same', device='meta'))
    chosen = _choose(window, size, queries)

    target = targets(window, size)
    probs = position_probs(layer, size)
    num_heads, pixels, positions = len(probs), height * width, len(target)
    # Never the Gram matrix of [P | S], which would square the condition number: R of its QR, some queries at a time.
    triangle = probs.new_zeros(0, num_heads + positions)
    residual, rank = [], []
    for some in chosen.split(max(1, CHUNK_ELEMENTS // (pixels * (num_heads + positions)))):
        maps = probs[:, some].permute(1, 2, 0)  # P_h[q, k], (q, k, N_h)
        shifted = _unit_vectors(target[:, some], pixels)  # S_δ[q, k], (q, k, K)
        stacked = torch.cat([maps, shifted], dim=-1).flatten(0, 1)
        triangle = torch.linalg.qr(torch.cat([triangle, stacked]), mode='r').R
        some_residual, some_rank = _outside_span(shifted, maps, tolerance)
        residual.append(some_residual.amax(0))
        rank.append(some_rank.min())
    joint_residual, joint_rank = _outside_span(triangle[:, num_heads:], triangle[:, :num_heads], tolerance)
    return Expressibility(
        window.shifts(), joint_residual, torch.stack(residual).amax(0), int(joint_rank), int(min(rank)), tolerance
    )


def _check_queries(layer: nn.Module, size: Tuple[int, int]) -> None:
    if not isinstance(layer, ImageAttention):
        return
    window = layer.window
    if window.ndim != 2:
        raise ValueError(f'layer has {window.ndim} axes of pixels, but shifts are found for two')
    if any(not torch.equal(window.queries(axis, n), torch.arange(n)) for axis, n in enumerate(size)):
        raise ValueError(
            f'the queries of layer, window={window}, are not the pixels of a grid of {size[0]}x{size[1]}, one each: '
            "convert a convolution with stride 1 and padding='same'"
        )


def _choose(window: Window, size: Tuple[int, int], queries: str) -> Tensor:
    """Indices of the chosen queries."""
    if queries == 'interior':
        least = window.kernel_size
        chosen = interior_queries(window, size).nonzero()[:, 0]
    else:
        least = tuple(after + 1 for _, after in window.padding)  # or a shift leaves the grid from every query
        chosen = torch.arange(size[0] * size[1])
    if any(n < m for n, m in zip(size, least)):
        raise ValueError(
            f'a grid of {size[0]}x{size[1]} tokens is too small for kernel_size={window.kernel_size} and '
            f'queries={queries!r}: at least {least[0]}x{least[1]}'
        )
    return chosen


def _unit_vectors(target: Tensor, pixels: int) -> Tensor:
    """Unit vectors of the target pixels ``(K, Q)``, ``(Q, pixels, K)``; 0 where the target is −1."""
    vectors = torch.zeros(target.shape[1], pixels + 1, len(target), dtype=torch.float64)
    return vectors.scatter_(1, target.T[:, None] + 1, 1.0)[:, 1:]


def _outside_span(vectors: Tensor, maps: Tensor, tolerance: float) -> Tuple[Tensor, Tensor]:
    """Relative distance of ``vectors``, ``(…, M, K)``, from the span of ``maps``, ``(…, M, N_h)``, and its rank.

    Returns:
        tuple[Tensor, Tensor]: ``(…, K)``, 0 for a vector that is 0, and ``(…,)``.
    """
    left, singular, _ = torch.linalg.svd(F.normalize(maps, dim=-2), full_matrices=False)
    kept = singular > tolerance * singular[..., :1]  # heads can coincide
    basis = left * kept[..., None, :]
    vectors = F.normalize(vectors, dim=-2)
    return (vectors - basis @ (basis.mT @ vectors)).norm(dim=-2), kept.sum(-1)
