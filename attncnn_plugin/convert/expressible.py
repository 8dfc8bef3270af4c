"""Which shifts, and so which convolutions, heads can express (Cordonnier et al. 2020 (C20), Lemma 3, appendix D)."""

import itertools
from dataclasses import dataclass
from typing import FrozenSet, List, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.attention_layer import AttentionLayer
from ..attention.window import Window, per_axis, shown
from . import shift_operators
from .shift_operators import check_position_only, interior_queries, least_squares, targets, triangle


@dataclass(frozen=True)
class Kernel:
    """A kernel of ``nn.Conv2d`` with stride 1 and ``padding='same'``.

    Attributes:
        kernel_size (tuple[int, int]): Its size.
        dilation (tuple[int, int]): Its dilation, 1 along an axis with a single row or column.

    Examples:
        >>> print(Kernel((1, 3), (1, 2)), sorted(Kernel((1, 3), (1, 2)).shifts))
        1x3 dilated by 1x2 [(0, -2), (0, 0), (0, 2)]
    """

    kernel_size: Tuple[int, int]
    dilation: Tuple[int, int] = (1, 1)

    @property
    def shifts(self) -> FrozenSet[Tuple[int, int]]:
        """Its (row, column) shifts δ = k − q."""
        conv = nn.Conv2d(1, 1, self.kernel_size, padding='same', dilation=self.dilation, device='meta')
        return frozenset((row, column) for row, column in Window.of(conv).shifts().tolist())

    def __str__(self) -> str:
        size = 'x'.join(map(str, self.kernel_size))
        return size if max(self.dilation) == 1 else f'{size} dilated by {"x".join(map(str, self.dilation))}'


