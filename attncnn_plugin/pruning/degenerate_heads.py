"""Which heads of a position-only attention layer are degenerate."""

import operator
from dataclasses import dataclass
from typing import Callable, Iterator, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from ..layers.window import per_axis
from .criteria import (
    attention_maps,
    check_position_only,
    condition_number,
    largest_eigenvalue,
    map_distance,
    relative_entropy,
)

Size = Optional[Tuple[int, int]]
Criterion = Union[str, dict, Callable[[nn.Module, Size], Tensor]]

# A value of each head, the comparison with the threshold that makes a head degenerate.
MEASURES = {
    'uniform': (lambda layer, size: largest_eigenvalue(layer), operator.lt),
    'stripe': (lambda layer, size: condition_number(layer), operator.gt),
    'entropy': (relative_entropy, operator.gt),
}
THRESHOLDS = {'uniform': 1e-5, 'stripe': 1e5, 'entropy': 0.99, 'duplicate': 0.01}
REASONS = {
    'uniform': 'largest eigenvalue {0.value:.3g} < {0.threshold:.3g}',
    'stripe': 'condition number {0.value:.3g} > {0.threshold:.3g}',
    'entropy': 'relative entropy {0.value:.4g} > {0.threshold:.4g}',
    'duplicate': 'distance {0.value:.3g} < {0.threshold:.3g} from head {0.duplicate_of}',
}


@dataclass(frozen=True)
class DegenerateHead:
    """A head and why it is degenerate.

    Attributes:
        head (int): Index of the head.
        criterion (str): Name of the criterion, that of the function for a function.
        value (float | None): What was compared with the threshold; None for a function.
        threshold (float | None): The threshold; None for a function.
        duplicate_of (int | None): The kept head that a duplicate is nearest to: adding the duplicate's slice of the
            value matrix to that of this head makes up for its removal.
    """

    head: int
    criterion: str
    value: Optional[float] = None
    threshold: Optional[float] = None
    duplicate_of: Optional[int] = None

    @property
    def reason(self) -> str:
        """Value and threshold in words, empty for a function."""
        return '' if self.threshold is None else REASONS[self.criterion].format(self)


@dataclass(frozen=True)
class LayerReport:
    """The degenerate heads of a layer; as a string, a table.

    Attributes:
        num_heads (int): Number of heads N_h of the layer.
        found (tuple[DegenerateHead, ...]): The degenerate heads by rising index, each once.
    """

    num_heads: int
    found: Tuple[DegenerateHead, ...]

    @property
    def heads(self) -> List[int]:
        """Indices of the degenerate heads, rising."""
        return [entry.head for entry in self.found]

    def __str__(self) -> str:
        lines = [f'{len(self.found)} of {self.num_heads} heads degenerate']
        if self.found:
            rows = [('head', 'criterion', 'why')] + [(str(e.head), e.criterion, e.reason) for e in self.found]
            width = max(len(name) for _, name, _ in rows)
            lines += [f'{head:>4}  {name:<{width}}  {why}'.rstrip() for head, name, why in rows]
        return '\n'.join(lines)


