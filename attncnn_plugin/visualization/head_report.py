"""What the heads of an attention layer do: where they look, whether they do anything, what convolution they form."""
import dataclasses
from typing import Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ..convert.expressibility import expressible_shifts
from ..convert.to_conv import ConvFit, interior_queries, mhsa_to_conv, targets
from ..convert.to_conv import position_probs as exact_probs
from ..layers.attention import GridAttention
from ..layers.encodings import GeneralizedQuadraticEncoding, QuadraticEncoding
from ..layers.image_attention import ImageAttention
from ..layers.merged_attention import MergedPatchAttention
from ..layers.patch_attention import PatchAttention
from ..layers.window import Window, per_axis
from ..pruning.criteria import relative_entropy
from ..pruning.report import find_degenerate_heads
from .attention_maps import depends_on_content, position_probs
from .head_report_kinds import EXACT, Lattice, LayerKind, count_kinds, head_kind, kernel_of
from .head_report_shifts import ShiftMaps, moments, nearest_shift, shift_shares, window_mass
from .head_report_types import BestConvolution, ExpressibleShifts, HeadStatistics, LayerReport

KERNEL_SIZES = (3, 5)
ZOOM = 3  # shares of the shifts −3 … 3, as C20's Figure 5
TOLERANCE = 1e-6


class FixedAttention(nn.Module):
    """Given probabilities in the place of a layer's: a mean over images, or the part that depends on position.

    Args:
        probs (Tensor): ``(N_h, H*W, H*W)``.
        size (tuple[int, int]): H and W.
        value (Tensor, optional): The matrix from input to output of each head, ``(N_h, D_out, D)``. Only their inner
            products are kept, which are all that an error depends on. By default each head has an output of its own.

    Attributes:
        value (nn.Linear): N_h to N_h, with the inner products of the matrices.
    """

    def __init__(self, probs: Tensor, size: Tuple[int, int], value: Optional[Tensor] = None) -> None:
        super().__init__()
        self.num_heads = len(probs)
        self.size = size
        self.register_buffer('probs', probs.detach().cpu().double())
        self.value = nn.Linear(self.num_heads, self.num_heads, bias=False, dtype=torch.float64)
        weight = torch.eye(self.num_heads, dtype=torch.float64)
        if value is not None:
            eigenvalues, vectors = torch.linalg.eigh(gram(value.detach().cpu().double()))
            weight = (vectors * eigenvalues.clamp(min=0).sqrt()).T  # column h is of head h
        self.value.weight = nn.Parameter(weight, requires_grad=False)

    def attention_probs(self, height: int, width: int) -> Tensor:
        """The given probabilities.

        Raises:
            ValueError: They are of another grid.
        """
        if (height, width) != self.size:
            raise ValueError(f'the grid is {height}x{width}, but the probabilities are those of '
                             f'{self.size[0]}x{self.size[1]} tokens')
        return self.probs


