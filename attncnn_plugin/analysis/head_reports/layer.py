"""The head report of one layer: where its heads look, whether they do anything, what convolution they form.

It answers the questions of Cordonnier et al. 2020, section 4, about a layer: which heads are convolutional, and which
of the shifts of a kernel they cover.
"""

import dataclasses
from typing import Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ...attention import AttentionLayer, GaussianHeads
from ...attention.window import per_axis
from ...convert.patches import PatchConvolutionAttention
from ...pruning.criteria import DegenerateHead, degenerate_heads_of_maps, relative_entropy_of_maps
from .convolutions import ConvolutionErrors, expressible_kernels
from .head_statistics import head_statistics
from .kinds import EXACT, Lattice, LayerKind
from .report import BestConvolution, HeadStatistics, LayerReport
from .shift_maps import ShiftMaps, same_window

TOLERANCE = 1e-6

Size = Tuple[int, int]


@torch.no_grad()
def head_report(layer: nn.Module, size: Sequence[int], tolerance: float = TOLERANCE) -> LayerReport:
    """Reports what the heads of a layer do on a grid, as far as it depends on position alone.

    Centre and width of Gaussian heads are their parameters, those of others the moments of their probabilities at
    interior queries. For attention with content the probabilities are those of the positional part, vᵀr_δ (C20, eq. 8)
    or the relative position bias of CMHSA, and no head is called degenerate; for content see :func:`maps_report`.

    Args:
        layer (nn.Module): Attention of this package: over a grid of tokens, of CMHSA, or what
            :func:`~attncnn_plugin.convert.conv_to_mhsa` and :func:`~attncnn_plugin.convert.conv_to_patch_mhsa` return
            for an ``nn.Conv2d``.
        size (Sequence[int]): Height and width of the grid in tokens, at least two of them; pixels for ``conv_to_mhsa``.
        tolerance (float): Residual up to which a shift is expressible, 1e-7 or more. Defaults to 1e-6.

    Returns:
        LayerReport: The report.

    Raises:
        TypeError: ``layer`` is no such attention.
        ValueError: ``layer`` has no part that depends on position alone; an image too small for its window, or not of
            two axes; parameters that are not finite.

    Examples:
        >>> from attncnn_plugin.convert import conv_to_mhsa
        >>> attention, _ = conv_to_mhsa(nn.Conv2d(3, 8, 3, padding=1))
        >>> report = head_report(attention, size=(8, 8))
        >>> print(report.summary)
        one convolution, 3x3, error 0
        >>> report.heads[0].nearest_shift, report.heads[0].share
        ((-1, -1), 1.0)
    """
    grid = pair('size', size)
    if isinstance(layer, PatchConvolutionAttention):
        layer = layer.attention
    if not isinstance(layer, AttentionLayer):
        raise TypeError(
            f'layer is a {type(layer).__name__}, but only attention layers of this package have heads to '
            'report; for the probabilities of another one there is maps_report'
        )
    window = layer.window
    if window is not None and window.ndim != 2:
        raise ValueError(f'layer has {window.ndim} axes of pixels, but heads are reported for two')
    if layer.num_heads == 0:
        return empty_report(grid)
    gaussian, degenerate = None, None
    if not layer.depends_on_content:
        maps = ShiftMaps.of(layer.exact_attention_probs(grid), grid, window)
        gaussian = layer.gaussian_heads()
        degenerate = _degenerate_heads(maps, gaussian)
    else:
        probs = layer.position_probs(grid)
        if probs is None:
            raise ValueError(
                f'the scores of layer, {layer.extra_repr()}, have no part that depends on position alone: '
                "report the mean attention over images with maps_report, or add the term 'vr'"
            )
        maps = ShiftMaps.of(probs, grid, window)
    errors = ConvolutionErrors(maps, layer.padding_mode, layer.value_matrices())
    relative_entropy = relative_entropy_of_maps(maps.probs)
    heads = tuple(head_statistics(maps, relative_entropy, gaussian, degenerate))
    return _report(maps, heads, errors, tolerance)