@dataclass(frozen=True, eq=False)
class Expressibility:
    """Which shifts of a kernel lie in the span of a layer's attention maps.

    The layer can be every convolution whose weights are 0 at the missing shifts. A single one whose weights are not can
    be in the span all the same: :func:`~attncnn_plugin.convert.fit_values` finds that out.

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
        return [(row, column) for row, column in self.shifts[~self.expressible].tolist()]

    @property
    def all_expressible(self) -> bool:
        """Whether the layer can express every convolution of the kernel size."""
        return bool(self.expressible.all())

    @property
    def kernels(self) -> List[Kernel]:
        """The kernels whose shifts can all be expressed, none within another one, the most shifts first."""
        expressible = set(map(tuple, self.shifts[self.expressible].tolist()))
        extents = [len(set(axis)) for axis in self.shifts.T.tolist()]
        axes = [
            [(1, 1)] + [(size, step) for size in range(2, n + 1) for step in range(1, (n - 1) // (size - 1) + 1)]
            for n in extents
        ]
        found = [(kernel, kernel.shifts) for kernel in (Kernel(*zip(*pair)) for pair in itertools.product(*axes))]
        found = [(kernel, shifts) for kernel, shifts in found if shifts <= expressible]
        largest = [kernel for kernel, shifts in found if not any(shifts < others for _, others in found)]
        return sorted(largest, key=lambda kernel: -len(kernel.shifts))

    def __str__(self) -> str:
        rows, columns = (len(set(axis)) for axis in self.shifts.T.tolist())
        count = f'{int(self.expressible.sum())} of {len(self.shifts)} shifts of {rows}x{columns} can be expressed'
        kernels = ', '.join(map(str, self.kernels)) or 'none'
        missing = f'; missing: {", ".join(map(str, self.missing))}' if self.missing else ''
        return f'{count}; convolutions: {kernels}{missing}'


@torch.no_grad()
def expressible_shifts(
    layer: AttentionLayer,
    kernel_size: Union[int, Sequence[int]],
    size: Union[int, Sequence[int]],
    queries: str = 'all',
    tolerance: float = 1e-6,
) -> Expressibility:
    """Finds the shifts of a kernel that a layer can express, whatever its value matrix (C20, Lemma 3 and appendix D).

    Heads with maps P_h and matrices V_h give Σ_h P_h ⊗ V_h, a convolution is Σ_δ S_δ ⊗ W_δ with (S_δ x)_q = x_{q+δ}. As
    V_h is the same at every query, all kernels can be expressed if and only if each S_δ, over all queries at once, is
    in the span of the P_h. C20 asks instead, query by query, that the unit vectors of its receptive field are in the
    span of the rows P_h[q, :], with coefficients that may change from query to query: necessary, not sufficient.

    Args:
        layer (AttentionLayer): ``QuadraticAttention``, ``GeneralizedQuadraticAttention``, ``LearnedAttention``,
            or an ``ImageAttention`` over two axes whose outputs are those of the pixels, one each.
        kernel_size (int | Sequence[int]): Size of the kernel, stride 1, ``padding='same'``.
        size (int | Sequence[int]): Height and width of the grid in tokens.
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
        TypeError: ``layer`` is no attention of this package.
        ValueError: The scores of ``layer`` depend on content; it has other queries than the pixels; ``queries`` is
            unknown; ``tolerance`` is not between 0 and 1; the grid is too small for the kernel.

    Examples:
        Heads at five of the nine shifts of a 3x3 kernel cannot express the other four:

        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=2, num_heads=5)
        >>> layer.encoding.center.data = torch.tensor([[-1.0, 0.0], [0.0, -1.0], [0.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> layer.encoding.sqrt_precision.data = torch.full((5,), 40.0)  # hard heads
        >>> expressible_shifts(layer, 3, size=(6, 8), queries='interior').missing
        [(-1, -1), (-1, 1), (1, -1), (1, 1)]

        So it is any convolution of a row or of a column of the kernel, but none of 2x2:

        >>> print(', '.join(map(str, expressible_shifts(layer, 3, size=(6, 8), queries='interior').kernels)))
        1x3, 3x1
    """
    check_position_only(layer)
    size = per_axis('size', size, 2)
    _check_queries(layer, size)
    return expressible_shifts_of_maps(layer.exact_attention_probs(size), kernel_size, size, queries, tolerance)


@torch.no_grad()
def expressible_shifts_of_maps(
    probs: Tensor,
    kernel_size: Union[int, Sequence[int]],
    size: Union[int, Sequence[int]],
    queries: str = 'all',
    tolerance: float = 1e-6,
) -> Expressibility:
    """Finds the shifts that given attention maps span, see :func:`expressible_shifts`.

    Args:
        probs (Tensor): P, ``(N_h, height*width, height*width)``, on the CPU.
        kernel_size (int | Sequence[int]): Size of the kernel.
        size (int | Sequence[int]): Height and width of the grid in tokens.
        queries (str): ``'all'`` or ``'interior'``. Defaults to ``'all'``.
        tolerance (float): Relative residual up to which a shift is expressible. Defaults to 1e-6.

    Returns:
        Expressibility: The residuals, the ranks and the missing shifts, computed in float64.

    Raises:
        ValueError: ``probs`` are not those of such a grid; see :func:`expressible_shifts` for the others.

    Examples:
        >>> identity = torch.eye(4 * 5)[None]  # one head, each query attends to itself
        >>> expressible_shifts_of_maps(identity, 1, size=(4, 5)).all_expressible
        True
    """
    if queries not in ('all', 'interior'):
        raise ValueError(f"queries={shown(queries)} is unknown: choose 'all' or 'interior'")
    if not 0 < tolerance < 1:
        raise ValueError(f'tolerance={tolerance} must be between 0 and 1')
    height, width = per_axis('size', size, 2)
    pixels = height * width
    if probs.ndim != 3 or probs.shape[1:] != (pixels, pixels):
        raise ValueError(
            f'probs have shape {tuple(probs.shape)}, but (N_h, {pixels}, {pixels}) are those of a grid of '
            f'{height}x{width}'
        )
    rows, columns = per_axis('kernel_size', kernel_size, 2)
    window = Window.of(nn.Conv2d(1, 1, (rows, columns), padding='same', device='meta'))
    chosen = _choose(window, (height, width), queries)
    probs, target = probs.double(), targets(window, (height, width))
    maps, shifts = triangle(probs, target, chosen).split([len(probs), len(target)], dim=1)
    coefficients, rank, _ = least_squares(maps, shifts, tolerance)
    residual = (shifts - maps @ coefficients).norm(dim=0) / shifts.norm(dim=0)
    chunk = max(1, shift_operators.CHUNK_ELEMENTS // (pixels * max(len(probs), len(target))))
    of_queries = [_outside_rows(probs[:, some], target[:, some], tolerance) for some in chosen.split(chunk)]
    query_residual, query_rank = (torch.cat(parts) for parts in zip(*of_queries))
    return Expressibility(window.shifts(), residual, query_residual.amax(0), rank, int(query_rank.min()), tolerance)


def _check_queries(layer: AttentionLayer, size: Tuple[int, ...]) -> None:
    window = layer.window
    if window is None:
        return
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
        least = tuple(
            window.padding_of(axis, n)[1] + 1 for axis, n in enumerate(size)
        )  # or a shift leaves the grid from every query
        chosen = torch.arange(size[0] * size[1])
    if any(n < m for n, m in zip(size, least)):
        raise ValueError(
            f'a grid of {size[0]}x{size[1]} tokens is too small for kernel_size={window.kernel_size} and '
            f'queries={queries!r}: at least {least[0]}x{least[1]}'
        )
    return chosen


def _outside_rows(probs: Tensor, target: Tensor, tolerance: float) -> Tuple[Tensor, Tensor]:
    """Returns the distance of e_{q+δ} from the span of the rows P_h[q, :], and its rank, of some queries q.

    Args:
        probs (Tensor): P, ``(N_h, Q, pixels)``.
        target (Tensor): q + δ, ``(K, Q)``, −1 outside of the grid, where the distance counts as 0.
        tolerance (float): Singular value, relative to the largest one, up to which a direction is not counted.

    Returns:
        tuple[Tensor, Tensor]: ``(Q, K)`` and ``(Q,)``.
    """
    left, singular, _ = torch.linalg.svd(F.normalize(probs.permute(1, 2, 0), dim=-2), full_matrices=False)
    kept = singular > tolerance * singular[..., :1]  # heads can coincide
    basis = left * kept[..., None, :]  # (Q, pixels, at most N_h)
    index = target.T[..., None].clamp(min=0)  # (Q, K, 1)
    unit = torch.zeros(*target.T.shape, basis.shape[1], dtype=basis.dtype).scatter(2, index, 1.0)  # e_{q+δ}
    outside = unit - basis.gather(1, index.expand(-1, -1, basis.shape[2])) @ basis.mT  # not by ‖·‖², which cancels
    return outside.norm(dim=-1) * (target.T >= 0), kept.sum(-1)
