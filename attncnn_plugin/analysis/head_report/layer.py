"""What the heads of an attention layer do: where they look, whether they do anything, what convolution they form."""

import dataclasses
import math
from typing import Dict, Iterator, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ...convert.patches import PatchConvolutionAttention
from ...layers.attention_layer import GaussianHeads
from ...layers.encodings import GeneralizedQuadraticEncoding, QuadraticEncoding
from ...layers.grid_attention import GridAttention
from ...layers.image_attention import ImageAttention
from ...layers.merged_patch_attention import MergedPatchAttention
from ...layers.patch_attention import PatchAttention
from ...layers.window import per_axis
from ...pruning.degenerate_heads import DegenerateHead, degenerate_heads_of_maps
from ..attention_maps import depends_on_content, position_probs, relative_entropy_of
from .convolutions import KERNEL_SIZES, ConvolutionErrors, expressible_shifts_of, value_products
from .kinds import EXACT, Lattice, LayerKind, count_kinds, head_kind
from .report import BestConvolution, HeadStatistics, LayerReport
from .shift_maps import ShiftMaps, moments, nearest_shifts, shift_shares, window_mass

ZOOM = 3  # shares of the shifts −3 … 3, as C20's Figure 5
TOLERANCE = 1e-6


@torch.no_grad()
def head_report(layer: nn.Module, height: int, width: int, tolerance: float = TOLERANCE) -> LayerReport:
    """What the heads of a layer do on a grid, as far as it depends on position alone.

    Centre and width of Gaussian heads are their parameters, those of others the moments of their probabilities at
    interior queries. For attention with content the probabilities are those of the positional part, vᵀr_δ (C20, eq. 8)
    or the relative position bias of CMHSA, and no head is called degenerate; for content see :func:`maps_report`.

    Args:
        layer (nn.Module): Attention of this package: over a grid of tokens, of CMHSA, or what
            :func:`~attncnn_plugin.convert.conv_to_mhsa` and :func:`~attncnn_plugin.convert.conv_to_patch_mhsa` return
            for an ``nn.Conv2d``.
        height, width (int): Size of the grid in tokens, pixels for ``conv_to_mhsa``; at least two of them.
        tolerance (float): Residual up to which a shift is expressible, 1e-7 or more. Defaults to 1e-6.

    Returns:
        LayerReport: The report.

    Raises:
        TypeError: ``layer`` is no such attention.
        ValueError: ``layer`` has no part that depends on position alone; an image too small for its window, or not of
            two axes; parameters that are not finite.

    Examples:
        >>> print(head_report(conv_to_mhsa(nn.Conv2d(3, 8, 3, padding=1))[0], 8, 8).summary)
        one convolution, 3x3, error 0
    """
    size = per_axis('(height, width)', (height, width), 2)
    if isinstance(layer, PatchConvolutionAttention):
        layer = layer.attention
    if not isinstance(layer, (GridAttention, ImageAttention, PatchAttention, MergedPatchAttention)):
        raise TypeError(
            f'layer is a {type(layer).__name__}, but only attention layers of this package have heads to '
            'report; for the probabilities of another one there is maps_report'
        )
    if isinstance(layer, ImageAttention) and layer.window.ndim != 2:
        raise ValueError(f'layer has {layer.window.ndim} axes of pixels, but heads are reported for two')
    if layer.num_heads == 0:
        return empty_report(size)
    window = getattr(layer, 'window', None)
    if not depends_on_content(layer):
        maps = ShiftMaps.of(layer.exact_attention_probs(size), size, window)
        encoding = getattr(layer, 'encoding', None)
        degenerate = _degenerate(maps, layer.gaussian_heads())
    else:
        probs = position_probs(layer, *size)
        if probs is None:
            raise ValueError(
                f'the scores of layer, terms={layer.terms}, have no part that depends on position alone: '
                "report the mean attention over images with maps_report, or add the term 'vr'"
            )
        maps, encoding, degenerate = ShiftMaps.of(probs, size), None, None
    return _report(maps, value_products(layer), _padding_mode(layer), tolerance, degenerate, encoding)


@torch.no_grad()
def maps_report(
    probs: Tensor,
    height: int,
    width: int,
    layer: Optional[nn.Module] = None,
    num_images: int = 0,
    relative_entropy: Optional[Tensor] = None,
    tolerance: float = TOLERANCE,
) -> LayerReport:
    """The report of given probabilities, a mean over images for instance; see :func:`head_report`.

    Args:
        probs (Tensor): ``(N_h, height*width, height*width)``, rows of at most 1.
        height, width (int): Size of the grid in tokens.
        layer (nn.Module, optional): Attention of this package whose value matrices weigh the heads in the errors of
            convolutions. Defaults to heads of equal weight, each with an output of its own.
        num_images (int): Number of images of the mean, 0 for none: with images no head is called degenerate. Defaults
            to 0.
        relative_entropy (Tensor, optional): That of single images, mean over these, see
            :func:`~.attention_maps.relative_entropy_of`, ``(N_h,)``. A mean of images has a larger one: a head can look
            at one key in each image, and at all of them in the mean. Defaults to that of ``probs``.
        tolerance (float): Residual up to which a shift is expressible, 1e-7 or more. Defaults to 1e-6.

    Raises:
        ValueError: ``probs`` are not those of such a grid, or are not finite.
    """
    size = per_axis('(height, width)', (height, width), 2)
    if probs.ndim != 3 or probs.shape[1:] != (height * width, height * width):
        raise ValueError(
            f'probs have shape {tuple(probs.shape)}, but (N_h, {height * width}, {height * width}) are '
            f'those of a grid of {height}x{width}'
        )
    if len(probs) == 0:
        report = empty_report(size)
    else:
        maps = ShiftMaps.of(probs, size)
        weights = torch.eye(len(probs), dtype=torch.float64) if layer is None else value_products(layer)
        degenerate = None if num_images else _degenerate(maps, None)
        report = _report(maps, weights, _padding_mode(layer), tolerance, degenerate, relative_entropy=relative_entropy)
    return dataclasses.replace(report, attention='images' if num_images else 'position', num_images=num_images)


