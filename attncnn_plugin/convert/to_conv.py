"""Position-only attention as a convolution: the converse of C20, Theorem 1."""

import copy
import math
from dataclasses import dataclass
from typing import Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from ..layers.image_attention import ImageAttention
from ..layers.window import Window, per_axis


@dataclass(frozen=True, eq=False)
class ConvFit:
    """How well a convolution replaces an attention layer on a grid of ``size``.

    With E_h = P_h − Σ_δ c_{h,δ} S_δ, what the fit leaves of head h, and V_h, the slice of its value matrix, output
    error and input of a query q satisfy

        ‖error_q‖₂ ≤ Σ_h ‖E_h[q, :]‖₁ ‖V_h‖₂ · max_k ‖x_k‖₂

    for every input of this size; a bound is the largest such factor of max_k ‖x_k‖₂. It is for exact arithmetic: the
    rounding of the layer's dtype comes on top.

    Attributes:
        size (tuple[int, ...]): Size of the grid that the fit is for and that the bounds hold at.
        shifts (Tensor): δ of every kernel position, ``(K, ndim)``.
        coefficients (Tensor): c_{h,δ}, ``(N_h, K)``, float64.
        residual (Tensor): ‖E_h‖_F / ‖P_h‖_F of each head, ``(N_h,)``, float64.
        bound (float): Bound for all queries.
        interior_bound (float | None): Bound for the queries whose window lies inside the grid, None without any.
    """

    size: Tuple[int, ...]
    shifts: Tensor
    coefficients: Tensor
    residual: Tensor
    bound: float
    interior_bound: Optional[float]


@torch.no_grad()
def mhsa_to_conv(
    layer: nn.Module,
    kernel_size: Union[int, Sequence[int]],
    size: Union[int, Sequence[int], None] = None,
    padding_mode: Optional[str] = None,
) -> Tuple[nn.Module, ConvFit]:
    """Turns attention that depends on positions alone into the convolution that is nearest to it.

    Each head's probabilities P_h are fitted by shifts, min_c ‖P_h − Σ_δ c_{h,δ} S_δ‖_F with (S_δ x)_q = x_{q+δ}, and
    the kernel is W_δ = Σ_h c_{h,δ} V_h. Hard heads whose shifts lie in the kernel are fitted exactly: at the border a
    quadratic one attends to the nearest pixel inside, which is replicate padding. Where several kernels fit equally
    well, on a grid with no query whose whole window lies inside, the smallest coefficients are taken. Attention dropout
    is left out.

    Args:
        layer (nn.Module): One of

            - position-only attention over a grid: ``QuadraticAttention``, ``GeneralizedQuadraticAttention``,
              ``LearnedAttention``, or ``ContentAttention`` with ``terms=('vr',)``. The result maps ``(B, D, H, W)`` to
              ``(B, D_out, H, W)``, with stride 1 and ``padding='same'``.
            - an ``ImageAttention``, such as ``conv_to_mhsa`` returns. The result has its stride, dilation and padding.
        kernel_size (int | Sequence[int]): Size of the kernel along each axis, odd or even; for an ``ImageAttention``
            that of its window.
        size (int | Sequence[int], optional): Size of the grid along each axis, on which the heads are compared with
            shifts. Defaults to 16 pixels an axis, 8 for three axes, or more where a whole window needs them.
        padding_mode (str, optional): ``'zeros'``, ``'replicate'``, ``'reflect'`` or ``'circular'``. Defaults to
            ``'replicate'``; an ``ImageAttention`` has its own, the only one allowed.

    Returns:
        tuple[nn.Module, ConvFit]: The ``nn.Conv2d`` (``nn.Conv1d``, ``nn.Conv3d`` for an ``ImageAttention`` with as
        many axes), groups 1, in the layer's dtype, device and mode, and how well it fits.

    Raises:
        TypeError: ``layer`` has no probabilities of positions.
        ValueError: The scores of ``layer`` depend on content; a ``kernel_size``, a ``padding_mode`` or a padding that
            does not go with ``layer``; a ``size`` that is too small for the window or the padding mode.
    """
    check_position_only(layer)
    make = _conv_of_image if isinstance(layer, ImageAttention) else _conv_of_grid
    conv = make(layer, kernel_size, padding_mode)
    window = Window.of(conv)
    size = per_axis('size', _default_size(window) if size is None else size, window.ndim)
    target = targets(window, size)
    probs = position_probs(layer, size)
    value = layer.value.weight.cpu().double().unflatten(1, (len(probs), -1)).transpose(0, 1)  # V_h, (N_h, C_out, C_in)

    coefficients = fit_shifts(probs, target)
    kernel = torch.einsum('hk,hoi->oik', coefficients, value)  # W_δ = Σ_h c_{h,δ} V_h
    conv.weight.copy_(kernel.reshape(conv.weight.shape).to(conv.weight.dtype))
    if conv.bias is not None:
        conv.bias.copy_(layer.value.bias)

    norm, row_error = zip(*(_error(p, c, target) for p, c in zip(probs, coefficients)))
    residual = torch.stack(norm) / probs.flatten(1).norm(dim=1).clamp_min(1e-12)  # a head can see padding alone
    bound = torch.linalg.matrix_norm(value, ord=2) @ torch.stack(row_error)  # Σ_h ‖V_h‖₂ ‖E_h[q, :]‖₁
    interior = bound[interior_queries(window, size)]
    return conv.train(layer.training), ConvFit(
        size,
        window.shifts(),
        coefficients,
        residual,
        bound.max().item(),
        interior.max().item() if len(interior) else None,
    )


