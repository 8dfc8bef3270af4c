"""Degenerate heads (Cordonnier et al. 2020 (C20), 4.3 and appendix E): uniform, a stripe, or the same as another head.

A Gaussian head, quadratic or generalized quadratic, has the eigenvalues λ₁ ≥ λ₂ of Σ⁻¹ = MMᵀ, in 1/tokens². With λ₁
near 0 it attends to all keys alike, with λ₁ ≫ λ₂ to a stripe. All of position is computed in float64 on the CPU.
Attention that depends on content is judged by what it does on images, in means over these of the criteria: a mean of
the attention maps would call two heads alike that look at different things in each image.
"""

import math
import operator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.attention_layer import AttentionLayer
from ..attention.positions import GaussianHeads
from ..attention.window import per_axis, shown
from ..convert.shift_operators import check_position_only

Criterion = Union[str, Dict[str, Any]]
Measures = Mapping[str, Callable[[], Tensor]]

THRESHOLDS = {'uniform': 1e-5, 'stripe': 1e3, 'entropy': 0.99, 'duplicate': 0.01}
THRESHOLDS_OF_OBSERVED = {'uniform': 0.01, 'entropy': 0.99, 'duplicate': 0.01}
REASONS = {
    'uniform': 'largest eigenvalue {0.value:.3g} < {0.threshold:.3g}',
    'stripe': 'condition number {0.value:.3g} > {0.threshold:.3g}',
    'entropy': 'relative entropy {0.value:.4g} > {0.threshold:.4g}',
    'duplicate': 'distance {0.value:.3g} < {0.threshold:.3g} from head {0.duplicate_of}',
    'importance': 'importance {0.value:.3g}',
}
REASONS_OF_OBSERVED = {**REASONS, 'uniform': 'distance {0.value:.3g} < {0.threshold:.3g} from uniform attention'}


@dataclass(frozen=True)
class DegenerateHead:
    """A head that can go, degenerate or one of the least important, and the criterion that found it.

    Attributes:
        head (int): Index of the head.
        criterion (str): Name of the criterion.
        value (float): The value compared with the threshold.
        threshold (float | None): The threshold; None for the importance of a head.
        duplicate_of (int | None): Of a duplicate, the kept head that it is nearest to. Adding the duplicate's slice of
            the value matrix to that of this head makes up for its removal, see
            :func:`~attncnn_plugin.pruning.prune.merge_duplicate`.
        observed (bool): Whether the value is a mean over images.
    """

    head: int
    criterion: str
    value: float
    threshold: Optional[float] = None
    duplicate_of: Optional[int] = None
    observed: bool = False

    @property
    def reason(self) -> str:
        """Value and threshold in words."""
        reasons = REASONS_OF_OBSERVED if self.observed else REASONS
        return reasons[self.criterion].format(self)


@dataclass(frozen=True)
class DegeneracyReport:
    """The heads of a layer that can go; as a string, a table.

    Attributes:
        num_heads (int): Number of heads N_h of the layer.
        found (tuple[DegenerateHead, ...]): These heads by rising index, each once.
        kind (str): What the table calls them. Defaults to ``'degenerate'``.
    """

    num_heads: int
    found: Tuple[DegenerateHead, ...]
    kind: str = 'degenerate'

    @property
    def heads(self) -> List[int]:
        """Indices of these heads, rising."""
        return [entry.head for entry in self.found]

    def __str__(self) -> str:
        lines = [f'{len(self.found)} of {self.num_heads} heads {self.kind}']
        if self.found:
            rows = [('head', 'criterion', 'why')] + [(str(e.head), e.criterion, e.reason) for e in self.found]
            width = max(len(name) for _, name, _ in rows)
            lines += [f'{head:>4}  {name:<{width}}  {why}'.rstrip() for head, name, why in rows]
        return '\n'.join(lines)


