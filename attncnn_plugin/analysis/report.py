"""Head reports: where the heads of a model look, whether they do anything, what convolution they form.

They answer, for any layer, the questions of Cordonnier et al. 2020 (C20), section 4: which heads are convolutional, and
which of the shifts of a kernel they cover (C20, Theorem 1 and Lemma 3).
"""

import math
import textwrap
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ..attention import AttentionLayer
from ..attention.window import shown
from ..change import table
from ..convert import Expressibility
from ..heads.choice import Layers
from ..pruning.criteria import BY_POSITION, DegenerateHead, degenerate_heads_of_maps, relative_entropy_of_maps
from .layer_maps import MeanAttention, maps_of_layers
from .nearest_convolution import NearestConvolution, error_text, nearest_convolutions, spanned_kernels
from .recorder import Call
from .shift_statistics import Shift, ShiftMaps, mean_distance, moments, nearest_shifts, window_mass

HARD = 0.9  # share of its nearest shift from which a head is hard
NEARLY = 0.01  # difference of errors up to which the smaller kernel is the better one
UNIFORM = BY_POSITION['entropy'].threshold  # relative entropy above which a head is uniform
COLUMNS = ['head', 'centre', 'std', 'entropy', '3x3', 'nearest shift', 'kind']
MODEL_COLUMNS = ['layer', 'attention', 'heads', '3x3', '5x5', 'random 3x3', 'nearest']


def head_report(
    model: nn.Module,
    images: Any = None,
    size: Optional[Sequence[int]] = None,
    layers: Layers = None,
    call: Call = None,
) -> 'HeadReport':
    """Reports what the heads of each layer of a model do.

    A layer with a part that depends only on position has a report of that part: the whole of attention by position,
    vᵀr_δ (C20, eq. 8), or the relative position bias of CMHSA. With images, a layer whose scores depend on content has
    a report of its attention, averaged over these. If its only positional term is q·r_δ, which depends on the query
    too, it also has one of attention by that term, averaged over the images, before the other.

    Centre and width of Gaussian heads are their parameters, those of others the moments of their probabilities at
    interior queries. Where probabilities depend on content, no head is called degenerate.

    Of other libraries it is the attention of patches to patches, see :func:`mean_attention`. The values of the heads do
    not count there: in the errors of convolutions each head has an output of its own.

    Args:
        model (nn.Module): A model with softmax attention, of this package or of others; a layer itself among them.
        images (Tensor, optional): ``(B, C, H, W)``, as the model takes them, at least one. Without images there has to
            be a ``size``.
        size (Sequence[int], optional): Height and width of the grid in tokens, at least two of them, instead of images,
            for what depends only on position; pixels for attention instead of convolutions.
        layers (str | Iterable[str] | callable, optional): As of :func:`attncnn_plugin.attention_maps`. Defaults to
            None, all.
        call (Callable, optional): ``call(model, images)`` runs the model. Defaults to None, ``model(images)``.

    Returns:
        HeadReport: The reports of the layers, in the order of the blocks.

    Raises:
        TypeError: ``images`` is no tensor.
        ValueError: No attention in the model; both images and a size, or neither; without images, a layer without a
            part that depends only on position; an image too small for a layer's window, or not of two axes; parameters
            that are not finite.

    Examples:
        >>> from attncnn_plugin.convert import conv_to_mhsa
        >>> attention, _ = conv_to_mhsa(nn.Conv2d(3, 8, 3, padding=1))
        >>> (report,) = head_report(attention, size=(8, 8)).layers
        >>> print(report.summary)
        3x3 convolution, error 0
        >>> report.heads[0].nearest_shift, report.heads[0].share
        ((-1, -1), 1.0)
        >>> import timm, attncnn_plugin
        >>> model = timm.create_model('sa_learned_content_cifar', embed_dim=12, depth=1, num_heads=3)
        >>> for report in head_report(model, torch.rand(2, 3, 12, 12)).layers:
        ...     print(report.name, report.attention, report.grid, report.num_images)
        blocks.0.attn position (6, 6) 2
        blocks.0.attn images (6, 6) 2
    """
    if images is not None and not isinstance(images, (Tensor, Mapping)):
        raise TypeError(f'images={shown(images)} must be a tensor (B, C, H, W): give the size of a grid as size=…')
    parts = ('position',) if images is None else ('position', 'all')
    seen = dict(position='position', all='images')
    found = maps_of_layers(model, images, size, parts, layers, call)
    return HeadReport(tuple(layer_report(maps, name, layer, seen[part]) for name, layer, part, maps in found))


