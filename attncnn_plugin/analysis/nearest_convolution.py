"""How near a layer is to a convolution, and which shifts its heads can express (Cordonnier et al. 2020, Lemma 3).

A layer of position-only attention is the linear map Σ_h P_h ⊗ V_h, of each head's probabilities and of its matrix from
input to output. A convolution is Σ_δ S_δ ⊗ W_δ, of shifts (S_δ x)_q = x_{q+δ} and of the kernel's slices.
"""

from dataclasses import dataclass
from typing import Iterator, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..convert.expressible import expressible_shifts_of_maps
from ..convert.shift_operators import fit_shifts, interior_queries, targets
from .shift_statistics import Shift, ShiftMaps, same_window

KERNEL_SIZES = (3, 5)
LEAST_TOLERANCE = 1e-7  # what rounding leaves of a residual of 0 is a tenth of it


@dataclass(frozen=True)
class BestConvolution:
    """The convolution nearest to a layer, that of :func:`~attncnn_plugin.convert.mhsa_to_conv`.

    The attention without its bias is a linear map A, and the convolution a linear map C. The error is
    ‖A − C‖_F / ‖A‖_F: for white noise, the root mean square of the difference of the outputs relative to that of the
    attention's output.

    Attributes:
        kernel_size (tuple[int, int]): Its kernel size.
        padding_mode (str): Its padding mode.
        error (float): The error over all queries.
        interior_error (float | None): The error over the queries whose window is in the grid; None without any.
    """

    kernel_size: Shift
    padding_mode: str
    error: float
    interior_error: Optional[float]


@dataclass(frozen=True)
class ExpressibleShifts:
    """The shifts of a kernel that the layer can express at interior queries (C20, Lemma 3).

    See :func:`~attncnn_plugin.convert.expressible_shifts`.

    Attributes:
        kernel_size (tuple[int, int]): The kernel size.
        expressible, missing (tuple[tuple[int, int], ...]): The (row, column) shifts that can and cannot be expressed.
        residual (tuple[float, ...]): Distance of each shift, row by row, from what the heads span, 0 to 1.
        tolerance (float): Residual up to which a shift is expressible.
    """

    kernel_size: Shift
    expressible: Tuple[Shift, ...]
    missing: Tuple[Shift, ...]
    residual: Tuple[float, ...]
    tolerance: float


class ConvolutionErrors:
    """How far Σ_h P_h ⊗ V_h is from the nearest convolutions, in the Frobenius norm.

    With V = L·O, V_h as row h and the rows of O orthonormal, the norm of Σ_h E_h ⊗ V_h is that of the maps Σ_h L_hr E_h
    together: each r is an output of its own. So P is replaced by these maps of outputs, and each fitted by shifts.

    Args:
        maps (ShiftMaps): P.
        padding_mode (str): Padding mode of ``nn.Conv2d``, for the shifts that leave a grid; an ``ImageAttention`` has
            that of its window.
        values (Tensor, optional): V_h, ``(N_h, D_out, D)``. Defaults to heads with an output each, of equal weight.

    Examples:
        >>> from attncnn_plugin.analysis import AttentionMaps
        >>> uniform = ShiftMaps(AttentionMaps(torch.full((1, 36, 36), 1 / 36), (6, 6)))
        >>> errors = ConvolutionErrors(uniform, 'replicate')
        >>> [(best.kernel_size, round(best.error, 3)) for best in errors.of_kernels()]
        [((3, 3), 0.911), ((5, 5), 0.838)]
        >>> round(errors.of_shifts([(0, 0), (0, 1)]), 3)
        0.976
    """

    def __init__(self, maps: ShiftMaps, padding_mode: str, values: Optional[Tensor] = None) -> None:
        self.size = maps.size
        self.window = maps.window
        self.padding_mode = padding_mode if maps.window is None else maps.window.padding_mode
        self.outputs = maps.probs
        if values is not None:
            triangle = torch.linalg.qr(values.detach().cpu().double().flatten(1).T, mode='r').R  # Lᵀ
            self.outputs = torch.tensordot(triangle, maps.probs, dims=1)  # (≤ N_h, Q, height*width)
        self.whole = _squared_norms(self.outputs)

    def of_kernels(self) -> Iterator[BestConvolution]:
        """Yields the best 3x3 and 5x5 convolutions, or that of the window of an ``ImageAttention``."""
        windows = (
            [same_window((n, n), self.padding_mode) for n in KERNEL_SIZES] if self.window is None else [self.window]
        )
        for window in windows:
            left = self._left_by_shifts(targets(window, self.size))
            inside = interior_queries(window, self.size)
            yield BestConvolution(
                kernel_size=(window.kernel_size[0], window.kernel_size[1]),
                padding_mode=self.padding_mode,
                error=_relative(left, self.whole),
                interior_error=_relative(left[inside], self.whole[inside]) if inside.any() else None,
            )

    def of_shifts(self, shifts: Sequence[Shift]) -> Optional[float]:
        """Returns the error of the best convolution with these shifts alone; None if the window of the layer lacks one.

        Args:
            shifts (Sequence[tuple[int, int]]): (Row, column) in tokens, at least one.
        """
        if self.window is None:
            target = torch.stack([_targets_of_shift(shift, self.size, self.padding_mode) for shift in set(shifts)])
        else:
            places = {tuple(shift): place for place, shift in enumerate(self.window.shifts().tolist())}
            if not places.keys() >= set(shifts):
                return None
            target = targets(self.window, self.size)[[places[shift] for shift in set(shifts)]]
        return _relative(self._left_by_shifts(target), self.whole)

    def _left_by_shifts(self, target: Tensor) -> Tensor:
        """‖Σ_h E_h[q, :] ⊗ V_h‖² of each query, where E = P − Σ_δ c_δ S_δ has the least norm, ``(Q,)``.

        Of E itself: a norm as that of P less that of the fit would cancel where the fit is exact.
        """
        place = target.clamp(min=0).T.expand(len(self.outputs), -1, -1)
        fit = fit_shifts(self.outputs, target)[:, None] * (target >= 0).T  # at −1 there is only padding
        return _squared_norms(self.outputs.scatter_add(2, place, -fit))