class ObservedAttention:
    """Means over images of what the criteria of degenerate heads ask for.

    Args:
        num_heads (int): Number of heads N_h.

    Attributes:
        entropy (Tensor): Sum over images of each head's entropy, relative to that of uniform attention, ``(N_h,)``.
        from_uniform (Tensor): The same of its distance from uniform attention in total variation, ``(N_h,)``.
        distances (Tensor): The same of the distances between heads, ``(N_h, N_h)``.
        count (Tensor): The number of images, or of windows of images. All are of float64, on the CPU.

    Examples:
        >>> observed = ObservedAttention(2)
        >>> observed.add(torch.stack([torch.eye(4), torch.full((4, 4), 0.25)])[None])
        >>> observed.mean('entropy'), observed.mean('distances')[0, 1].item()
        (tensor([0., 1.], dtype=torch.float64), 0.75)
    """

    def __init__(self, num_heads: int) -> None:
        self.entropy = torch.zeros(num_heads, dtype=torch.float64)
        self.from_uniform = torch.zeros(num_heads, dtype=torch.float64)
        self.distances = torch.zeros(num_heads, num_heads, dtype=torch.float64)
        self.count = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def add(self, probs: Tensor) -> None:
        """Adds the probabilities of some images, ``(B, N_h, Q, K)``."""
        self.entropy += relative_entropy_of_maps(probs).double().sum(0).cpu()
        self.from_uniform += ((probs - 1 / probs.shape[-1]).abs().sum(-1).mean(-1) / 2).double().sum(0).cpu()
        for maps in probs:
            self.distances += map_distances(maps).double().cpu()
        self.count += len(probs)

    def mean(self, name: str) -> Tensor:
        """Returns the mean over images of one of the sums."""
        return getattr(self, name) / self.count


@torch.no_grad()
def find_degenerate_heads(
    layer: AttentionLayer,
    criteria: Sequence[Criterion] = ('uniform', 'stripe'),
    size: Union[int, Sequence[int], None] = None,
) -> DegeneracyReport:
    """Finds the heads that a layer can do without: those that take a mean over the grid, or repeat another head.

    It reads the parameters alone and computes in float64 on the CPU: equal layers have equal reports on every rank.

    Args:
        layer (AttentionLayer): ``QuadraticAttention``, ``GeneralizedQuadraticAttention`` or ``LearnedAttention``.
        criteria (Sequence): Each a name, or a ``dict(type=name, threshold=number)``. A head is degenerate if any of
            them says so; the report has the first.

            - ``'uniform'``: the largest eigenvalue of Σ⁻¹, 2α for the quadratic encoding, is below 1e-5 (C20, appendix
              E): all keys are attended to alike. For Gaussian heads alone.
            - ``'stripe'``: the condition number of Σ⁻¹ is above 1000 (released code of C20; appendix E has 1e5). It is
              1 for a quadratic head and for Σ⁻¹ = 0. For Gaussian heads alone.
            - ``'entropy'``: the entropy, mean over queries, is above 0.99 of that of uniform attention: all keys of
              the grid are attended to almost alike.
            - ``'duplicate'``: the map of an earlier head is nearer than 0.01 in total variation, mean over queries
              (C20, 4.3, has such heads with the learned encoding). Only heads that no other criterion finds are
              compared, wherever it stands among the criteria. The first of a group is kept. Each head is compared
              with kept ones, so that a chain of small steps does not lead away from them.

            Defaults to ``('uniform', 'stripe')``.
        size (int | Sequence[int], optional): Height and width of the grid in tokens, for ``'entropy'`` and
            ``'duplicate'``. Defaults to None.

    Returns:
        DegeneracyReport: The degenerate heads, with criterion and value.

    Raises:
        TypeError: ``layer`` is no attention of this package, or has no Σ⁻¹ for a criterion of Gaussian heads.
        ValueError: The probabilities of ``layer`` depend on content; a criterion that is unknown or has other settings;
            no ``size`` for a criterion that needs one; parameters that are not finite.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=3)
        >>> layer.encoding.center.data = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.9]])
        >>> layer.encoding.sqrt_precision.data = torch.tensor([1.0, 1e-4, 1.0])
        >>> report = find_degenerate_heads(layer, ['uniform', dict(type='duplicate', threshold=0.05)], size=(16, 16))
        >>> print(report)
        2 of 3 heads degenerate
        head  criterion  why
           1  uniform    largest eigenvalue 1e-08 < 1e-05
           2  duplicate  distance 0.0352 < 0.05 from head 0
        >>> report.heads
        [1, 2]
    """
    check_position_only(layer)
    rules = _rules(criteria, THRESHOLDS)
    grid = None if size is None else per_axis('size', size, 2)
    measures = _measures(lambda: gaussian_factor(layer), lambda: exact_maps(layer, grid))
    return _find(layer.num_heads, rules, measures)