@torch.no_grad()
def layer_report(
    maps: MeanAttention, name: str = '', layer: Optional[AttentionLayer] = None, attention: str = 'position'
) -> 'LayerReport':
    """Reports what the heads of given attention maps do.

    Args:
        maps (MeanAttention): The maps.
        name (str): Name of the layer. Defaults to none.
        layer (AttentionLayer, optional): The layer, whose value matrices weigh the heads in the errors of convolutions.
            Defaults to heads of equal weight, each with an output of its own.
        attention (str): See :class:`LayerReport`. Defaults to ``'position'``.

    Raises:
        ValueError: See :func:`head_report`.

    Examples:
        >>> probs = torch.stack([torch.eye(36), torch.full((36, 36), 1 / 36)])
        >>> report = layer_report(MeanAttention(probs, (6, 6)))
        >>> print(report.summary)
        5x5 convolution, error 0.138
        >>> print(report.heads[1].criterion, report.heads[1].why)
        entropy relative entropy 1 > 0.99
    """
    shifts = ShiftMaps(maps)
    padding_mode, values = ('replicate', None) if layer is None else (layer.padding_mode, layer.value_matrices())
    convolutions = tuple(nearest_convolutions(shifts, padding_mode, values))
    by_position = maps.num_images == 0 and (layer is None or not layer.depends_on_content)
    heads = tuple(_head_statistics(maps, shifts, by_position))
    spanned = tuple(spanned_kernels(shifts))
    return LayerReport(maps.grid, name, attention, maps.num_images, convolutions, spanned, heads)


def _head_statistics(maps: MeanAttention, shifts: ShiftMaps, by_position: bool) -> Iterator['HeadStatistics']:
    """Yields the numbers of each head; for position-only attention also of its parameters, and degenerate heads."""
    gaussian = maps.gaussian if by_position else None
    degenerate: Dict[int, DegenerateHead] = {}
    if by_position:
        criteria = ['entropy', 'duplicate'] if gaussian is None else ['uniform', 'stripe', 'entropy', 'duplicate']
        degenerate = {head.head: head for head in degenerate_heads_of_maps(shifts.probs, criteria, gaussian).found}
    if gaussian is None:
        center, covariance = moments(shifts.interior_sums, [n - 1 for n in maps.grid])  # from shift 0
    else:
        center, (inverse, info) = gaussian[0], torch.linalg.inv_ex(gaussian[1])
        covariance = torch.where(info[:, None, None] == 0, inverse.mT @ inverse, float('inf'))  # Σ = M⁻ᵀ M⁻¹
    relative_entropy, entropy = maps.relative_entropy, maps.entropy
    if relative_entropy is None:
        relative_entropy = relative_entropy_of_maps(shifts.probs)
    if entropy is None:
        entropy = relative_entropy.double() * math.log(shifts.probs.shape[-1])
    numbers = dict(
        center=center,
        covariance=covariance,
        entropy=entropy,
        relative_entropy=relative_entropy,
        distance=mean_distance(shifts),
        mass_3x3=window_mass(shifts, 3),
        mass_5x5=window_mass(shifts, 5),
        prefix_mass=maps.prefix_mass,
    )
    for head, (shift, share) in enumerate(nearest_shifts(shifts)):
        own: Dict[str, Any] = {name: None if x is None else _finite(x[head]) for name, x in numbers.items()}
        kind = 'hard' if share >= HARD else 'uniform' if own['relative_entropy'] > UNIFORM else 'soft'
        found = degenerate.get(head)
        is_degenerate = found is not None if by_position else None
        criterion, why = (found.criterion, found.reason) if found else (None, None)
        yield HeadStatistics(head, shift, share, kind, is_degenerate, criterion, why, **own)


