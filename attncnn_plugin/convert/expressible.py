"""Finds the shifts that heads can express, and values that make them a convolution (Cordonnier et al. 2020, Lemma 3).

Heads with maps P_h and matrices V_h are Σ_h P_h ⊗ V_h, a convolution is Σ_δ S_δ ⊗ W_δ with (S_δ x)_q = x_{q+δ}. Where
each S_δ is a combination Σ_h Φ_hδ P_h of the maps, V_h = Σ_δ Φ_hδ W_δ makes them equal: C20's W^SA = W^conv Φ.
"""

import copy
from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple, TypeVar, Union

import torch
from torch import Tensor, nn

from ..attention.attention_layer import AttentionLayer
from ..attention.images import ImageAttention, block_diagonal
from ..attention.tokens import GridAttention
from ..attention.window import per_axis, same_window
from .convolutions import Computed, Convolution, computed, flat_kernel
from .shift_operators import (
    check_position_only,
    check_same_queries,
    chosen_queries,
    interior_queries,
    least_squares,
    targets,
    triangle,
)

Attention = TypeVar('Attention', bound=Union[GridAttention, ImageAttention])


@dataclass(frozen=True)
class Expressibility:
    """The shifts of a kernel that lie in the span of a layer's attention maps.

    The layer can be every convolution whose weights are 0 at the missing shifts. A single one whose weights are not can
    be in the span all the same: :func:`~attncnn_plugin.convert.fit_values` finds that out.

    Attributes:
        kernel_size (tuple[int, int]): The kernel size.
        expressible, missing (list[tuple[int, int]]): The (row, column) shifts δ = k − q that can and cannot be
            expressed.
        residual (list[float]): Distance of S_δ from the span of the heads' maps P_h over all chosen queries at once,
            relative to ‖S_δ‖_F, 0 to 1, of each shift of the kernel, row by row.
        rank (int): Rank of the heads' maps over all chosen queries at once.
        tolerance (float): Residual up to which a shift is expressible.
    """

    kernel_size: Tuple[int, ...]
    expressible: List[Tuple[int, int]]
    missing: List[Tuple[int, int]]
    residual: List[float]
    rank: int
    tolerance: float

    def __str__(self) -> str:
        rows, columns = self.kernel_size
        count = f'{len(self.expressible)} of {len(self.residual)} shifts of {rows}x{columns} can be expressed'
        missing = f'; missing: {", ".join(map(str, self.missing))}' if self.missing else ''
        return f'{count}{missing}'


@torch.no_grad()
def expressible_shifts(
    layer: AttentionLayer,
    kernel_size: Union[int, Sequence[int]],
    size: Union[int, Sequence[int]],
    queries: str = 'all',
    tolerance: float = 1e-6,
) -> Expressibility:
    """Finds the shifts of a kernel that a layer can express, whatever its value matrix (C20, Lemma 3 and appendix D).

    As V_h is the same at every query, all kernels can be expressed if and only if each S_δ, over all queries at once,
    is in the span of the P_h. C20 asks the same query by query, with coefficients that may change from query to query:
    necessary, not sufficient.

    Args:
        layer (AttentionLayer): Attention by position over a grid, or an ``ImageAttention`` over two axes whose outputs
            are those of the pixels, one each.
        kernel_size (int | Sequence[int]): Size of the kernel, stride 1, ``padding='same'``.
        size (int | Sequence[int]): Height and width of the grid in tokens.
        queries (str): The queries at which the layer has to be the convolution: ``'interior'``, whose whole window lies
            inside the grid, or ``'all'``, with zero padding: S_δ is 0 where q + δ is outside, while a hard quadratic
            head attends to the nearest pixel there. Defaults to ``'all'``.
        tolerance (float): Relative residual up to which a shift is expressible, and singular value, relative to the
            largest one of maps scaled to norm 1, up to which a direction of their span is not counted. Defaults to
            1e-6.

    Raises:
        TypeError: ``layer`` is no attention of this package.
        ValueError: The scores of ``layer`` depend on content; it has other queries than the pixels; ``queries`` is
            unknown; ``tolerance`` is not between 0 and 1; no window lies inside the grid, with ``'interior'``.

    Examples:
        Heads at five of the nine shifts of a 3x3 kernel cannot express the other four:

        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=2, num_heads=5)
        >>> layer.encoding.center.data = torch.tensor([[-1.0, 0.0], [0.0, -1.0], [0.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> layer.encoding.sqrt_precision.data = torch.full((5,), 40.0)  # hard heads
        >>> expressible_shifts(layer, 3, size=(6, 8), queries='interior').missing
        [(-1, -1), (-1, 1), (1, -1), (1, 1)]
    """
    check_position_only(layer)
    size = per_axis('size', size, 2)
    check_same_queries(layer, same_window(per_axis('kernel_size', kernel_size, 2)), size)
    return expressible_shifts_of_maps(layer.exact_attention_probs(size), kernel_size, size, queries, tolerance)