def empty_report(size: Tuple[int, int], kind: str = 'empty', **window: Tuple[int, int]) -> LayerReport:
    """The report of a layer without heads, or of the convolution in its place."""
    return LayerReport(size, 0, LayerKind(kind, 0, 0, 0, **window), (), (), ())


def _padding_mode(layer: Optional[nn.Module]) -> str:
    # The null key of CMHSA stands for zeros outside of the grid.
    return 'zeros' if isinstance(layer, (PatchAttention, MergedPatchAttention)) else 'replicate'


def _degenerate(maps: ShiftMaps, gaussian: Optional[GaussianHeads]) -> Dict[int, DegenerateHead]:
    """The degenerate heads by index."""
    criteria = (['uniform', 'stripe'] if gaussian else []) + ['entropy', 'duplicate']
    return {entry.head: entry for entry in degenerate_heads_of_maps(maps.probs, criteria, gaussian).found}


def _report(
    maps: ShiftMaps,
    weights: Tensor,
    padding_mode: str,
    tolerance: float,
    degenerate: Optional[Dict[int, DegenerateHead]],
    encoding: Optional[nn.Module] = None,
    relative_entropy: Optional[Tensor] = None,
) -> LayerReport:
    if relative_entropy is None:
        relative_entropy = relative_entropy_of(maps.probs)
    heads = tuple(_heads(maps, encoding, relative_entropy, degenerate))
    errors = ConvolutionErrors(maps, weights, padding_mode)
    convolutions = tuple(errors.of_kernels())
    return LayerReport(
        maps.size,
        len(heads),
        _kind(maps, heads, convolutions, errors),
        convolutions,
        tuple(expressible_shifts_of(maps, tolerance)),
        heads,
    )


def _heads(
    maps: ShiftMaps,
    encoding: Optional[nn.Module],
    relative_entropy: Tensor,
    degenerate: Optional[Dict[int, DegenerateHead]],
) -> Iterator[HeadStatistics]:
    source, center, alpha, covariance = _center_and_width(maps, encoding)
    masses = [window_mass(maps, kernel_size).tolist() for kernel_size in KERNEL_SIZES]
    shares = shift_shares(maps)
    nearest = nearest_shifts(maps, shares)
    nats = math.log(maps.probs.shape[-1])
    for head, relative in enumerate(relative_entropy.tolist()):
        shift, share = nearest[head]
        found = None if degenerate is None else degenerate.get(head)
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
            None if degenerate is None else found is not None,
            found and found.criterion,
            found and found.reason,
            _zoom(shares[head]),
        )


def _center_and_width(
    maps: ShiftMaps,
    encoding: Optional[nn.Module],
) -> Tuple[str, Tensor, Optional[Tensor], Tensor]:
    """Where they come from, the centres ``(N_h, 2)``, α ``(N_h,)`` and the covariances ``(N_h, 2, 2)``."""
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
    padded = nn.functional.pad(share, (ZOOM,) * 4, value=float('nan'))
    row, column = (n // 2 for n in padded.shape)
    zoomed = padded[row - ZOOM : row + ZOOM + 1, column - ZOOM : column + ZOOM + 1]
    return tuple(tuple(None if value != value else value for value in line) for line in zoomed.tolist())


def _kind(
    maps: ShiftMaps,
    heads: Sequence[HeadStatistics],
    convolutions: Sequence[BestConvolution],
    errors: ConvolutionErrors,
) -> LayerKind:
    counts = count_kinds([head.kind for head in heads])
    stride, dilation = ((1, 1), (1, 1)) if maps.window is None else (maps.window.stride, maps.window.dilation)
    exact = next((entry for entry in convolutions if entry.error < EXACT and entry.interior_error is not None), None)
    if counts['hard'] == len(heads):
        shifts = [head.nearest_shift for head in heads]
        error = errors.of_shifts(shifts)
        # What leaks within the window of an ImageAttention is a part of its kernel.
        if error is not None and (error < EXACT or exact is None or maps.window is None):
            lattice = Lattice.of(shifts)
            kind = ('dilated' if lattice.dilated else 'convolution') if lattice.full else 'sparse'
            return LayerKind(
                kind,
                **counts,
                num_shifts=len(set(shifts)),
                kernel_size=lattice.kernel_size,
                dilation=lattice.dilation,
                offset=lattice.offset,
                stride=stride,
                error=error,
            )
    if exact is not None:
        dilation = tuple(step if n > 1 else 1 for step, n in zip(dilation, exact.kernel_size))
        return LayerKind(
            'dilated' if max(dilation) > 1 else 'convolution',
            **counts,
            kernel_size=exact.kernel_size,
            dilation=dilation,
            offset=(0, 0),
            stride=stride,
            error=exact.error,
        )
    return LayerKind('mixture', **counts, stride=stride)
