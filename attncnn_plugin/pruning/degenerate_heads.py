"""Which heads of a position-only attention layer are degenerate (Cordonnier et al. 2020 (C20), 4.3 and appendix E)."""

import operator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from ..attention.attention_layer import AttentionLayer, GaussianHeads
from ..attention.window import per_axis, shown
from ..convert.shift_operators import check_position_only
from .criteria import (
    check_finite_maps,
    condition_number_of_factor,
    exact_maps,
    gaussian_factor,
    largest_eigenvalue_of_factor,
    map_distances,
    relative_entropy_of_maps,
)
from .observed import ObservedAttention

Size = Optional[Tuple[int, ...]]
Function = Callable[[AttentionLayer, Size], Tensor]
Criterion = Union[str, Dict[str, Any], Function]
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
        criterion (str): Name of the criterion, that of the function for a function.
        value (float | None): The value compared with the threshold; None for a function.
        threshold (float | None): The threshold; None for a function, and for the importance of a head.
        duplicate_of (int | None): Of a duplicate, the kept head that it is nearest to. Adding the duplicate's slice of
            the value matrix to that of this head makes up for its removal, see
            :func:`~attncnn_plugin.pruning.merge_duplicate`.
        observed (bool): Whether the value is a mean over images.
    """

    head: int
    criterion: str
    value: Optional[float] = None
    threshold: Optional[float] = None
    duplicate_of: Optional[int] = None
    observed: bool = False

    @property
    def reason(self) -> str:
        """Value and threshold in words, empty for a function."""
        reasons = REASONS_OF_OBSERVED if self.observed else REASONS
        return '' if self.value is None else reasons[self.criterion].format(self)


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


@torch.no_grad()
def find_degenerate_heads(
    layer: AttentionLayer,
    criteria: Sequence[Criterion] = ('uniform', 'stripe'),
    size: Union[int, Sequence[int], None] = None,
) -> DegeneracyReport:
    """Finds the heads that a layer can do without: those that take a mean over the grid, or repeat another head.

    It reads the parameters alone and computes in float64 on the CPU: equal layers have equal reports on every rank.

    Args:
        layer (AttentionLayer): ``QuadraticAttention``, ``GeneralizedQuadraticAttention``, ``LearnedAttention``, or
            ``ContentAttention`` with ``terms=('vr',)``.
        criteria (Sequence): Each a name, a ``dict(type=name, threshold=number)``, or a function. A head is degenerate
            if any of them says so; the report has the first.

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
            - ``function(layer, size)``: gives a bool for each head, ``(N_h,)``.

            Defaults to ``('uniform', 'stripe')``.
        size (int | Sequence[int], optional): Height and width of the grid in tokens, for ``'entropy'``, ``'duplicate'``
            and functions. Defaults to None.

    Returns:
        DegeneracyReport: The degenerate heads, with criterion and value.

    Raises:
        TypeError: ``layer`` is no attention of this package, or has no Σ⁻¹ for a criterion of Gaussian heads.
        ValueError: The probabilities of ``layer`` depend on content; a criterion that is unknown, has other settings or
            gives something else than a bool for each head; no ``size`` for a criterion that needs one; parameters that
            are not finite.

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
    return _find(layer.num_heads, rules, measures, flags=lambda function: function(layer, grid))


@torch.no_grad()
def degenerate_heads_of_maps(
    maps: Tensor,
    criteria: Sequence[Criterion] = ('entropy', 'duplicate'),
    gaussian: Optional[GaussianHeads] = None,
) -> DegeneracyReport:
    """Finds the degenerate heads by given attention maps, see :func:`find_degenerate_heads`.

    Args:
        maps (Tensor): The probabilities of the heads, ``(N_h, Q, K)``.
        criteria (Sequence): As for :func:`find_degenerate_heads`, without functions. Defaults to
            ``('entropy', 'duplicate')``.
        gaussian (GaussianHeads, optional): Centres and widths of Gaussian heads, for ``'uniform'`` and ``'stripe'``.
            Defaults to None.

    Returns:
        DegeneracyReport: The degenerate heads, with criterion and value.

    Raises:
        TypeError: A criterion of Gaussian heads without ``gaussian``.
        ValueError: A criterion that is unknown or a function, or has other settings; values that are not finite.

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
    return _find(len(maps), _rules(criteria, THRESHOLDS), measures, _no_layer)


@torch.no_grad()
def degenerate_heads_of_observed(
    observed: ObservedAttention, criteria: Sequence[Criterion] = ('entropy', 'duplicate')
) -> DegeneracyReport:
    """Finds the degenerate heads of attention that depends on content, by what it did on images.

    Args:
        observed (ObservedAttention): Means over images of what the layer attended to.
        criteria (Sequence): As for :func:`find_degenerate_heads`, in means over images and without functions.
            ``'uniform'`` is a distance from uniform attention below 0.01, in total variation; there is no ``'stripe'``.
            Defaults to ``('entropy', 'duplicate')``.

    Returns:
        DegeneracyReport: The degenerate heads, with criterion and value.

    Raises:
        TypeError: The criterion ``'stripe'``, which is for Gaussian heads.
        ValueError: No images were observed; a criterion that is unknown or a function, or has other settings; values
            that are not finite.

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
    report = _find(len(observed.entropy), rules, measures, _no_layer)
    return replace(report, found=tuple(replace(head, observed=True) for head in report.found))