@torch.no_grad()
def expressible_shifts_of_maps(
    probs: Tensor,
    kernel_size: Union[int, Sequence[int]],
    size: Union[int, Sequence[int]],
    queries: str = 'all',
    tolerance: float = 1e-6,
) -> Expressibility:
    """Finds the shifts that attention maps span, ``(N_h, H*W, H*W)`` on the CPU, as :func:`expressible_shifts` does."""
    window, size = same_window(per_axis('kernel_size', kernel_size, 2)), per_axis('size', size, 2)
    chosen = chosen_queries(window, size, queries, tolerance)
    probs, target = probs.double(), targets(window, size)
    maps, shifts = triangle(probs, target, chosen).split([len(probs), len(target)], dim=1)
    coefficients, rank, _ = least_squares(maps, shifts, tolerance)
    residual = (shifts - maps @ coefficients).norm(dim=0) / shifts.norm(dim=0).clamp_min(1)  # squared norms count
    near = residual <= tolerance
    expressible, missing = ([(row, column) for row, column in window.shifts()[some].tolist()] for some in (near, ~near))
    return Expressibility(window.kernel_size, expressible, missing, residual.tolist(), rank, tolerance)


@dataclass(frozen=True, eq=False)
class ValueFit:
    """The error of heads with fitted values as a convolution on a grid of ``size``.

    Relative errors are ‖Σ_h P_h ⊗ V_h − Σ_δ S_δ ⊗ W_δ‖/‖Σ_δ S_δ ⊗ W_δ‖ in the Frobenius norm, with V_h as stored: for
    white noise, the root mean square of the error of the outputs, relative to that of the outputs without bias.

    Attributes:
        size (tuple[int, ...]): Size of the grid that the fit is for.
        queries (str): The queries that the values were fitted at, ``'interior'`` or ``'all'``.
        shifts (Tensor): δ of every kernel position, ``(K, ndim)``.
        coefficients (Tensor): Φ, ``(N_h, K)``, float64.
        residual (Tensor): ‖S_δ − Σ_h Φ_hδ P_h‖/‖S_δ‖ at these queries, ``(K,)``, float64: what is lost of each shift.
        error (float): Relative error over all queries, border included.
        interior_error (float | None): Relative error over the queries whose window lies inside; None without any.
        rank (int): Number of directions of the maps' span that were used.
        condition (float): Condition number of the heads' matrix, whose columns are the maps at these queries, each
            scaled to norm 1: 1 for hard heads at different shifts, ``inf`` for heads that are linearly dependent.
        amplification (float): Σ_h ‖P_h‖‖V_h‖/‖Σ_δ S_δ ⊗ W_δ‖: the output can have a relative rounding error as many
            times that of the layer's dtype.
        tolerance (float): Relative error up to which the layer is called the convolution.
    """

    size: Tuple[int, ...]
    queries: str
    shifts: Tensor
    coefficients: Tensor
    residual: Tensor
    error: float
    interior_error: Optional[float]
    rank: int
    condition: float
    amplification: float
    tolerance: float

    @property
    def relative_error(self) -> float:
        """Returns the relative error over the queries of the fit."""
        if self.queries == 'all' or self.interior_error is None:
            return self.error
        return self.interior_error

    @property
    def exact(self) -> bool:
        """Returns whether the layer is the convolution at the queries of the fit, to ``tolerance``."""
        return self.relative_error <= self.tolerance

    def __str__(self) -> str:
        return (
            f'relative error {self.relative_error:.3g} at {self.queries} queries of a grid of '
            f'{"x".join(map(str, self.size))}; {len(self.coefficients)} heads of rank {self.rank}, condition number '
            f'{self.condition:.3g}, rounding errors times {self.amplification:.3g} at most'
        )


