"""Position-only attention as a convolution: the converse of Cordonnier et al. 2020 (C20), Theorem 1."""

import copy
import math
from dataclasses import dataclass
from typing import Any, Iterator, Optional, Tuple, Union

import torch
from torch import Tensor

from ..attention.attention_layer import check_plain_linear
from ..attention.images import ContentImageAttention, GroupedLinear, ImageAttention
from ..attention.tokens import GridAttention
from ..attention.window import Sizes, Window, per_axis, same_window
from ..heads.found import own_heads
from .convolutions import Computed, Convolution, block_norms, convolution_with
from .expressible import check_layer, fit_shifts, inverse_of_shifts, targets

MAP_ELEMENTS = 2**22  # of the probabilities of heads, at once
ROUNDING = 1e-12  # of least squares: a head on one pixel has the coefficients 1 and 0


@dataclass(frozen=True, eq=False)
class ConvFit:
    """How far a convolution is from the attention layer that it replaces, on a grid of ``size``.

    The fit leaves E_h = P_h − Σ_δ c_{h,δ} S_δ of head h. The error at a query q is at most Σ_h ‖E_h[q, :]‖₁ ‖V_h‖₂ ·
    max_k ‖x_k‖₂ for every input x of this size, V_h being the head's slice of the value matrix. The bound is the
    largest factor of max_k ‖x_k‖₂ over the queries. It is for exact arithmetic: rounding comes on top.

    Attributes:
        size (tuple[int, ...]): Size of the grid that the fit is for and that the bound holds at.
        coefficients (Tensor): c_{h,δ}, ``(N_h, K)``, in the order of the kernel's entries, float64.
        residual (Tensor): ‖E_h‖_F / ‖P_h‖_F of each head, ``(N_h,)``, float64.
        bound (float): The bound.
    """

    size: Tuple[int, ...]
    coefficients: Tensor
    residual: Tensor
    bound: float

    def __str__(self) -> str:
        return f'output error at most {self.bound:.3g}'


@torch.no_grad()
def mhsa_to_conv(
    layer: Union[GridAttention, ImageAttention],
    kernel_size: Sizes,
    size: Optional[Sizes] = None,
) -> Tuple[Convolution, ConvFit]:
    """Turns attention that depends only on positions into the convolution that is nearest to it.

    Each head's probabilities P_h are fitted by shifts, min_c ‖P_h − Σ_δ c_{h,δ} S_δ‖_F with (S_δ x)_q = x_{q+δ}, and
    the kernel is W_δ = Σ_h c_{h,δ} V_h. Hard heads whose shifts lie in the kernel are fitted exactly: at the border a
    quadratic one attends to the nearest pixel inside, which is replicate padding. Attention dropout is left out.

    Args:
        layer (GridAttention | ImageAttention): Position-only attention over a grid, whose convolution maps ``(B, D, H,
            W)`` to ``(B, D_out, H, W)``, with stride 1 and replicate padding; or an ``ImageAttention``, such as
            ``conv_to_mhsa`` returns, whose stride, dilation, groups and padding the convolution has. One by content has
            no queries yet: it still is what it began as.
        kernel_size (int | Sequence[int]): Size of the kernel along each axis; for an ``ImageAttention`` that of its
            window.
        size (int | Sequence[int], optional): Height and width of the grid, or the size along each axis of an image, on
            which the heads are compared with shifts. Defaults to 16 pixels an axis, 8 for three axes, or more where a
            whole window needs them.

    Raises:
        TypeError: ``layer`` is no attention of this package.
        ValueError: The probabilities of ``layer`` depend on content; a ``kernel_size`` or a padding that does not go
            with ``layer``; a ``size`` that is too small for the window or the padding mode.
        RuntimeError: The linear map of ``layer`` is more than its weight and bias, for instance an adapter.

    Examples:
        Soft heads leave an error. The fit says how large it can be for pixels of norm 1:

        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> conv, fit = mhsa_to_conv(QuadraticAttention(dim=8, num_heads=9), kernel_size=3, size=(10, 12))
        >>> tuple(conv.weight.shape), fit.bound > 0.1
        ((8, 8, 3, 3), True)
    """
    window: Optional[Window] = getattr(layer, 'window', None)
    if window is None:
        window = same_window(per_axis('kernel_size', kernel_size, 2), 'replicate')
    elif per_axis('kernel_size', kernel_size, window.ndim) != window.kernel_size:
        raise ValueError(f'kernel_size={kernel_size} must be that of the window of layer, {window.kernel_size}')
    kernel, fit = nearest_kernel(layer, window, size)
    return convolution_with(kernel).train(layer.training), fit