def targets(window: Window, size: Tuple[int, ...]) -> Tensor:
    """Pixel that each query of an image of ``size`` sees at each kernel position: the shift operators S_δ.

    Returns:
        Tensor: Row-major indices, ``(K, Q)``, −1 in zero padding.

    Raises:
        ValueError: The image is too small for the window or for its padding mode.
    """
    for axis, (n, padding) in enumerate(zip(size, window.padding)):
        least = {'reflect': max(padding) + 1, 'circular': max(padding)}.get(window.padding_mode, 1)
        if n < least:
            raise ValueError(
                f'size={size} is too small for padding_mode={window.padding_mode!r} with {max(padding)} pixels of '
                f'padding: axis {axis} needs {least} pixels at least'
            )
    queries = [window.queries(axis, n) for axis, n in enumerate(size)]
    pixel = torch.arange(1.0, 1 + math.prod(size), dtype=torch.float64)  # from 1: 0 is padding
    padded = window.pad(pixel.reshape(1, 1, *size))[0, 0].long() - 1
    query = torch.cartesian_prod(*queries).reshape(-1, window.ndim)
    before = torch.tensor([before for before, _ in window.padding])
    place = window.shifts()[:, None] + query + before  # q + δ in the padded image, (K, Q, ndim)
    return padded[place.unbind(-1)]


def interior_queries(window: Window, size: Tuple[int, ...]) -> Tensor:
    """Whether each query of an image of ``size`` has its whole window inside, ``(Q,)``."""
    shifts = window.shifts()
    first, last = shifts[0], shifts[-1]
    inside = torch.ones(1, dtype=torch.bool)
    for axis, n in enumerate(size):
        query = window.queries(axis, n)
        inside = (inside[:, None] & (query + first[axis] >= 0) & (query + last[axis] < n)).flatten()
    return inside


def check_position_only(layer: nn.Module) -> None:
    """Refuses a layer that is not attention by positions alone."""
    if not hasattr(layer, 'attention_probs') or not isinstance(getattr(layer, 'value', None), nn.Linear):
        raise TypeError(
            f'layer is a {type(layer).__name__}, but only attention over a grid of pixels is compared with a '
            'convolution, with attention_probs(height, width) and a linear layer value'
        )
    if getattr(layer, 'depends_on_content', False):
        raise ValueError(
            f'the scores of layer, terms={layer.terms}, depend on the input, and no convolution does: only attention '
            "by positions alone can be compared with one, terms=('vr',)"
        )