@torch.no_grad()
def degenerate_heads_of_maps(
    maps: Tensor,
    criteria: Sequence[Criterion] = ('entropy', 'duplicate'),
    gaussian: Optional[GaussianHeads] = None,
) -> DegeneracyReport:
    """Finds the degenerate heads by given attention maps, see :func:`find_degenerate_heads`.

    Args:
        maps (Tensor): The probabilities of the heads, ``(N_h, Q, K)``.
        criteria (Sequence): As for :func:`find_degenerate_heads`. Defaults to ``('entropy', 'duplicate')``.
        gaussian (GaussianHeads, optional): Centres and widths of Gaussian heads, for ``'uniform'`` and ``'stripe'``.
            Defaults to None.

    Returns:
        DegeneracyReport: The degenerate heads, with criterion and value.

    Raises:
        TypeError: A criterion of Gaussian heads without ``gaussian``.
        ValueError: A criterion that is unknown or has other settings; values that are not finite.

    Examples:
        >>> uniform, identity = torch.full((9, 9), 1 / 9), torch.eye(9)
        >>> print(degenerate_heads_of_maps(torch.stack([identity, uniform, identity])))
        2 of 3 heads degenerate
        head  criterion  why
           1  entropy    relative entropy 1 > 0.99
           2  duplicate  distance 0 < 0.01 from head 0
    """

    def factor() -> Tensor:
        if gaussian is None:
            raise TypeError(
                "the criteria 'uniform' and 'stripe' are for Gaussian heads: give their centres and widths as "
                "gaussian, or use the criteria 'entropy' and 'duplicate'"
            )
        return gaussian.factor

    measures = _measures(factor, lambda: check_finite_maps(maps.cpu().double()))
    return _find(len(maps), _rules(criteria, THRESHOLDS), measures)


@torch.no_grad()
def degenerate_heads_of_observed(
    observed: ObservedAttention, criteria: Sequence[Criterion] = ('entropy', 'duplicate')
) -> DegeneracyReport:
    """Finds the degenerate heads of attention that depends on content, by what it did on images.

    Args:
        observed (ObservedAttention): Means over images of what the layer attended to.
        criteria (Sequence): As for :func:`find_degenerate_heads`, in means over images. ``'uniform'`` is a distance
            from uniform attention below 0.01, in total variation; there is no ``'stripe'``. Defaults to
            ``('entropy', 'duplicate')``.

    Returns:
        DegeneracyReport: The degenerate heads, with criterion and value.

    Raises:
        TypeError: The criterion ``'stripe'``, which is for Gaussian heads.
        ValueError: No images were observed; a criterion that is unknown or has other settings; values that are not
            finite.

    Examples:
        >>> uniform, identity = torch.full((9, 9), 1 / 9), torch.eye(9)
        >>> observed = ObservedAttention(3)
        >>> observed.add(torch.stack([identity, uniform, identity]).expand(2, -1, -1, -1))
        >>> print(degenerate_heads_of_observed(observed, ['uniform', 'duplicate']))
        2 of 3 heads degenerate
        head  criterion  why
           1  uniform    distance 0 < 0.01 from uniform attention
           2  duplicate  distance 0 < 0.01 from head 0
    """
    rules = _rules(criteria, THRESHOLDS_OF_OBSERVED)
    if not observed.count:
        raise ValueError('no images were observed: attention that depends on content is judged by what it does on some')
    if not observed.distances.isfinite().all():
        raise ValueError('the attention of layer has values that are not finite: its parameters must be finite')
    measures = {
        'uniform': lambda: observed.mean('from_uniform'),
        'entropy': lambda: observed.mean('entropy'),
        'duplicate': lambda: observed.mean('distances'),
    }
    report = _find(len(observed.entropy), rules, measures)
    return replace(report, found=tuple(replace(head, observed=True) for head in report.found))


def _measures(factor: Callable[[], Tensor], maps: Callable[[], Tensor]) -> Measures:
    """Returns what the criteria compare, by Σ⁻¹ = MMᵀ of Gaussian heads and by attention maps."""
    maps = lru_cache(maxsize=None)(maps)
    return {
        'uniform': lambda: largest_eigenvalue(factor()),
        'stripe': lambda: condition_number(factor()),
        'entropy': lambda: relative_entropy_of_maps(maps()),
        'duplicate': lambda: map_distances(maps()),
    }