@torch.no_grad()
def head_report(layer: nn.Module, height: int, width: int, tolerance: float = TOLERANCE) -> LayerReport:
    """What the heads of a layer do on a grid, as far as it depends on position alone.

    Centre and width of Gaussian heads are their parameters, those of others the moments of their probabilities at
    interior queries. For attention with content the probabilities are those of the positional part, vᵀr_δ (C20, eq. 8)
    or the relative position bias of CMHSA; for content see :func:`maps_report`.

    Args:
        layer (nn.Module): Attention of this package: over a grid of tokens, of CMHSA, or what
            :func:`~attncnn_plugin.convert.conv_to_mhsa` returns for an ``nn.Conv2d``.
        height, width (int): Size of the grid in tokens, at least two of them.
        tolerance (float): Residual up to which a shift is expressible. Defaults to 1e-6.

    Returns:
        LayerReport: The report.

    Raises:
        TypeError: ``layer`` is no such attention.
        ValueError: ``layer`` has no part that depends on position alone; an image too small for its window, or not of
            two axes; parameters that are not finite.

    Examples:
        >>> print(head_report(conv_to_mhsa(nn.Conv2d(3, 8, 3, padding=1)), 8, 8).summary)
        one convolution, 3x3, error 0
    """
    size = per_axis('(height, width)', (height, width), 2)
    if not isinstance(layer, (GridAttention, ImageAttention, PatchAttention, MergedPatchAttention)):
        raise TypeError(f'layer is a {type(layer).__name__}, but only attention layers of this package have heads to '
                        'report; for the probabilities of another one there is maps_report')
    if isinstance(layer, ImageAttention) and layer.window.ndim != 2:
        raise ValueError(f'layer has {layer.window.ndim} axes of pixels, but heads are reported for two')
    if layer.num_heads == 0:
        return LayerReport(size, 0, LayerKind('empty', 0, 0, 0), (), (), ())
    if not depends_on_content(layer):
        return _report(layer, size, tolerance)
    probs = position_probs(layer, *size)
    if probs is None:
        raise ValueError(f'the scores of layer, terms={layer.terms}, have no part that depends on position alone: '
                         "report the mean attention over images with maps_report, or add the term 'vr'")
    return _report(fixed_attention(layer, probs, size), size, tolerance, _padding_mode(layer))


@torch.no_grad()
def maps_report(
        probs: Tensor,
        height: int,
        width: int,
        layer: Optional[nn.Module] = None,
        num_images: int = 0,
        tolerance: float = TOLERANCE,
) -> LayerReport:
    """The report of given probabilities, a mean over images for instance; see :func:`head_report`.

    Args:
        probs (Tensor): ``(N_h, height*width, height*width)``, rows of at most 1.
        height, width (int): Size of the grid in tokens.
        layer (nn.Module, optional): Attention of this package whose value matrices weigh the heads in the errors of
            convolutions. Defaults to heads of equal weight, each with an output of its own.
        num_images (int): Number of images of the mean, 0 for none. Defaults to 0.
        tolerance (float): Residual up to which a shift is expressible. Defaults to 1e-6.

    Raises:
        ValueError: ``probs`` are not those of such a grid.
    """
    size = per_axis('(height, width)', (height, width), 2)
    if probs.ndim != 3 or probs.shape[1:] != (height * width, height * width):
        raise ValueError(f'probs have shape {tuple(probs.shape)}, but (N_h, {height * width}, {height * width}) are '
                         f'those of a grid of {height}x{width}')
    attention = 'images' if num_images else 'position'
    if len(probs) == 0:
        report = LayerReport(size, 0, LayerKind('empty', 0, 0, 0), (), (), ())
    else:
        fixed = FixedAttention(probs, size) if layer is None else fixed_attention(layer, probs, size)
        report = _report(fixed, size, tolerance, 'replicate' if layer is None else _padding_mode(layer))
    return dataclasses.replace(report, attention=attention, num_images=num_images)


def fixed_attention(layer: nn.Module, probs: Tensor, size: Tuple[int, int]) -> FixedAttention:
    """Probabilities with the value matrices of a layer: W^V W^O of a head for CMHSA."""
    merged = layer.merge() if isinstance(layer, PatchAttention) else layer
    linear = merged.value_out if isinstance(merged, MergedPatchAttention) else merged.value
    return FixedAttention(probs, size, values_of(linear, layer.num_heads))


def values_of(linear: nn.Linear, num_heads: int) -> Tensor:
    """V_h, the slice of a value matrix of each head, ``(N_h, D_out, D)``."""
    return linear.weight.detach().unflatten(1, (num_heads, -1)).transpose(0, 1)


def gram(value: Tensor) -> Tensor:
    """⟨V_h, V_g⟩ of all pairs of heads, ``(N_h, N_h)``."""
    flat = value.flatten(1)
    return flat @ flat.T


def _padding_mode(layer: nn.Module) -> str:
    # The null key of CMHSA stands for zeros outside of the grid.
    return 'zeros' if isinstance(layer, (PatchAttention, MergedPatchAttention)) else 'replicate'