def _finite(values: Tensor) -> Any:
    """Returns a tensor as a number or as tuples; None if it is not finite."""
    if not values.isfinite().all():
        return None
    return tuple(map(_finite, values)) if values.ndim else values.item()


@dataclass(frozen=True)
class HeadStatistics:
    """The numbers of a head; shifts δ = k − q are (row, column) in tokens.

    Attributes:
        head (int): Index of the head.
        center (tuple[float, float] | None): Δ of Gaussian heads, or the mean shift at interior queries; None without
            any probability in the grid.
        covariance (tuple[tuple[float, float], ...] | None): Σ, or that of the shift; None where it is infinite.
        entropy (float): Entropy in nats, mean over queries. For attention to images it is the mean over these too, and
            not the entropy of the mean attention, which is larger.
        relative_entropy (float): The entropy relative to that of uniform attention on the grid, 0 to 1; of windows, to
            that of uniform attention to the keys that each query sees.
        distance (float | None): Distance to the keys in tokens, by their probabilities, mean over all queries that see
            no zero padding; None without any probability in the grid.
        mass_3x3, mass_5x5 (float): Probability of the 3x3 and 5x5 keys around the query, mean over interior queries.
        nearest_shift (tuple[int, int]): The δ that gets most, see :func:`.shift_statistics.nearest_shifts`.
        share (float): P[q, q + δ] of the nearest shift, mean over interior queries. If the shift leaves the grid from
            one of these, the mean is over all queries from which it stays. If these are less than a quarter of the
            queries, it is over all queries, with the nearest key of the grid instead of a q + δ outside.
        kind (str): ``'hard'`` if the share is 0.9 or more, else ``'uniform'`` if the relative entropy is above 0.99,
            else ``'soft'``.
        degenerate (bool | None): Whether a criterion of :func:`~attncnn_plugin.pruning.find_degenerate_heads` finds the
            head; None where scores depend on content.
        criterion, why (str | None): The first criterion that finds it, and its value and threshold in words.
        prefix_mass (float | None): For a vision transformer of another library, the probability that patches give to
            tokens that are no patches, mean over patches and images. Those that they give to patches were renormalized.
            None for other models.
    """

    head: int
    nearest_shift: Shift
    share: float
    kind: str
    degenerate: Optional[bool]
    criterion: Optional[str]
    why: Optional[str]
    center: Optional[Tuple[float, float]]
    covariance: Optional[Tuple[Tuple[float, float], ...]]
    entropy: float
    relative_entropy: float
    distance: Optional[float]
    mass_3x3: float
    mass_5x5: float
    prefix_mass: Optional[float] = None

    def row(self) -> List[str]:
        """Returns the cells of the table."""
        spread = [math.sqrt(max(own[i], 0.0)) for i, own in enumerate(self.covariance)] if self.covariance else None
        cells = [str(self.head)]
        for pair in (self.center, spread):
            cells.append('-' if pair is None else '({:.3g}, {:.3g})'.format(*(round(own, 2) + 0.0 for own in pair)))
        cells += [f'{self.relative_entropy:.0%}', f'{self.mass_3x3:.0%}', f'{self.nearest_shift} {self.share:.0%}']
        return [*cells, self.kind] + ([] if self.prefix_mass is None else [f'{self.prefix_mass:.0%}'])