def _rules(criteria: Sequence[Criterion], thresholds: Dict[str, float]) -> List[Tuple[str, float]]:
    """Returns the name of each criterion, and its threshold."""
    if not isinstance(criteria, (list, tuple)) or not criteria:
        raise ValueError(f"criteria={shown(criteria)} must be a list of at least one criterion, such as ['uniform']")
    rules = []
    for criterion in criteria:
        settings = dict(criterion) if isinstance(criterion, dict) else {'type': criterion}
        name = settings.pop('type', None)
        if not isinstance(name, str) or name not in THRESHOLDS or settings.keys() - {'threshold'}:
            raise ValueError(
                f'criterion {criterion!r} is unknown: choose one of {tuple(THRESHOLDS)} or '
                'dict(type=name, threshold=number)'
            )
        if name not in thresholds:
            raise TypeError(
                f'the criterion {name!r} is for Gaussian heads, of attention by positions alone: for others use the '
                f'criteria {tuple(thresholds)}'
            )
        threshold = settings.get('threshold', thresholds[name])
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not threshold >= 0:
            raise ValueError(f'threshold={threshold!r} of criterion {name!r} must be a number, 0 or more')
        rules.append((name, threshold))
    return rules


def _find(num_heads: int, rules: List[Tuple[str, float]], measures: Measures) -> DegeneracyReport:
    """Returns the heads that the rules find, each under the first; duplicates are among the heads that are left.

    ``measures`` are called where a rule needs them.
    """
    found: Dict[int, DegenerateHead] = {}
    for name, threshold in sorted(rules, key=lambda rule: rule[0] == 'duplicate') if num_heads else ():
        values = measures[name]()
        if name == 'duplicate':
            some = _duplicates(values, [head for head in range(num_heads) if head not in found], threshold)
        else:
            exceeds = operator.lt if name == 'uniform' else operator.gt
            degenerate = [head for head in range(num_heads) if exceeds(values[head], threshold)]
            some = (DegenerateHead(head, name, float(values[head]), threshold) for head in degenerate)
        for entry in some:
            found.setdefault(entry.head, entry)
    return DegeneracyReport(num_heads, tuple(found[head] for head in sorted(found)))


def _duplicates(distances: Tensor, heads: List[int], threshold: float) -> Iterator[DegenerateHead]:
    """Yields the heads that are near an earlier one of them which is kept, by their distances ``(N_h, N_h)``."""
    kept: List[int] = []
    for head in heads:
        of_head = distances[head].tolist()
        distance, nearest = min(((of_head[other], other) for other in kept), default=(1.0, None))
        if nearest is not None and distance < threshold:
            yield DegenerateHead(head, 'duplicate', distance, threshold, nearest)
        else:
            kept.append(head)


def relative_entropy_of_maps(maps: Tensor) -> Tensor:
    """Computes the entropy of attention maps, mean over queries, relative to that of uniform attention.

    Args:
        maps (Tensor): Probabilities, ``(…, Q, K)``.

    Returns:
        Tensor: ``(…,)``, from 0, one key for each query, to 1, all keys alike.

    Raises:
        ValueError: There is a single key, to which every head is uniform.

    Examples:
        >>> relative_entropy_of_maps(torch.stack([torch.eye(4), torch.full((4, 4), 0.25)]))
        tensor([0., 1.])
    """
    if maps.shape[-1] < 2:
        raise ValueError('the grid is a single token, on which every head is uniform: at least two are needed')
    entropy = torch.special.entr(maps).sum(-1).mean(-1)  # −Σ_k P[q, k] log P[q, k]
    return (entropy / math.log(maps.shape[-1])).clamp(max=1)


def least_uniform_head(layer: AttentionLayer, size: Union[int, Sequence[int]]) -> int:
    """Returns the head to keep if one has to be: that of the lowest entropy, the first of equal ones.

    Args:
        layer (AttentionLayer): Attention by positions alone.
        size (int | Sequence[int]): Height and width of the grid in tokens.

    Raises:
        TypeError: ``layer`` is no attention of this package.
        ValueError: ``layer`` has no heads, or as :func:`exact_maps`.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=3)
        >>> layer.encoding.sqrt_precision.data = torch.tensor([0.1, 2.0, 0.0])
        >>> least_uniform_head(layer, size=(8, 8))
        1
    """
    if layer.num_heads == 0:
        raise ValueError('layer has num_heads=0, but at least one head is needed to keep one')
    return int(relative_entropy_of_maps(exact_maps(layer, size)).argmin())


