"""The nearest convolutions of a layer, and the kernels that its heads span (Cordonnier et al. 2020, Lemma 3).

A layer of position-only attention is the linear map Σ_h P_h ⊗ V_h, of each head's probabilities and of its matrix from
input to output. A convolution is Σ_δ S_δ ⊗ W_δ, of shifts (S_δ x)_q = x_{q+δ} and of the kernel's slices.
"""

from dataclasses import dataclass, replace
from typing import Iterator, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..attention.window import same_window
from ..convert.expressible import Expressibility, expressible_shifts_of_maps, fit_shifts, targets
from .shift_statistics import ShiftMaps

KERNEL_SIZES = (3, 5)
EXACT = 1e-6  # relative error below which a convolution is the layer, and is written as 0


@dataclass(frozen=True)
class NearestConvolution:
    """The convolution nearest to a layer, that of :func:`~attncnn_plugin.convert.mhsa_to_conv`; as a string, in words.

    The attention without its bias is a linear map A, and the convolution a linear map C. The error is
    ‖A − C‖_F / ‖A‖_F: for white noise, the root mean square of the difference of the outputs relative to that of the
    attention's output.

    Attributes:
        kernel_size, dilation, stride (tuple[int, int]): Its window.
        padding_mode (str): Its padding mode.
        error (float): The error over all queries.
        interior_error (float): The error over the queries whose window is in the grid.
    """

    kernel_size: Tuple[int, ...]
    dilation: Tuple[int, ...]
    stride: Tuple[int, ...]
    padding_mode: str
    error: float
    interior_error: float

    def __str__(self) -> str:
        words = f'{size_text(self.kernel_size)} convolution'
        words += f' dilated by {size_text(self.dilation)}' if max(self.dilation) > 1 else ''
        words += f' with stride {size_text(self.stride)}' if max(self.stride) > 1 else ''
        return f'{words}, error {error_text(self.error)}'


def nearest_convolutions(
    maps: ShiftMaps, padding_mode: str, values: Optional[Tensor] = None
) -> Iterator[NearestConvolution]:
    """Finds the 3x3 and the 5x5 convolution nearest to Σ_h P_h ⊗ V_h, or that with the window of an ``ImageAttention``.

    Kernels larger than the grid are left out. With V = L·O, V_h as row h and the rows of O orthonormal, the norm of
    Σ_h E_h ⊗ V_h is that of the maps Σ_h L_hr E_h together: each r is an output of its own. So P is replaced by these
    maps of outputs, and each fitted by shifts.

    Args:
        maps (ShiftMaps): P.
        padding_mode (str): Padding mode of ``nn.Conv2d``, for the shifts that leave a grid; an ``ImageAttention`` has
            that of its window.
        values (Tensor, optional): V_h, ``(N_h, D_out, D)``. Defaults to heads with an output each, of equal weight.

    Examples:
        >>> from attncnn_plugin.analysis import MeanAttention
        >>> uniform = ShiftMaps(MeanAttention(torch.full((1, 36, 36), 1 / 36), (6, 6)))
        >>> print(*nearest_convolutions(uniform, 'replicate'), sep='; ')
        3x3 convolution, error 0.911; 5x5 convolution, error 0.838
    """
    outputs = maps.probs
    if values is not None:
        triangle = torch.linalg.qr(values.detach().cpu().double().flatten(1).T, mode='r').R  # Lᵀ
        outputs = torch.tensordot(triangle, maps.probs, dims=1)  # (≤ N_h, Q, height*width)
    whole = _squared_norms(outputs)
    for window in [same_window((n, n), padding_mode) for n in KERNEL_SIZES] if maps.window is None else [maps.window]:
        target = targets(window, maps.size)
        inside = (targets(replace(window, padding_mode='zeros'), maps.size) >= 0).all(0)
        if inside.any():
            # Of what is left itself: a norm as that of P less that of the fit would cancel where the fit is exact.
            fit = fit_shifts(outputs, target)[:, None] * (target >= 0).T  # at −1 there is only padding
            place = target.clamp(min=0).T.expand(len(outputs), -1, -1)
            left = _squared_norms(outputs.scatter_add(2, place, -fit))
            errors = _relative(left, whole), _relative(left[inside], whole[inside])
            yield NearestConvolution(window.kernel_size, window.dilation, window.stride, window.padding_mode, *errors)


def _squared_norms(outputs: Tensor) -> Tensor:
    """Computes ‖·‖² of each query, ``(Q,)``, for ``(outputs, Q, K)``."""
    return torch.linalg.vector_norm(outputs, dim=(0, 2)).square()


def _relative(left: Tensor, whole: Tensor) -> float:
    """Returns the root of Σ left / Σ whole; 0 for a layer that is 0."""
    return (left.sum() / whole.sum()).sqrt().item() if whole.any() else 0.0


def spanned_kernels(maps: ShiftMaps) -> Iterator[Expressibility]:
    """Finds how near the maps come to 3x3 and 5x5 kernels over the interior queries (C20, Lemma 3).

    Kernels larger than the grid are left out, and both where the queries are not the pixels: with a stride no shift is
    expressed at every pixel.

    Examples:
        >>> from attncnn_plugin.analysis import MeanAttention
        >>> hard = ShiftMaps(MeanAttention(torch.stack([torch.eye(36), torch.eye(36).roll(1, dims=1)]), (6, 6)))
        >>> [kernel.expressible for kernel in spanned_kernels(hard)]
        [[(0, 0), (0, 1)], [(0, 0), (0, 1)]]
    """
    whole = all(torch.equal(own, torch.arange(n, device='cpu')) for own, n in zip(maps.queries, maps.size))
    for n in KERNEL_SIZES:
        if whole and min(maps.size) >= n:
            yield expressible_shifts_of_maps(maps.probs, n, maps.size, queries='interior')


def size_text(size: Sequence[int]) -> str:
    """Returns a size in words, such as 3x5."""
    return 'x'.join(map(str, size))


def error_text(error: float) -> str:
    """Returns three digits of an error, and 0 for one that rounding leaves."""
    return '0' if error < EXACT else f'{error:.3g}'
