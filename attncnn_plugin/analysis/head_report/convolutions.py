"""How near a layer is to convolutions, and which shifts its heads can express."""

from typing import Iterator, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...convert.shift_operators import fit_shifts, interior_queries, targets
from ...layers.linear import check_plain_linear
from ...layers.merged_patch_attention import MergedPatchAttention
from ...layers.patch_attention import PatchAttention
from ...layers.precision import at_least_float32
from .report import BestConvolution, ExpressibleShifts
from .shift_maps import Shift, ShiftMaps, same_window

KERNEL_SIZES = (3, 5)
LEAST_TOLERANCE = 1e-7  # what rounding leaves of a residual of 0, a root of a difference, is a tenth of it


class ConvolutionErrors:
    """How far Σ_h P_h ⊗ V_h, the linear map of a layer, is from convolutions Σ_δ S_δ ⊗ W_δ.

    Args:
        maps (ShiftMaps): P.
        weights (Tensor): ⟨V_h, V_g⟩ of all pairs of heads, ``(N_h, N_h)``, which is all that an error depends on.
        padding_mode (str): What S_δ finds outside of a grid; an ``ImageAttention`` has its own.
    """

    def __init__(self, maps: ShiftMaps, weights: Tensor, padding_mode: str) -> None:
        self.maps = maps
        self.weights = weights
        self.padding_mode = padding_mode if maps.window is None else maps.window.padding_mode
        self.whole = self._squared_norms(maps.probs)

    def of_kernels(self) -> Iterator[BestConvolution]:
        """The best 3x3 and 5x5 convolutions, or that of the window of an ``ImageAttention``."""
        windows = [same_window(n, self.padding_mode) for n in KERNEL_SIZES]
        for window in windows if self.maps.window is None else [self.maps.window]:
            left = self._squared_norms(left_by_shifts(self.maps.probs, targets(window, self.maps.size)))
            inside = interior_queries(window, self.maps.size)
            yield BestConvolution(
                window.kernel_size,
                self.padding_mode,
                self._relative(left, slice(None)),
                self._relative(left, inside) if inside.any() else None,
            )

    def of_shifts(self, shifts: Sequence[Shift]) -> Optional[float]:
        """The error of the best convolution by these very shifts; None if the window of the layer lacks one of them."""
        window = self.maps.window
        if window is None:
            window = same_window([2 * max(map(abs, axis)) + 1 for axis in zip(*shifts)], self.padding_mode)
        places = {tuple(shift): place for place, shift in enumerate(window.shifts().tolist())}
        if not places.keys() >= set(shifts):
            return None
        target = targets(window, self.maps.size)[[places[shift] for shift in set(shifts)]]
        return self._relative(self._squared_norms(left_by_shifts(self.maps.probs, target)), slice(None))

    def _squared_norms(self, maps: Tensor) -> Tensor:
        """‖Σ_h P_h[q, :] ⊗ V_h‖² of each query, ``(Q,)``."""
        return (maps.transpose(0, 1) @ maps.permute(1, 2, 0) * self.weights).sum((1, 2)).clamp(min=0)

    def _relative(self, left: Tensor, queries) -> float:
        left, whole = left[queries].sum(), self.whole[queries].sum()
        return (left / whole).sqrt().item() if whole > 0 else 0.0


def left_by_shifts(probs: Tensor, target: Tensor) -> Tensor:
    """E_h = P_h − Σ_δ c_{h,δ} S_δ with the c of least ‖E_h‖_F, ``(N_h, Q, K)``; for S_δ see ``targets``.

    E itself: norms from ⟨P_h, P_g⟩ less the fit's part would cancel where the fit is exact and heads outweigh another.
    """
    place = target.clamp(min=0).T.expand(len(probs), -1, -1)
    return probs.scatter_add(2, place, -fit_shifts(probs, target)[:, None] * (target >= 0).T)


def value_products(layer: nn.Module) -> Tensor:
    """⟨V_h, V_g⟩ of the matrices from input to output of each head, W^V W^O of CMHSA, ``(N_h, N_h)``, float64.

    Raises:
        RuntimeError: A linear map of ``layer`` is more than its weight.
    """
    name = (
        'out'
        if isinstance(layer, PatchAttention)
        else ('value_out' if isinstance(layer, MergedPatchAttention) else 'value')
    )
    value = _weight(layer, name).unflatten(1, (layer.num_heads, -1)).transpose(0, 1)  # V_h, (N_h, D_out, D)
    if name == 'out':
        value = value @ _weight(layer, 'value').unflatten(0, (layer.num_heads, -1))
    flat = value.flatten(1).double()
    return flat @ flat.T


def _weight(layer: nn.Module, name: str) -> Tensor:
    check_plain_linear(name, getattr(layer, name))
    return at_least_float32(getattr(layer, name).weight.detach().cpu())


def expressible_shifts_of(maps: ShiftMaps, tolerance: float) -> Iterator[ExpressibleShifts]:
    """Which shifts of 3x3 and 5x5 kernels lie in the span of the maps over the interior queries (C20, Lemma 3).

    As :func:`~attncnn_plugin.convert.expressible_shifts`, without what it says of single queries.

    Raises:
        ValueError: ``tolerance`` is not between 1e-7 and 1.
    """
    if not LEAST_TOLERANCE <= tolerance < 1:
        raise ValueError(
            f'tolerance={tolerance} must be at least {LEAST_TOLERANCE}, above what rounding leaves, and below 1'
        )
    if any(not torch.equal(queries, torch.arange(n)) for queries, n in zip(maps.queries, maps.size)):
        return  # with a stride no shift is expressed at every pixel
    for n in KERNEL_SIZES:
        if min(maps.size) < n:
            continue
        window = same_window(n)
        inside = interior_queries(window, maps.size)
        target = targets(window, maps.size)[:, inside]
        residual = _residual(maps.probs[:, inside], target, tolerance)
        shifts = list(map(tuple, window.shifts().tolist()))
        found, missing = (
            [shift for shift, left in zip(shifts, residual) if (left <= tolerance) == wanted]
            for wanted in (True, False)
        )
        yield ExpressibleShifts((n, n), tuple(found), tuple(missing), tuple(residual), tolerance)


def _residual(probs: Tensor, target: Tensor, tolerance: float) -> Tuple[float, ...]:
    """Distance of each S_δ from the span of the heads' maps, relative to ‖S_δ‖_F."""
    queries = target.shape[1]
    basis, triangle = torch.linalg.qr(probs.flatten(1).T)
    left, singular, _ = torch.linalg.svd(F.normalize(triangle, dim=0))  # each map scaled to norm 1
    kept = left[:, singular > tolerance * singular[0]]  # heads can coincide
    entries = basis.unflatten(0, (queries, -1))[torch.arange(queries), target]  # where S_δ is 1, (K, Q, N_h)
    length = entries.sum(1) @ kept / queries**0.5  # of the orthonormal directions in S_δ/‖S_δ‖_F
    return tuple((1 - length.square().sum(1)).clamp(min=0).sqrt().tolist())