def position_probs(layer: nn.Module, size: Tuple[int, ...]) -> Tensor:
    """``layer.attention_probs(size)`` in float64 throughout, on the CPU, ``(N_h, Q, pixels)``."""
    return copy.deepcopy(layer).cpu().double().attention_probs(size).detach()


def _conv_of_grid(layer: nn.Module, kernel_size, padding_mode: Optional[str]) -> nn.Conv2d:
    weight = layer.value.weight
    return nn.Conv2d(
        weight.shape[1] // layer.num_heads,
        weight.shape[0],
        per_axis('kernel_size', kernel_size, 2),
        padding='same',
        padding_mode='replicate' if padding_mode is None else padding_mode,
        bias=layer.value.bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )


def _conv_of_image(layer: ImageAttention, kernel_size, padding_mode: Optional[str]) -> nn.Module:
    window, weight = layer.window, layer.value.weight
    if per_axis('kernel_size', kernel_size, window.ndim) != window.kernel_size:
        raise ValueError(f'kernel_size={kernel_size} must be that of the window of layer, {window.kernel_size}')
    if padding_mode not in (None, window.padding_mode):
        raise ValueError(f'padding_mode={padding_mode!r} must be that of the window of layer, {window.padding_mode!r}')
    # As numbers where both sides are padded alike, as nn.Conv2d has it; its 'same' puts the odd pixel after.
    padding = tuple(before for before, after in window.padding if before == after)
    padding = padding if len(padding) == window.ndim else 'same'
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[window.ndim - 1](
        layer.in_channels,
        weight.shape[0],
        window.kernel_size,
        window.stride if padding != 'same' else 1,
        padding,
        window.dilation,
        padding_mode=window.padding_mode,
        bias=layer.value.bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )
    if Window.of(conv) != window:
        raise ValueError(
            f'the window of layer is padded by {window.padding} with stride {window.stride}, which no convolution has: '
            "it pads both sides alike, or with stride 1 as padding='same'"
        )
    return conv


def _default_size(window: Window) -> Tuple[int, ...]:
    usual = 8 if window.ndim == 3 else 16
    # The first query with nothing of its window before the image starts at a pixel below the stride.
    return tuple(max(usual, s + d * (k - 1)) for k, s, d in zip(window.kernel_size, window.stride, window.dilation))


def fit_shifts(probs: Tensor, target: Tensor) -> Tensor:
    """c that minimizes ‖P_h − Σ_δ c_{h,δ} S_δ‖_F for each head, ``(N_h, K)``."""
    inside = target >= 0
    # The normal equations. Both sides are sums over queries: ⟨S_δ, S_δ'⟩ counts those with the same target.
    gram = torch.stack([((target == row) & (row >= 0)).sum(1) for row in target]).double()
    index = target.clamp(min=0).expand(len(probs), -1, -1).mT
    product = (probs.gather(2, index) * inside.T).sum(1)  # ⟨P_h, S_δ⟩, (N_h, K)
    return product @ torch.linalg.pinv(gram, hermitian=True)


def _error(probs: Tensor, coefficients: Tensor, target: Tensor) -> Tuple[Tensor, Tensor]:
    """‖E‖_F and ‖E[q, :]‖₁ of every query for one head, E = P − Σ_δ c_δ S_δ."""
    fitted = probs.new_zeros(len(probs), probs.shape[1] + 1)  # column 0 is the padding
    fitted.scatter_add_(1, target.T + 1, coefficients.expand(len(probs), -1))
    error = probs - fitted[:, 1:]
    return error.norm(), error.abs().sum(1)