def _squared_norms(outputs: Tensor) -> Tensor:
    """‖·‖² of each query, ``(Q,)``, for ``(outputs, Q, K)``."""
    return torch.linalg.vector_norm(outputs, dim=(0, 2)).square()


def _relative(left: Tensor, whole: Tensor) -> float:
    """The root of Σ left / Σ whole; 0 for a layer that is 0."""
    return (left.sum() / whole.sum()).sqrt().item() if whole.any() else 0.0


def _targets_of_shift(shift: Shift, size: Shift, padding_mode: str) -> Tensor:
    """The pixel that each query of a grid sees at a shift, ``(Q,)``."""
    # A 3x3 kernel dilated by |δ| has the shift δ.
    window = same_window((3, 3), padding_mode, dilation=(max(abs(shift[0]), 1), max(abs(shift[1]), 1)))
    return targets(window, size)[window.shifts().tolist().index(list(shift))]


def expressible_kernels(maps: ShiftMaps, tolerance: float) -> Iterator[ExpressibleShifts]:
    """Finds the shifts of 3x3 and 5x5 kernels in the span of the maps over the interior queries (C20, Lemma 3).

    Kernels larger than the grid are left out, and both where the queries are not the pixels: with a stride no shift is
    expressed at every pixel.

    Args:
        maps (ShiftMaps): The maps.
        tolerance (float): Residual up to which a shift is expressible.

    Raises:
        ValueError: ``tolerance`` is not at least 1e-7 and below 1.

    Examples:
        >>> from attncnn_plugin.analysis import AttentionMaps
        >>> hard = ShiftMaps(AttentionMaps(torch.stack([torch.eye(36), torch.eye(36).roll(1, dims=1)]), (6, 6)))
        >>> [kernel.expressible for kernel in expressible_kernels(hard, 1e-6)]
        [((0, 0), (0, 1)), ((0, 0), (0, 1))]
    """
    if not LEAST_TOLERANCE <= tolerance < 1:
        raise ValueError(
            f'tolerance={tolerance} must be at least {LEAST_TOLERANCE}, above what rounding leaves, and below 1'
        )
    if any(not torch.equal(queries, torch.arange(n)) for queries, n in zip(maps.queries, maps.size)):
        return
    for n in KERNEL_SIZES:
        if min(maps.size) < n:
            continue
        found = expressible_shifts_of_maps(maps.probs, n, maps.size, queries='interior', tolerance=tolerance)
        shifts = [(row, column) for row, column in found.shifts.tolist()]
        yield ExpressibleShifts(
            kernel_size=(n, n),
            expressible=tuple(shift for shift, yes in zip(shifts, found.expressible.tolist()) if yes),
            missing=tuple(found.missing),
            residual=tuple(found.residual.tolist()),
            tolerance=tolerance,
        )