def _no_layer(function: Function) -> Tensor:
    raise ValueError(
        f'criterion {function!r} is a function(layer, size), for attention by positions alone: given maps have no layer'
    )


def _measures(factor: Callable[[], Tensor], maps: Callable[[], Tensor]) -> Measures:
    """What the criteria compare, by Σ⁻¹ = MMᵀ of Gaussian heads and by attention maps."""
    maps = lru_cache(maxsize=None)(maps)
    return {
        'uniform': lambda: largest_eigenvalue_of_factor(factor()),
        'stripe': lambda: condition_number_of_factor(factor()),
        'entropy': lambda: relative_entropy_of_maps(maps()),
        'duplicate': lambda: map_distances(maps()),
    }


def _rules(criteria: Sequence[Criterion], thresholds: Dict[str, float]) -> List[Tuple[str, Union[float, Function]]]:
    """The name of each criterion, and its threshold or function."""
    if not isinstance(criteria, (list, tuple)) or not criteria:
        raise ValueError(f"criteria={shown(criteria)} must be a list of at least one criterion, such as ['uniform']")
    return [_rule(criterion, thresholds) for criterion in criteria]


def _rule(criterion: Criterion, thresholds: Dict[str, float]) -> Tuple[str, Union[float, Function]]:
    if callable(criterion):
        return getattr(criterion, '__name__', type(criterion).__name__), criterion
    settings = dict(criterion) if isinstance(criterion, dict) else {'type': criterion}
    name = settings.pop('type', None)
    if not isinstance(name, str) or name not in THRESHOLDS or settings.keys() - {'threshold'}:
        raise ValueError(
            f'criterion {criterion!r} is unknown: choose one of {tuple(THRESHOLDS)}, '
            'dict(type=name, threshold=number) or a function(layer, size)'
        )
    if name not in thresholds:
        raise TypeError(
            f'the criterion {name!r} is for Gaussian heads, of attention by positions alone: for others use the '
            f'criteria {tuple(thresholds)}'
        )
    threshold = settings.get('threshold', thresholds[name])
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not threshold >= 0:
        raise ValueError(f'threshold={threshold!r} of criterion {name!r} must be a number, 0 or more')
    return name, threshold


def _find(
    num_heads: int,
    rules: List[Tuple[str, Union[float, Function]]],
    measures: Measures,
    flags: Callable[[Function], Tensor],
) -> DegeneracyReport:
    """The heads that the rules find, each under the first; duplicates are those of the heads that are left.

    ``measures`` are called where a rule needs them; ``flags`` calls a function.
    """
    found: Dict[int, DegenerateHead] = {}
    for name, rule in sorted(rules, key=lambda rule: rule[0] == 'duplicate') if num_heads else ():
        if callable(rule):
            some = _of_flags(name, flags(rule), num_heads)
        elif name == 'duplicate':
            some = _duplicates(measures[name](), [head for head in range(num_heads) if head not in found], rule)
        else:
            compare = operator.lt if name == 'uniform' else operator.gt
            some = (
                DegenerateHead(head, name, value, rule)
                for head, value in enumerate(measures[name]().tolist())
                if compare(value, rule)
            )
        for entry in some:
            found.setdefault(entry.head, entry)
    return DegeneracyReport(num_heads, tuple(found[head] for head in sorted(found)))


def _duplicates(distances: Tensor, heads: List[int], threshold: float) -> Iterator[DegenerateHead]:
    """The heads that are near an earlier one of them which is kept, by their distances ``(N_h, N_h)``."""
    kept: List[int] = []
    for head in heads:
        of_head = distances[head].tolist()
        distance, nearest = min(((of_head[other], other) for other in kept), default=(1.0, None))
        if nearest is not None and distance < threshold:
            yield DegenerateHead(head, 'duplicate', distance, threshold, nearest)
        else:
            kept.append(head)


def _of_flags(name: str, degenerate: Tensor, num_heads: int) -> Iterator[DegenerateHead]:
    if not isinstance(degenerate, Tensor) or degenerate.dtype != torch.bool or degenerate.shape != (num_heads,):
        raise ValueError(
            f'criterion {name} gave {degenerate!r}, but a tensor of {num_heads} bools is needed, one for each head'
        )
    return (DegenerateHead(head, name) for head in degenerate.nonzero()[:, 0].tolist())
