"""Kinds of layers, their nearest convolutions, and shifts that heads can express (Cordonnier et al. 2020, Lemma 3).

A layer of position-only attention is the linear map Σ_h P_h ⊗ V_h, of each head's probabilities and of its matrix from
input to output. A convolution is Σ_δ S_δ ⊗ W_δ, of shifts (S_δ x)_q = x_{q+δ} and of the kernel's slices.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Iterator, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..attention.window import Window, same_window
from ..convert.expressible import Expressibility, expressible_shifts_of_maps, fit_shifts, interior_queries, targets
from .shift_statistics import Shift, ShiftMaps

KERNEL_SIZES = (3, 5)
EXACT = 1e-6  # relative error below which a convolution is the layer, and is written as 0


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

    kernel_size: Tuple[int, ...]
    padding_mode: str
    error: float
    interior_error: Optional[float]


class ConvolutionErrors:
    """Errors of the convolutions nearest to Σ_h P_h ⊗ V_h, in the Frobenius norm.

    With V = L·O, V_h as row h and the rows of O orthonormal, the norm of Σ_h E_h ⊗ V_h is that of the maps Σ_h L_hr E_h
    together: each r is an output of its own. So P is replaced by these maps of outputs, and each fitted by shifts.

    Args:
        maps (ShiftMaps): P.
        padding_mode (str): Padding mode of ``nn.Conv2d``, for the shifts that leave a grid; an ``ImageAttention`` has
            that of its window.
        values (Tensor, optional): V_h, ``(N_h, D_out, D)``. Defaults to heads with an output each, of equal weight.

    Examples:
        >>> from attncnn_plugin.analysis import MeanAttention
        >>> uniform = ShiftMaps(MeanAttention(torch.full((1, 36, 36), 1 / 36), (6, 6)))
        >>> errors = ConvolutionErrors(uniform, 'replicate')
        >>> [(best.kernel_size, round(best.error, 3)) for best in errors.of_kernels]
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

    @cached_property
    def of_kernels(self) -> Tuple[BestConvolution, ...]:
        """The best 3x3 and 5x5 convolutions, or that of the window of an ``ImageAttention``."""
        if self.window is not None:
            return (self._best(self.window),)
        return tuple(self._best(same_window((n, n), self.padding_mode)) for n in KERNEL_SIZES)

    def _best(self, window: Window) -> BestConvolution:
        """Returns the best convolution with a window."""
        left, inside = self._left_by_shifts(targets(window, self.size)), interior_queries(window, self.size)
        interior = _relative(left[inside], self.whole[inside]) if inside.any() else None
        return BestConvolution(window.kernel_size, self.padding_mode, _relative(left, self.whole), interior)

    def of_shifts(self, shifts: Sequence[Shift]) -> Optional[float]:
        """Returns the error of the best convolution with only these shifts; None if the window lacks one."""
        target = []
        for shift in set(shifts):  # a 3x3 kernel dilated by |δ| has the shift δ
            window = self.window or same_window((3, 3), self.padding_mode, (abs(shift[0]), abs(shift[1])))
            if list(shift) not in (places := window.shifts().tolist()):
                return None
            target.append(targets(window, self.size)[places.index(list(shift))])
        return _relative(self._left_by_shifts(torch.stack(target)), self.whole)

    def _left_by_shifts(self, target: Tensor) -> Tensor:
        """Computes ‖Σ_h E_h[q, :] ⊗ V_h‖² of each query, where E = P − Σ_δ c_δ S_δ has the least norm, ``(Q,)``.

        Of E itself: a norm as that of P less that of the fit would cancel where the fit is exact.
        """
        place = target.clamp(min=0).T.expand(len(self.outputs), -1, -1)
        fit = fit_shifts(self.outputs, target)[:, None] * (target >= 0).T  # at −1 there is only padding
        return _squared_norms(self.outputs.scatter_add(2, place, -fit))


def _squared_norms(outputs: Tensor) -> Tensor:
    """Computes ‖·‖² of each query, ``(Q,)``, for ``(outputs, Q, K)``."""
    return torch.linalg.vector_norm(outputs, dim=(0, 2)).square()


def _relative(left: Tensor, whole: Tensor) -> float:
    """Returns the root of Σ left / Σ whole; 0 for a layer that is 0."""
    return (left.sum() / whole.sum()).sqrt().item() if whole.any() else 0.0


def expressible_kernels(maps: ShiftMaps) -> Iterator[Expressibility]:
    """Finds the shifts of 3x3 and 5x5 kernels in the span of the maps over the interior queries (C20, Lemma 3).

    Kernels larger than the grid are left out, and both where the queries are not the pixels: with a stride no shift is
    expressed at every pixel.

    Examples:
        >>> from attncnn_plugin.analysis import MeanAttention
        >>> hard = ShiftMaps(MeanAttention(torch.stack([torch.eye(36), torch.eye(36).roll(1, dims=1)]), (6, 6)))
        >>> [kernel.expressible for kernel in expressible_kernels(hard)]
        [[(0, 0), (0, 1)], [(0, 0), (0, 1)]]
    """
    if any(not torch.equal(queries, torch.arange(n, device='cpu')) for queries, n in zip(maps.queries, maps.size)):
        return
    for n in KERNEL_SIZES:
        if min(maps.size) >= n:
            yield expressible_shifts_of_maps(maps.probs, n, maps.size, queries='interior')