@torch.no_grad()
def fit_values(
    attention: Attention,
    conv: Convolution,
    size: Union[int, Sequence[int]],
    queries: str = 'interior',
    tolerance: float = 1e-6,
) -> Tuple[Attention, ValueFit]:
    """Gives heads, as they are, the values with which their layer is a convolution, or nearest to it (C20, Lemma 3).

    Trained, soft or learned heads keep where they look. V_h = Σ_δ Φ_hδ W_δ, where Φ is that of least squares, min
    ‖S_δ − Σ_h Φ_hδ P_h‖_F over the chosen queries. The error is 0 for every kernel if each shift is in the span of the
    heads, see :func:`~attncnn_plugin.convert.expressible_shifts`, and for some kernels otherwise.

    Args:
        attention (GridAttention | ImageAttention): Position-only attention. It is not changed. Attention dropout is
            left out.
        conv (nn.Conv1d | nn.Conv2d | nn.Conv3d): The convolution, with any dilation, groups and padding mode. Its
            outputs have to be at the queries of ``attention``: for attention over a grid stride 1 and an output of the
            size of the input.
        size (int | Sequence[int]): Size of the grid in tokens, or of the image, along each axis. Soft heads differ from
            grid to grid, near the border at least.
        queries (str): The queries at which the layer has to be the convolution: ``'interior'``, or ``'all'``, with the
            padding of ``conv``: hard heads over a grid see the nearest token there, ``padding_mode='replicate'``; for
            another one the values are a compromise. Defaults to ``'interior'``.
        tolerance (float): As of :func:`expressible_shifts`, and relative error up to which the layer is called the
            convolution. Defaults to 1e-6.

    Returns:
        tuple[Attention, ValueFit]: A copy of ``attention`` with the fitted values and the bias of ``conv``, and how
        near it comes.

    Raises:
        TypeError: ``attention`` is no attention of this package, ``conv`` is not one of the three.
        ValueError: The probabilities of ``attention`` depend on content; it has no heads, or heads with a value
            projection of their own; its axes, channels or queries are not those of ``conv``; ``queries`` is unknown;
            ``tolerance`` is not between 0 and 1; a ``size`` that is too small; weights or probabilities that are not
            finite.

    Examples:
        Nine soft heads, nearly as wide as a token:

        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=4, num_heads=9)
        >>> layer.encoding.center.data = torch.cartesian_prod(*[torch.tensor([-1.0, 0.0, 1.0])] * 2)
        >>> layer.encoding.sqrt_precision.data = torch.full((9,), 1.5)
        >>> fitted, report = fit_values(layer, nn.Conv2d(4, 8, 3, padding=1), size=(12, 12))
        >>> fitted(torch.rand(1, 12, 12, 4)).shape, report.exact, 2 < report.condition < 10
        (torch.Size([1, 12, 12, 8]), False, True)
    """
    check_position_only(attention)
    plain = computed(conv)
    window = plain.window
    if attention.num_heads == 0:
        raise ValueError('attention has num_heads=0: no values make it a convolution')
    size = per_axis('size', size, window.ndim)
    check_same_queries(attention, window, size)
    channels = attention.value_matrices().shape[-1]
    if plain.in_channels != channels:
        raise ValueError(f'conv has in_channels={plain.in_channels}, but heads of attention read {channels} channels')
    if plain.weight.is_meta or attention.value.weight.is_meta:
        raise ValueError('attention or conv is on the meta device, without values: load its weights first')
    chosen_queries(window, size, queries, tolerance)
    interior = interior_queries(window, size)
    probs = attention.exact_attention_probs(size)
    kernel = flat_kernel(plain).cpu().double()  # W, (K, F)
    if not probs.isfinite().all() or not kernel.isfinite().all():
        raise ValueError('the probabilities of attention or the weights of conv are not finite')

    target = targets(window, size)
    inside = triangle(probs, target, interior.nonzero()[:, 0])
    everywhere = triangle(probs, target, (~interior).nonzero()[:, 0], inside)
    maps, shifts = (inside if queries == 'interior' else everywhere).split(probs.shape[:1] + target.shape[:1], dim=1)
    coefficients, rank, condition = least_squares(maps, shifts, tolerance)

    dtype = attention.value.weight.dtype
    exact = coefficients @ kernel  # W^SA = W^conv Φ, (N_h, F)
    if exact.abs().max() > torch.finfo(dtype).max:
        raise ValueError(f'values of {exact.abs().max():.3g} are more than {dtype} of attention holds: scale conv')
    values = exact.to(dtype)
    layer = copy.deepcopy(attention)
    layer.value = _value_map(attention, plain, values)

    stored = values.double()
    lost = (shifts - maps @ coefficients).norm(dim=0)
    scale = (shifts @ kernel).norm()
    largest = (maps.norm(dim=0) * stored.norm(dim=1)).sum()
    return layer, ValueFit(
        size,
        queries,
        window.shifts(),
        coefficients,
        lost / shifts.norm(dim=0).clamp_min(1),  # ‖S_δ‖² counts queries: 0 for a shift that leaves the grid from all
        _relative_error(everywhere, stored, kernel),
        _relative_error(inside, stored, kernel) if interior.any() else None,
        rank,
        condition,
        (largest / scale).item() if scale > 0 else 0.0,
        tolerance,
    )


def _relative_error(triangle: Tensor, values: Tensor, kernel: Tensor) -> float:
    """Returns ‖P V − S W‖/‖S W‖, 0 for a kernel of zeros."""
    maps, shifts = triangle.split([len(values), len(kernel)], dim=1)
    wanted = shifts @ kernel
    return ((maps @ values - wanted).norm() / wanted.norm()).item() if wanted.any() else 0.0


def _value_map(attention: Union[GridAttention, ImageAttention], conv: Computed, values: Tensor) -> nn.Linear:
    """Returns the linear map of the heads with given values, ``(N_h, C_out·C_in/groups)``, and the bias of ``conv``."""
    old = attention.value.weight
    slices = block_diagonal(values.T.unflatten(0, (conv.out_channels, -1)), conv.groups)  # V_h, (N_h, C_out, C_in)
    value = nn.Linear(
        attention.num_heads * conv.in_channels,
        conv.out_channels,
        bias=conv.bias is not None,
        device=old.device,
        dtype=old.dtype,
    ).requires_grad_(old.requires_grad)
    value.weight.copy_(slices.transpose(0, 1).flatten(1))
    if conv.bias is not None:
        value.bias.copy_(conv.bias)
    return value.train(attention.training)
