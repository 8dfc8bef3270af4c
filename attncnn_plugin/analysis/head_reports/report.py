"""The numbers of a head report as data, as JSON and as text.

They say of a head where it looks and how widely, as figures 3 to 10 of Cordonnier et al. 2020 (C20) show it, and of a
layer how near it is to a convolution (C20, Theorem 1 and Lemma 3).
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

from .kinds import EXACT, HARD, UNIFORM, LayerKind, error_text, size_text
from .shift_maps import LEAST_QUERIES, Shift


@dataclass(frozen=True)
class HeadStatistics:
    """The numbers of a head; shifts δ = k − q are (row, column) in tokens.

    Attributes:
        head (int): Index of the head.
        source (str): Where centre and width come from: ``'parameters'`` of Gaussian heads, or ``'moments'`` of the
            probabilities at interior queries.
        center (tuple[float, float] | None): Δ, or the mean shift; None without any probability in the grid.
        alpha (float | None): α of round Gaussian heads, Σ⁻¹ = 2α·I (C20, eq. 9); None for others.
        covariance (tuple[tuple[float, float], ...] | None): Σ, or that of the shift; None where it is infinite.
        entropy (float): Entropy in nats, mean over queries. For attention to images it is the mean over these too, and
            not the entropy of the mean attention, which is larger.
        relative_entropy (float): The entropy relative to that of uniform attention on the grid, 0 to 1; of windows, to
            that of uniform attention to the keys that each query sees.
        distance (float | None): Distance to the keys in tokens, by their probabilities, mean over all queries that see
            no zero padding; None without any probability in the grid.
        mass_3x3, mass_5x5 (float): Probability of the 3x3 and 5x5 keys around the query, mean over interior queries.
        nearest_shift (tuple[int, int]): The δ that gets most, see :func:`.shift_maps.nearest_shifts`.
        share (float): P[q, q + δ] of the nearest shift, mean over interior queries. If the shift leaves the grid from
            one of these, the mean is over all queries from which it stays. If these are less than a quarter of the
            queries, it is over all queries, with the nearest key of the grid in the place of a q + δ outside.
        kind (str): ``'hard'``, ``'soft'`` or ``'uniform'``, see
            :func:`.kinds.head_kind`.
        degenerate (bool | None): Whether a criterion of :func:`~attncnn_plugin.pruning.find_degenerate_heads` finds the
            head; None where scores depend on content.
        criterion, why (str | None): The first criterion that finds it, and its value and threshold in words.
        shares (tuple[tuple[float | None, ...], ...]): Shares of the 7x7 shifts −3 … 3, row by row; None for those that
            stay in the grid from less than a quarter of the queries.
        prefix_mass (float | None): For a vision transformer of timm or mmpretrain, the probability that patches give to
            tokens that are no patches, mean over patches and images. Those that they give to patches were renormalized.
            None for other models.
    """

    head: int
    source: str
    center: Optional[Tuple[float, float]]
    alpha: Optional[float]
    covariance: Optional[Tuple[Tuple[float, float], ...]]
    entropy: float
    relative_entropy: float
    distance: Optional[float]
    mass_3x3: float
    mass_5x5: float
    nearest_shift: Shift
    share: float
    kind: str
    degenerate: Optional[bool]
    criterion: Optional[str]
    why: Optional[str]
    shares: Tuple[Tuple[Optional[float], ...], ...]
    prefix_mass: Optional[float] = None

    @property
    def width_text(self) -> str:
        """Standard deviation in tokens.

        A head that is not round, to 1e-6, has one along each principal axis, and the angle of the longer axis: 0° is
        down, 90° to the right.
        """
        if self.covariance is None:
            return 'inf'
        (a, b), (_, d) = self.covariance
        middle, radius = (a + d) / 2, math.hypot((a - d) / 2, b)
        major, minor = (math.sqrt(max(value, 0.0)) for value in (middle + radius, middle - radius))
        if major < EXACT:
            return '0'
        if radius <= EXACT * middle:
            return f'{major:.3g}'
        angle = round(math.degrees(math.atan2(2 * b, a - d)) / 2) % 180
        return f'{major:.3g} x {minor:.3g} at {angle}°'

    def row(self) -> List[str]:
        """The cells of the table."""
        center = '-' if self.center is None else '({:.2f}, {:.2f})'.format(*(round(v, 2) + 0.0 for v in self.center))
        why = [] if self.degenerate is None else [f'{self.criterion}: {self.why}' if self.degenerate else 'no']
        cells = [
            str(self.head),
            center,
            self.width_text,
            f'{self.entropy:.2f} ({self.relative_entropy:.0%})',
            f'{self.mass_3x3:.3f}',
            f'{self.mass_5x5:.3f}',
            f'({self.nearest_shift[0]}, {self.nearest_shift[1]})',
            f'{self.share:.3f}',
            self.kind,
        ]
        return cells + ([] if self.prefix_mass is None else [f'{self.prefix_mass:.3f}']) + why


COLUMNS = ['head', 'centre', 'std', 'entropy', '3x3', '5x5', 'nearest shift', 'share', 'kind']


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


@dataclass(frozen=True)
class LayerReport:
    """The numbers of a layer and its heads; as a string, sentences and a table.

    Attributes:
        grid (tuple[int, int]): Height and width of the grid in tokens.
        num_heads (int): Number of heads N_h.
        kind (LayerKind): The kind of the layer by what its heads form together.
        convolutions (tuple[BestConvolution, ...]): The best 3x3 and 5x5 convolution; for an ``ImageAttention`` that of
            its window alone. Empty without heads.
        expressible (tuple[ExpressibleShifts, ...]): The shifts of 3x3 and 5x5 kernels, without a kernel that is larger
            than the grid. Empty for an ``ImageAttention`` whose queries are not the pixels.
        heads (tuple[HeadStatistics, ...]): The heads.
        name (str): Name of the layer in its model, empty for a layer by itself.
        attention (str): ``'position'`` for the positional part, ``'images'`` for the whole attention to images.
        num_images (int): Number of images that it is a mean over, 0 for what depends on position alone.
    """

    grid: Shift
    num_heads: int
    kind: LayerKind
    convolutions: Tuple[BestConvolution, ...]
    expressible: Tuple[ExpressibleShifts, ...]
    heads: Tuple[HeadStatistics, ...]
    name: str = ''
    attention: str = 'position'
    num_images: int = 0

    @property
    def summary(self) -> str:
        """The heads' common work in words, such as ``'one convolution, 3x3, error 0'``."""
        return str(self.kind)

    @property
    def best(self) -> Optional[BestConvolution]:
        """The smallest of the convolutions whose error, to 1e-6, is the least; None without heads."""
        least = min((entry.error for entry in self.convolutions), default=0.0)
        return next((entry for entry in self.convolutions if entry.error <= least + EXACT), None)

    @property
    def best_text(self) -> str:
        """The nearest convolution in words: that of the shifts of the hard heads, or the best one."""
        best = self.best
        if best is None or self.kind.error is not None and self.kind.error < best.error - EXACT:
            return self.summary
        return f'{size_text(best.kernel_size)}, error {error_text(best.error)}'

    def to_dict(self) -> Dict[str, Any]:
        """Data for JSON, None in the place of a number that is not finite."""
        return json_ready(
            {
                **dataclasses.asdict(self),
                'summary': self.summary,
                'best': None if self.best is None else dataclasses.asdict(self.best),
            }
        )

    def __str__(self) -> str:
        part = ['by position'] if self.attention == 'position' else []
        part += [f'mean over {self.num_images} images'] if self.num_images else []
        grid = f'{size_text(self.grid)} tokens, {self.num_heads} heads'
        lines = [f'{self.name or "layer"}: {", ".join(part)}, {grid}: {self.summary}']
        for entry in self.convolutions:
            inside = '' if entry.interior_error is None else f', {error_text(entry.interior_error)} inside'
            best = ' (best)' if entry is self.best and len(self.convolutions) > 1 else ''
            lines.append(f'  {size_text(entry.kernel_size)} convolution{best}: error {error_text(entry.error)}{inside}')
        for kernel in self.expressible:
            count, total = len(kernel.expressible), len(kernel.residual)
            named = ': ' + ' '.join(map(str, kernel.expressible)) if 0 < count < total else ''
            left = f', residuals {min(kernel.residual):.3g} to {max(kernel.residual):.3g}' if count < total else ''
            lines.append(f'  {size_text(kernel.kernel_size)} shifts expressible: {count} of {total}{named}{left}')
        return '\n'.join(lines + self._table())

    def _table(self) -> List[str]:
        if not self.heads:
            return []
        extra = [] if self.heads[0].prefix_mass is None else ['no patch']
        extra += [] if self.heads[0].degenerate is None else ['degenerate']
        rows = [COLUMNS + extra] + [head.row() for head in self.heads]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return ['  ' + '  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


# The numbers behind the words of a report, for its JSON.
THRESHOLDS_OF_KINDS = {
    'hard_share': HARD,
    'uniform_relative_entropy': UNIFORM,
    'exact_error': EXACT,
    'least_queries': LEAST_QUERIES,
}


def json_ready(value: Any) -> Any:
    """Data for JSON: tuples as lists, None in the place of a number that is not finite.

    Examples:
        >>> json_ready({'center': (0.5, float('inf'))})
        {'center': [0.5, None]}
    """
    if isinstance(value, dict):
        return {name: json_ready(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