@torch.no_grad()
def nearest_kernel(layer: Any, window: Window, size: Optional[Sizes] = None) -> Tuple[Computed, ConvFit]:
    """Finds the kernel of :func:`mhsa_to_conv` for a window; returns what its convolution computes, and the fit.

    Of the probabilities those of some heads are there at a time, 2²² numbers or those of one head.
    """
    check_layer(layer)
    groups = layer.groups if isinstance(layer, ImageAttention) else 1
    check_plain_linear('value', layer.value, GroupedLinear)
    weight = layer.value.weight
    if weight.is_meta:
        raise ValueError('layer is on the meta device, without values: load its weights first')
    # V_h, only the blocks of its groups, (C_out, C_in/groups, N_h)
    value = weight.unflatten(1, (layer.num_heads, -1)).transpose(1, 2).cpu().double()
    if size is None:  # the first query with nothing of its window before the image starts at a pixel below the stride
        sizes, usual = zip(window.kernel_size, window.stride, window.dilation), 8 if window.ndim == 3 else 16
        size = tuple(max(usual, s + d * (k - 1)) for k, s, d in sizes)
    size = per_axis('size', size, window.ndim)
    target = targets(window, size)
    inverse = inverse_of_shifts(target)
    # All at once: small tensors between large ones that come and go would keep their memory.
    coefficients, bound = (torch.empty(layer.num_heads, n, dtype=value.dtype, device='cpu') for n in target.shape)
    residual, head = bound.new_empty(layer.num_heads), 0
    for probs in _exact_probs(layer, size):
        found = fit_shifts(probs, target, inverse)
        whole = found.round()
        for own, c in zip(probs, torch.where((found - whole).abs() < ROUNDING, whole, found)):
            fitted = own.new_zeros(len(own), own.shape[1] + 1)  # column 0 is the padding
            fitted.scatter_add_(1, target.T + 1, c.expand(len(own), -1))
            error = own - fitted[:, 1:]  # E = P − Σ_δ c_δ S_δ
            bound[head] = error.abs().sum(1)  # ‖E[q, :]‖₁
            residual[head] = error.norm() / own.norm().clamp_min(1e-12)  # a head can see only padding
            coefficients[head] = c
            head += 1
    kernel = torch.einsum('hk,oih->oik', coefficients, value)  # W_δ = Σ_h c_{h,δ} V_h
    if bound.any():  # the norms are most of the work
        bound = block_norms(value, groups)[:, None] * bound
    bound = bound.sum(0)  # Σ_h ‖V_h‖₂ ‖E_h[q, :]‖₁
    fit = ConvFit(size, coefficients, residual, bound.max().item())
    bias = None if layer.value.bias is None else layer.value.bias.detach().clone()
    return Computed(window, kernel.unflatten(2, window.kernel_size).to(weight), bias, groups, own=True), fit


def _exact_probs(layer: Union[GridAttention, ImageAttention], size: Tuple[int, ...]) -> Iterator[Tensor]:
    """Yields the probabilities of attention that does not see content (yet), ``(some heads, Q, pixels)``, float64."""
    numbers, exact = range(layer.num_heads), copy.deepcopy(layer).cpu().double()
    image = torch.zeros(1, getattr(layer, 'in_channels', 1), *size, dtype=torch.float64, device='cpu')
    at_once = max(1, MAP_ELEMENTS // math.prod(size) ** 2)
    for start in numbers[::at_once]:
        some = exact
        if at_once < len(numbers):
            some = copy.deepcopy(exact)
            own_heads(some)[''].cut([*numbers[:start], *numbers[start + at_once :]])
        # Attention by content without queries or keys yet has the same probabilities for all images.
        if isinstance(some, ContentImageAttention) and not (some.query.weight.any() and some.key.weight.any()):
            yield some.attention_scores(image)[0, ..., :-1].exp()  # without the null key
        else:
            yield some.attention_probs(size)