@torch.no_grad()
def find_degenerate_heads(
    layer: nn.Module,
    criteria: Sequence[Criterion] = ('uniform', 'stripe'),
    size: Union[int, Sequence[int], None] = None,
) -> LayerReport:
    """Finds the heads of a layer that do nothing which its other heads, or a mean over the grid, do not do.

    A function of the parameters alone, computed in float64 on the CPU: equal layers have equal reports on every rank.

    Args:
        layer (nn.Module): ``QuadraticAttention``, ``GeneralizedQuadraticAttention``, ``LearnedAttention``, or
            ``ContentAttention`` with ``terms=('vr',)``.
        criteria (Sequence): Each a name, a ``dict(type=name, threshold=number)``, or a function. A head is degenerate
            if any of them says so; the report has the first.

            - ``'uniform'``: the largest eigenvalue of Σ⁻¹, 2α for the quadratic encoding, is below 1e-5 (C20, appendix
              E): all keys are attended to alike. For Gaussian heads alone.
            - ``'stripe'``: the condition number of Σ⁻¹ is above 1e5 (C20, appendix E). It is 1 for a quadratic head and
              for Σ⁻¹ = 0. For Gaussian heads alone.
            - ``'entropy'``: the entropy, mean over queries, is above 0.99 of that of uniform attention: all keys of
              the grid are attended to almost alike.
            - ``'duplicate'``: the map of an earlier head is nearer than 0.01 in total variation, mean over queries
              (C20, 4.3, has such heads with the learned encoding). Only heads that no other criterion finds are
              compared, wherever it stands among the criteria; the first of a group is kept, and each head is compared
              with kept ones, so that no chain of small steps leads away from them.
            - ``function(layer, size)``: gives a bool for each head, ``(N_h,)``.

            Defaults to ``('uniform', 'stripe')``.
        size (int | Sequence[int], optional): Height and width of the grid in tokens, for ``'entropy'``, ``'duplicate'``
            and functions. Defaults to None.

    Returns:
        LayerReport: The degenerate heads, with criterion and value.

    Raises:
        TypeError: ``layer`` has no probabilities of positions, or no Σ⁻¹ for a criterion of Gaussian heads.
        ValueError: The scores of ``layer`` depend on content; a criterion that is unknown, has other settings or gives
            something else than a bool for each head; no ``size`` for a criterion that needs one; parameters that
            are not finite.

    Examples:
        >>> report = find_degenerate_heads(layer, ['uniform', dict(type='duplicate', threshold=0.05)], size=(16, 16))
        >>> print(report)
        2 of 9 heads degenerate
        head  criterion  why
           3  uniform    largest eigenvalue 2.1e-07 < 1e-05
           7  duplicate  distance 0.0312 < 0.05 from head 2
    """
    check_position_only(layer)
    if not isinstance(criteria, (list, tuple)) or not criteria:
        raise ValueError(f"criteria={criteria!r} must be a list of at least one criterion, such as ['uniform']")
    rules = [_name_and_rule(criterion) for criterion in criteria]
    size = None if size is None else per_axis('size', size, 2)
    found = {}
    for name, rule in sorted(rules, key=lambda entry: entry[0] == 'duplicate') if layer.num_heads else ():
        if callable(rule):
            some = _of_function(layer, size, name, rule)
        elif name == 'duplicate':
            left = [head for head in range(layer.num_heads) if head not in found]
            some = _duplicates(attention_maps(layer, size), left, rule)
        else:
            some = _beyond_threshold(layer, size, name, rule)
        for entry in some:
            found.setdefault(entry.head, entry)
    return LayerReport(layer.num_heads, tuple(found[head] for head in sorted(found)))


def _name_and_rule(criterion: Criterion) -> Tuple[str, Union[float, Callable]]:
    """The name of a criterion, and its threshold or function."""
    if callable(criterion):
        return getattr(criterion, '__name__', type(criterion).__name__), criterion
    settings = dict(criterion) if isinstance(criterion, dict) else dict(type=criterion)
    name = settings.pop('type', None)
    if not isinstance(name, str) or name not in THRESHOLDS or settings.keys() - {'threshold'}:
        raise ValueError(
            f'criterion {criterion!r} is unknown: choose one of {tuple(THRESHOLDS)}, '
            'dict(type=name, threshold=number) or a function(layer, size)'
        )
    threshold = settings.get('threshold', THRESHOLDS[name])
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not threshold >= 0:
        raise ValueError(f'threshold={threshold!r} of criterion {name!r} must be a number, 0 or more')
    return name, threshold


def _beyond_threshold(layer: nn.Module, size: Size, name: str, threshold: float) -> Iterator[DegenerateHead]:
    measure, compare = MEASURES[name]
    for head, value in enumerate(measure(layer, size).tolist()):
        if compare(value, threshold):
            yield DegenerateHead(head, name, value, threshold)


def _duplicates(maps: Tensor, heads: List[int], threshold: float) -> Iterator[DegenerateHead]:
    kept = []
    for head in heads:
        distance, nearest = min(((map_distance(maps[head], maps[other]), other) for other in kept), default=(1.0, None))
        if nearest is not None and distance < threshold:
            yield DegenerateHead(head, 'duplicate', distance, threshold, nearest)
        else:
            kept.append(head)


def _of_function(layer: nn.Module, size: Size, name: str, function: Callable) -> Iterator[DegenerateHead]:
    degenerate = function(layer, size)
    if not isinstance(degenerate, Tensor) or degenerate.dtype != torch.bool or degenerate.shape != (layer.num_heads,):
        raise ValueError(
            f'criterion {name} gave {degenerate!r}, but a tensor of {layer.num_heads} bools is needed, '
            'one for each head'
        )
    return (DegenerateHead(head, name) for head in degenerate.nonzero()[:, 0].tolist())