@dataclass(frozen=True)
class LayerReport:
    """The numbers of a layer and its heads; as a string, sentences and a table.

    Attributes:
        grid (tuple[int, int]): Height and width of the grid in tokens.
        name (str): Name of the layer in its model, empty for a layer by itself.
        attention (str): ``'position'`` for the positional part, ``'images'`` for the whole attention to images.
        num_images (int): Number of images that it is a mean over, 0 for what depends only on position.
        convolutions (tuple[NearestConvolution, ...]): The nearest 3x3 and 5x5 convolution, without a kernel that is
            larger than the grid; for an ``ImageAttention`` that of only its window.
        spanned (tuple[Expressibility, ...]): How near the heads come to all 3x3 and 5x5 kernels at interior queries,
            whatever their value matrices, see :func:`~attncnn_plugin.convert.expressible_shifts`, without a kernel that
            is larger than the grid. Empty for an ``ImageAttention`` whose queries are not the pixels.
        heads (tuple[HeadStatistics, ...]): The heads.
    """

    grid: Shift
    name: str
    attention: str
    num_images: int
    convolutions: Tuple[NearestConvolution, ...]
    spanned: Tuple[Expressibility, ...]
    heads: Tuple[HeadStatistics, ...]

    @property
    def best(self) -> Optional[NearestConvolution]:
        """The smallest of the convolutions whose error is the least, to 0.01; None without any."""
        least = min((entry.error for entry in self.convolutions), default=0.0)
        return next((entry for entry in self.convolutions if entry.error <= least + NEARLY), None)

    @property
    def summary(self) -> str:
        """The nearest convolution in words, such as ``'3x3 convolution, error 0'``."""
        return str(self.best or 'smaller than a 3x3 kernel')

    def to_dict(self) -> Dict[str, Any]:
        """Returns all numbers as data for JSON."""
        return {**asdict(self), 'summary': self.summary, 'best': self.best and asdict(self.best)}

    def __str__(self) -> str:
        return f'{self.sentences}\n{self.table}'

    @property
    def sentences(self) -> str:
        """What the layer is, what convolutions it is near, and its degenerate heads, in lines of 80 characters."""
        part = ['by position'] if self.attention == 'position' else []
        part += [f'mean over {self.num_images} images'] if self.num_images else []
        part += [f'{self.grid[0]}x{self.grid[1]} tokens', f'{len(self.heads)} heads']
        lines = [f'{self.name or "layer"}: {", ".join(part)}' + (f': {self.summary}' if self.best is None else '')]
        for entry in self.convolutions:
            best = ' (nearest)' if entry is self.best and len(self.convolutions) > 1 else ''
            lines.append(f'  {entry}, {error_text(entry.interior_error)} inside{best}')
        lines += [f'  {kernel}' for kernel in self.spanned]
        lines += [f'  head {own.head} is degenerate, {own.criterion}: {own.why}' for own in self.heads if own.why]
        return '\n'.join(textwrap.fill(line, 80, subsequent_indent='    ') for line in lines)

    @property
    def table(self) -> str:
        """A row for each head."""
        extra = [] if self.heads[0].prefix_mass is None else ['other']
        return table([COLUMNS + extra, *(head.row() for head in self.heads)])


@dataclass(frozen=True)
class HeadReport:
    """The reports of the layers of a model; as a string, one after the other, then a table with a row for each.

    As a string, heads that look like those of a layer before are not repeated.

    Attributes:
        layers (tuple[LayerReport, ...]): In the order of the blocks. A layer can have one by position and one of its
            attention to images.
    """

    layers: Tuple[LayerReport, ...]

    def to_dict(self, **origin: Any) -> Dict[str, Any]:
        """Returns all numbers as data for JSON.

        Args:
            origin: Further entries, for instance the model and the checkpoint that it is of.

        Examples:
            >>> HeadReport(()).to_dict(model='sa_quadratic_cifar')
            {'model': 'sa_quadratic_cifar', 'layers': []}
        """
        return {**origin, 'layers': [report.to_dict() for report in self.layers]}

    def __str__(self) -> str:
        rows, texts = [MODEL_COLUMNS], []
        first: Dict[str, LayerReport] = {}
        for report in self.layers:
            heads = report.heads
            means = [f'{fmean(own):.0%}' for own in zip(*((head.mass_3x3, head.mass_5x5) for head in heads))]
            span = f'{report.spanned[0].error:.1%}' if report.spanned else '-'
            nearest = report.summary.replace(' convolution', '').replace(', error', ':')
            rows.append([report.name, report.attention, str(len(heads)), *means, span, nearest])
            alike = first.setdefault(report.table, report)
            texts.append(str(report) if alike is report else f'{report.sentences}\n  heads as those of {alike.name}')
        return '\n\n'.join([*texts, table(rows)])