def _report(layer: nn.Module, size: Tuple[int, int], tolerance: float, padding_mode: str = 'replicate') -> LayerReport:
    maps = ShiftMaps.of(layer, exact_probs(layer, size), size)
    heads = tuple(_heads(layer, maps))
    convolutions = tuple(_convolutions(layer, maps, heads, padding_mode))
    return LayerReport(
        size, layer.num_heads, _kind(layer, heads, convolutions), convolutions,
        tuple(_expressible(layer, maps, tolerance)), heads)


def _heads(layer: nn.Module, maps: ShiftMaps) -> Iterator[HeadStatistics]:
    source, center, alpha, covariance = _center_and_width(layer, maps)
    entropy = relative_entropy(layer, maps.size)
    masses = [window_mass(maps, kernel_size).tolist() for kernel_size in KERNEL_SIZES]
    shares = shift_shares(maps)
    gaussian = isinstance(getattr(layer, 'encoding', None), (QuadraticEncoding, GeneralizedQuadraticEncoding))
    criteria = (['uniform', 'stripe'] if gaussian else []) + ['entropy', 'duplicate']
    degenerate = {entry.head: entry for entry in find_degenerate_heads(layer, criteria, maps.size).found}
    nats = torch.tensor(maps.probs.shape[-1]).double().log().item()
    for head, relative in enumerate(entropy.tolist()):
        shift, share = nearest_shift(shares[head])
        found = degenerate.get(head)
        yield HeadStatistics(
            head,
            source,
            _finite(center[head]),
            None if alpha is None else alpha[head].item(),
            _finite(covariance[head]),
            relative * nats,
            relative,
            masses[0][head],
            masses[1][head],
            shift,
            share,
            head_kind(share, relative),
            found is not None,
            found and found.criterion,
            found and found.reason,
            _zoom(shares[head]))


def _center_and_width(layer: nn.Module, maps: ShiftMaps) -> Tuple[str, Tensor, Optional[Tensor], Tensor]:
    """Where they come from, the centres ``(N_h, 2)``, α ``(N_h,)`` and the covariances ``(N_h, 2, 2)``."""
    encoding = getattr(layer, 'encoding', None)
    if isinstance(encoding, QuadraticEncoding):
        alpha = encoding.alpha.cpu().double()
        variance = 1 / (2 * alpha)
        return 'parameters', encoding.center.cpu().double(), alpha, torch.diag_embed(variance[:, None].expand(-1, 2))
    if isinstance(encoding, GeneralizedQuadraticEncoding):
        inverse, info = torch.linalg.inv_ex(encoding.sqrt_precision.cpu().double())  # Σ = M⁻ᵀ M⁻¹
        covariance = torch.where(info[:, None, None] == 0, inverse.mT @ inverse, float('inf'))
        return 'parameters', encoding.center.cpu().double(), None, covariance
    center, covariance = moments(maps)
    return 'moments', center, None, covariance


def _finite(values: Tensor) -> Optional[tuple]:
    """As tuples; None if a value is not finite."""
    if not values.isfinite().all():
        return None
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in values.tolist())