def exact_maps(layer: AttentionLayer, size: Union[int, Sequence[int], None]) -> Tensor:
    """Computes the probabilities of every query for every key of a grid, ``(N_h, H*W, H*W)``, float64 on the CPU.

    Raises:
        TypeError: ``layer`` is no attention of this package.
        ValueError: The probabilities of ``layer`` depend on content; ``size`` is no size of a grid; the parameters give
            probabilities that are not finite.
    """
    check_position_only(layer)
    if size is None:
        raise ValueError('size=None, but attention maps are those of a grid: give its height and width in tokens')
    return check_finite_maps(layer.exact_attention_probs(per_axis('size', size, 2)))


def check_finite_maps(maps: Tensor) -> Tensor:
    """Returns maps, if all their values are finite.

    Raises:
        ValueError: Some are not.
    """
    if not maps.isfinite().all():
        raise ValueError('the attention maps of layer hold values that are not finite: its parameters must be finite')
    return maps


def map_distances(maps: Tensor) -> Tensor:
    """Computes the total-variation distances ½ Σ_k |P_h[q, k] − P_g[q, k]| of all pairs of maps, mean over queries.

    Args:
        maps (Tensor): ``(N_h, Q, K)``.

    Returns:
        Tensor: ``(N_h, N_h)``, 0 to 1.

    Examples:
        >>> map_distances(torch.stack([torch.eye(4), torch.full((4, 4), 0.25)]))
        tensor([[0.0000, 0.7500],
                [0.7500, 0.0000]])
    """
    distances = maps.new_zeros(len(maps), len(maps))
    first, second = torch.triu_indices(len(maps), len(maps), offset=1)
    distances[first, second] = F.pdist(maps.flatten(1), p=1) / (2 * maps.shape[1])
    return distances + distances.T


def gaussian_factor(layer: nn.Module) -> Tensor:
    """Returns M with Σ⁻¹ = MMᵀ of each head, ``(N_h, ndim, ndim)``, at least float32, differentiable.

    Raises:
        TypeError: The heads of ``layer`` are not Gaussian.
    """
    heads = layer.gaussian_heads() if isinstance(layer, AttentionLayer) else None
    if heads is None:
        raise TypeError(
            f'layer is a {type(layer).__name__}, but only heads with a quadratic or a generalized quadratic '
            "encoding have a Σ⁻¹: for others use the criteria 'entropy' and 'duplicate'"
        )
    return heads.factor


def largest_eigenvalue(factor: Tensor) -> Tensor:
    """Computes λ₁ of Σ⁻¹ = MMᵀ, ``(N_h,)`` in float64, of M, ``(N_h, ndim, ndim)``."""
    largest, _ = _singular_values(factor)
    return largest.square()


def condition_number(factor: Tensor) -> Tensor:
    """Computes the largest eigenvalue of Σ⁻¹ = MMᵀ over the smallest, 1 for 0, of M, ``(N_h, ndim, ndim)``."""
    largest, smallest = _singular_values(factor)
    return torch.where(largest > 0, (largest / smallest).square(), 1.0)


def determinant(factor: Tensor) -> Tensor:
    """Computes the determinant of M of each head over two axes, ``(N_h,)``."""
    (a, b), (c, d) = (row.unbind(-1) for row in factor.unbind(1))
    return a * d - b * c


def _singular_values(factor: Tensor) -> Tuple[Tensor, Tensor]:
    """Computes the largest and the smallest singular value of M, in float64 on the CPU."""
    if not factor.isfinite().all():
        raise ValueError('the widths of the heads hold values that are not finite, but a width must be finite')
    factor = factor.detach().cpu().double()
    if factor.shape[-1] != 2:
        values = torch.linalg.svdvals(factor)
        return values[:, 0], values[:, -1]
    # (s₁ ± s₂)² = (a ± d)² + (b ∓ c)² for det M ≥ 0, with the signs exchanged otherwise.
    (a, b), (c, d) = (row.unbind(-1) for row in factor.unbind(1))
    largest = (torch.hypot(a + d, b - c) + torch.hypot(a - d, b + c)) / 2
    # s₁ s₂ = |det M|. The products of float32 entries are exact in float64: a singular M has the determinant 0.
    return largest, determinant(factor).abs() / largest