@dataclass(frozen=True)
class LayerKind:
    """The kind of a layer by what its heads form together; as a string, in words.

    Attributes:
        kind (str): One of

            - ``'convolution'``: all heads are hard, on the shifts of a rectangular window, or one of the best
              convolutions leaves a relative error below 1e-6 on a grid with a query whose whole window is inside.
            - ``'dilated'``: the same, but there are holes between the shifts, all of the same size.
            - ``'sparse'``: all heads are hard, on some shifts of a window only.
            - ``'mixture'``: anything else.
            - ``'empty'``: there are no heads.
        hard, soft, uniform (int): Number of heads of each kind, see :class:`.report.HeadStatistics`.
        num_shifts (int | None): Number of different shifts of the hard heads; None where they are not named.
        kernel_size, dilation, offset (tuple[int, int] | None): The window, see :func:`lattice_of`; None for a mixture.
        stride (tuple[int, int]): Of the queries.
        error (float | None): Relative error of the best convolution with these shifts, see
            :class:`.nearest_convolution.BestConvolution`; None for a mixture.
    """

    kind: str
    hard: int = 0
    soft: int = 0
    uniform: int = 0
    num_shifts: Optional[int] = None
    kernel_size: Optional[Tuple[int, ...]] = None
    dilation: Optional[Tuple[int, ...]] = None
    offset: Optional[Shift] = None
    stride: Tuple[int, ...] = (1, 1)
    error: Optional[float] = None

    def __str__(self) -> str:
        if self.kind == 'empty':
            return 'no heads: the layer is its bias'
        if self.kernel_size is None or self.dilation is None or self.error is None:
            counts = [(self.hard, 'hard'), (self.soft, 'soft'), (self.uniform, 'uniform')]
            return f'mixture, {", ".join(f"{n} {name}" for n, name in counts if n)}'
        name = f'sparse convolution, {self.num_shifts} shifts of' if self.kind == 'sparse' else 'one convolution,'
        words = [f'{name} {size_text(self.kernel_size)}', f'error {error_text(self.error)}']
        if max(self.dilation) > 1:
            steps = {step for step, n in zip(self.dilation, self.kernel_size) if n > 1}
            words.append(f'dilated by {steps.pop() if len(steps) == 1 else size_text(self.dilation)}')
        if max(self.stride) > 1:
            words.append(f'stride {self.stride[0] if len(set(self.stride)) == 1 else size_text(self.stride)}')
        if self.offset != (0, 0):
            words.append(f'centred at {self.offset}')
        if self.soft + self.uniform:
            words.append(f'by {self.hard} hard, {self.soft} soft and {self.uniform} uniform heads')
        return ', '.join(words)


def kind_of_layer(kinds: Sequence[str], nearest: Sequence[Shift], errors: ConvolutionErrors) -> LayerKind:
    """Returns the kind of a layer by the kinds and the nearest shifts of its heads, and by its nearest convolutions."""
    window = errors.window or same_window((1, 1))
    hard, soft, uniform = (kinds.count(kind) for kind in ('hard', 'soft', 'uniform'))
    exact = next((best for best in errors.of_kernels if best.error < EXACT and best.interior_error is not None), None)
    error = errors.of_shifts(nearest) if hard == len(kinds) else None
    num_shifts, full, offset = None, True, (0, 0)
    # The small rest of the heads of an ImageAttention lies in its window: it is a part of the kernel.
    if error is not None and (error < EXACT or exact is None or errors.window is None):
        kernel_size, dilation, offset, full = lattice_of(nearest)
        num_shifts = len(set(nearest))
    elif exact is not None:
        kernel_size, error = exact.kernel_size, exact.error
        dilation = tuple(step if n > 1 else 1 for step, n in zip(window.dilation, kernel_size))
    else:
        return LayerKind('mixture', hard, soft, uniform, stride=window.stride)
    kind = 'sparse' if not full else 'dilated' if max(dilation) > 1 else 'convolution'
    return LayerKind(kind, hard, soft, uniform, num_shifts, kernel_size, dilation, offset, window.stride, error)


def lattice_of(shifts: Sequence[Shift]) -> Tuple[Tuple[int, ...], Tuple[int, ...], Any, bool]:
    """Returns the least lattice that holds some shifts: a full one, or their bounding box with dilation 1.

    These are its kernel size, its dilation, its place relative to that of ``nn.Conv2d`` with ``padding='same'``, and
    whether the shifts are all of it.

    Examples:
        >>> lattice_of([(0, -2), (0, 0), (0, 2)])
        ((1, 3), (1, 2), (0, 0), True)
        >>> lattice_of([(0, 0), (1, 1)])
        ((2, 2), (1, 1), (0, 0), False)
    """
    axes = [sorted(set(axis)) for axis in zip(*shifts)]
    steps = [values[1] - values[0] if len(values) > 1 else 1 for values in axes]
    even = [values == list(range(values[0], values[-1] + 1, step)) for values, step in zip(axes, steps)]
    full = all(even) and len(set(shifts)) == len(axes[0]) * len(axes[1])
    steps = steps if full else [1, 1]
    sizes = [(values[-1] - values[0]) // step + 1 for values, step in zip(axes, steps)]
    offsets = [values[0] + step * (n - 1) // 2 for values, step, n in zip(axes, steps, sizes)]
    return tuple(sizes), tuple(steps), tuple(offsets), full


def size_text(size: Sequence[int]) -> str:
    """Returns a size in words, such as 3x5."""
    return 'x'.join(map(str, size))


def error_text(error: float) -> str:
    """Returns three digits of an error, and 0 for one that rounding leaves."""
    return '0' if error < EXACT else f'{error:.3g}'