@torch.no_grad()
def maps_report(
    probs: Tensor,
    size: Sequence[int],
    layer: Optional[AttentionLayer] = None,
    num_images: int = 0,
    relative_entropy: Optional[Tensor] = None,
    tolerance: float = TOLERANCE,
) -> LayerReport:
    """Reports what heads with given probabilities do, for instance with their mean over images.

    Args:
        probs (Tensor): ``(N_h, height*width, height*width)``, rows of at most 1.
        size (Sequence[int]): Height and width of the grid in tokens.
        layer (AttentionLayer, optional): Attention of this package whose value matrices weigh the heads in the errors
            of convolutions. Defaults to heads of equal weight, each with an output of its own.
        num_images (int): Number of images of the mean, 0 for none: with images no head is called degenerate. Defaults
            to 0.
        relative_entropy (Tensor, optional): Relative entropy of single images, mean over these, see
            :func:`~attncnn_plugin.pruning.criteria.relative_entropy_of_maps`, ``(N_h,)``. A mean over images has a
            larger one: a head can look at one key in each image, and at all of them in the mean. Defaults to that of
            ``probs``.
        tolerance (float): Residual up to which a shift is expressible, 1e-7 or more. Defaults to 1e-6.

    Returns:
        LayerReport: The report, see :func:`head_report`.

    Raises:
        ValueError: ``probs`` are not those of such a grid, or are not finite.

    Examples:
        >>> probs = torch.stack([torch.eye(36), torch.full((36, 36), 1 / 36)])
        >>> report = maps_report(probs, size=(6, 6))
        >>> print(report.summary)
        mixture, 1 hard, 1 uniform
        >>> print(report.heads[1].criterion, report.heads[1].why)
        entropy relative entropy 1 > 0.99
    """
    height, width = pair('size', size)
    window = None if layer is None else layer.window
    queries = height * width
    if window is not None:
        queries = window.num_queries(0, height) * window.num_queries(1, width)
    if probs.ndim != 3 or probs.shape[1:] != (queries, height * width):
        raise ValueError(
            f'probs have shape {tuple(probs.shape)}, but (N_h, {queries}, {height * width}) are '
            f'those of a grid of {height}x{width}'
        )
    if len(probs) == 0:
        report = empty_report((height, width))
    else:
        maps = ShiftMaps.of(probs, (height, width), window)
        if layer is None:
            errors = ConvolutionErrors(maps, 'replicate')
        else:
            errors = ConvolutionErrors(maps, layer.padding_mode, layer.value_matrices())
        if relative_entropy is None:
            relative_entropy = relative_entropy_of_maps(maps.probs)
        degenerate = None if num_images else _degenerate_heads(maps)
        heads = tuple(head_statistics(maps, relative_entropy, degenerate=degenerate))
        report = _report(maps, heads, errors, tolerance)
    return dataclasses.replace(report, attention='images' if num_images else 'position', num_images=num_images)


def pair(name: str, size: Sequence[int]) -> Size:
    """Height and width, checked.

    Raises:
        ValueError: They are not two positive integers.
    """
    height, width = per_axis(name, size, 2)
    return height, width


def empty_report(size: Size) -> LayerReport:
    """Returns the report of a layer without heads.

    Examples:
        >>> empty_report((8, 8)).summary
        'no heads: the layer is its bias'
    """
    return LayerReport(size, 0, LayerKind('empty', 0, 0, 0), (), (), ())


def _degenerate_heads(maps: ShiftMaps, gaussian: Optional[GaussianHeads] = None) -> Dict[int, DegenerateHead]:
    """The degenerate heads by index."""
    criteria = ['entropy', 'duplicate'] if gaussian is None else ['uniform', 'stripe', 'entropy', 'duplicate']
    report = degenerate_heads_of_maps(maps.probs, criteria, gaussian)
    return {entry.head: entry for entry in report.found}


def _report(
    maps: ShiftMaps, heads: Tuple[HeadStatistics, ...], errors: ConvolutionErrors, tolerance: float
) -> LayerReport:
    convolutions = tuple(errors.of_kernels())
    return LayerReport(
        grid=maps.size,
        num_heads=len(heads),
        kind=_kind(maps, heads, convolutions, errors),
        convolutions=convolutions,
        expressible=tuple(expressible_kernels(maps, tolerance)),
        heads=heads,
    )


def _kind(
    maps: ShiftMaps,
    heads: Sequence[HeadStatistics],
    convolutions: Sequence[BestConvolution],
    errors: ConvolutionErrors,
) -> LayerKind:
    """The kind of the layer by what its heads form together."""
    kinds = [head.kind for head in heads]
    hard, soft, uniform = (kinds.count(kind) for kind in ('hard', 'soft', 'uniform'))
    window = same_window((1, 1)) if maps.window is None else maps.window
    mixture = LayerKind('mixture', hard, soft, uniform, stride=(window.stride[0], window.stride[1]))
    exact = next((entry for entry in convolutions if entry.error < EXACT and entry.interior_error is not None), None)
    if hard == len(heads):
        shifts = [head.nearest_shift for head in heads]
        error = errors.of_shifts(shifts)
        # The small rest of the heads of an ImageAttention lies in its window: it is a part of the kernel.
        if error is not None and (error < EXACT or exact is None or maps.window is None):
            lattice = Lattice.of(shifts)
            return dataclasses.replace(
                mixture,
                kind=('dilated' if lattice.dilated else 'convolution') if lattice.full else 'sparse',
                num_shifts=len(set(shifts)),
                kernel_size=lattice.kernel_size,
                dilation=lattice.dilation,
                offset=lattice.offset,
                error=error,
            )
    if exact is None:
        return mixture
    rows, columns = (step if n > 1 else 1 for step, n in zip(window.dilation, exact.kernel_size))
    return dataclasses.replace(
        mixture,
        kind='dilated' if max(rows, columns) > 1 else 'convolution',
        kernel_size=exact.kernel_size,
        dilation=(rows, columns),
        offset=(0, 0),
        error=exact.error,
    )