def _zoom(share: Tensor) -> Tuple[Tuple[Optional[float], ...], ...]:
    """Shares of the shifts −3 … 3."""
    padded = nn.functional.pad(share, (ZOOM, ) * 4, value=float('nan'))
    row, column = (n // 2 for n in padded.shape)
    zoomed = padded[row - ZOOM:row + ZOOM + 1, column - ZOOM:column + ZOOM + 1]
    return tuple(tuple(None if value != value else value for value in line) for line in zoomed.tolist())


def _convolutions(
        layer: nn.Module,
        maps: ShiftMaps,
        heads: Sequence[HeadStatistics],
        padding_mode: str,
) -> Iterator[BestConvolution]:
    if isinstance(layer, ImageAttention):
        kernel_sizes, padding_mode = {layer.window.kernel_size}, layer.window.padding_mode
    else:
        kernel_sizes = {(n, n) for n in KERNEL_SIZES}
        if all(head.kind == 'hard' for head in heads):
            kernel_sizes.add(kernel_of([head.nearest_shift for head in heads]))
    weights = gram(values_of(layer.value, layer.num_heads).cpu().double())
    for kernel_size in sorted(kernel_sizes, key=lambda size: (size[0] * size[1], size)):
        conv, fit = mhsa_to_conv(layer, kernel_size, maps.size, padding_mode)
        window = Window.of(conv)
        error = _left(maps.probs, fit, window)
        inside = interior_queries(window, maps.size)
        yield BestConvolution(
            kernel_size, padding_mode, _relative(error, maps.probs, weights),
            _relative(error[:, inside], maps.probs[:, inside], weights) if inside.any() else None)


def _left(probs: Tensor, fit: ConvFit, window: Window) -> Tensor:
    """E_h = P_h − Σ_δ c_{h,δ} S_δ, ``(N_h, Q, K)``."""
    target = targets(window, fit.size)
    fitted = probs.new_zeros(*probs.shape[:2], probs.shape[2] + 1)  # column 0 is the padding
    index, coefficients = target.T + 1, fit.coefficients[:, None]
    shape = len(probs), *index.shape
    return probs - fitted.scatter_add_(2, index.expand(shape), coefficients.expand(shape))[..., 1:]


def _relative(error: Tensor, probs: Tensor, weights: Tensor) -> float:
    """‖Σ_h E_h ⊗ V_h‖_F / ‖Σ_h P_h ⊗ V_h‖_F, with ⟨V_h, V_g⟩ in ``weights``; 0 for a layer that is 0."""
    left, whole = ((gram(maps) * weights).sum().clamp(min=0) for maps in (error, probs))
    return (left / whole).sqrt().item() if whole > 0 else 0.


def _expressible(layer: nn.Module, maps: ShiftMaps, tolerance: float) -> Iterator[ExpressibleShifts]:
    pixels = torch.cartesian_prod(*(torch.arange(n) for n in maps.size))
    if not torch.equal(maps.queries, pixels):
        return  # with a stride no shift is expressed at every pixel
    for n in KERNEL_SIZES:
        if min(maps.size) < n:
            continue
        found = expressible_shifts(layer, n, *maps.size, queries='interior', tolerance=tolerance)
        shifts = [tuple(shift) for shift in found.shifts.tolist()]
        yield ExpressibleShifts(
            (n, n), tuple(shift for shift in shifts if shift not in found.missing), tuple(found.missing),
            tuple(found.residual.tolist()), tolerance)


def _kind(
        layer: nn.Module,
        heads: Sequence[HeadStatistics],
        convolutions: Sequence[BestConvolution],
) -> LayerKind:
    counts = count_kinds([head.kind for head in heads])
    window: Optional[Window] = getattr(layer, 'window', None)
    stride = (1, 1) if window is None else window.stride
    if counts['hard'] == len(heads):
        shifts: List[Tuple[int, int]] = [head.nearest_shift for head in heads]
        lattice = Lattice.of(shifts)
        kind = ('dilated' if lattice.dilated else 'convolution') if lattice.full else 'sparse'
        kernel_size = convolutions[0].kernel_size if window else kernel_of(shifts)
        error = next(entry.error for entry in convolutions if entry.kernel_size == kernel_size)
        return LayerKind(kind, **counts, num_shifts=len(set(shifts)), kernel_size=lattice.kernel_size,
                         dilation=lattice.dilation, offset=lattice.offset, stride=stride, error=error)
    exact = next((entry for entry in convolutions if entry.error < EXACT), None)
    if exact is not None:
        dilation = (1, 1) if window is None else window.dilation
        return LayerKind('dilated' if max(dilation) > 1 else 'convolution', **counts, kernel_size=exact.kernel_size,
                         dilation=dilation, offset=(0, 0), stride=stride, error=exact.error)
    return LayerKind('mixture', **counts, stride=stride)
