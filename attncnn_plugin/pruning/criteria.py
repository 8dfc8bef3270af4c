"""Degenerate heads (Cordonnier et al. 2020 (C20), 4.3 and appendix E): uniform, a stripe, or the same as another head.

A Gaussian head, quadratic or generalized quadratic, has the eigenvalues λ₁ ≥ λ₂ of Σ⁻¹ = MMᵀ, in 1/tokens². With λ₁
near 0 it attends to all keys alike, with λ₁ ≫ λ₂ to a stripe. All of position is computed in float64 on the CPU.
Attention that depends on content is judged by means over images of what the criteria measure: a mean of the attention
maps would call two heads alike that look at different things in each image.
"""

import math
from dataclasses import dataclass
from functools import partial
from operator import gt, lt
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.attention_layer import AttentionLayer
from ..attention.positions import GaussianHeads
from ..attention.window import per_axis, shown

Criterion = Union[str, Dict[str, Any]]


@dataclass(frozen=True)
class DegenerateHead:
    """A head that can go, degenerate or one of the least important, and the criterion that found it.

    Attributes:
        head (int): Index of the head.
        criterion (str): Name of the criterion.
        value (float): The value compared with the threshold.
        reason (str): Value and threshold in words.
        duplicate_of (int | None): Of a duplicate, the kept head that it is nearest to, see
            :func:`~attncnn_plugin.pruning.means.merge_duplicate`.
    """

    head: int
    criterion: str
    value: float
    reason: str
    duplicate_of: Optional[int] = None


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


class Measure(NamedTuple):
    """A number for each head, or for each pair of heads, and the threshold beyond which a head is degenerate."""

    threshold: float
    is_beyond: Callable[[float, float], bool]
    reason: str  # of value, threshold and kept head
    values: Callable[..., Tensor]


OF_MAPS = {  # of functions that give M of Gaussian heads, and attention maps
    'entropy': Measure(0.99, gt, 'relative entropy {:.4g} > {:.4g}', lambda _, maps: relative_entropy_of_maps(maps())),
    'duplicate': Measure(0.01, lt, 'distance {:.3g} < {:.3g} from head {}', lambda _, maps: map_distances(maps())),
}
BY_POSITION = {
    'uniform': Measure(1e-5, lt, 'largest eigenvalue {:.3g} < {:.3g}', lambda factor, _: largest_eigenvalue(factor())),
    'stripe': Measure(1e3, gt, 'condition number {:.3g} > {:.3g}', lambda factor, _: condition_number(factor())),
    **OF_MAPS,
}
ON_IMAGES = {  # of ObservedAttention
    'uniform': Measure(0.01, lt, 'distance {:.3g} < {:.3g} from uniform attention', lambda x: x.mean('from_uniform')),
    'entropy': OF_MAPS['entropy']._replace(values=lambda seen: seen.mean('entropy')),
    'duplicate': OF_MAPS['duplicate']._replace(values=lambda seen: seen.mean('distances')),
}


@torch.no_grad()
def degenerate_heads_of_maps(
    maps: Tensor,
    criteria: Sequence[Criterion] = ('entropy', 'duplicate'),
    gaussian: Optional[GaussianHeads] = None,
) -> DegeneracyReport:
    """Finds the degenerate heads by given attention maps, see :func:`~attncnn_plugin.pruning.find_degenerate_heads`.

    Args:
        maps (Tensor): The probabilities of the heads, ``(N_h, Q, K)``.
        criteria (Sequence): As there. Defaults to ``('entropy', 'duplicate')``.
        gaussian (GaussianHeads, optional): Centres and widths of Gaussian heads, for ``'uniform'`` and ``'stripe'``.
            Defaults to None.

    Raises:
        TypeError: A criterion of Gaussian heads without ``gaussian``.
        ValueError: A criterion that is unknown or has other settings; values that are not finite.
    """
    measures = OF_MAPS if gaussian is None else BY_POSITION
    return found_by(len(maps), criteria, measures, partial(factor_of, gaussian), lambda: finite(maps.cpu().double()))


def rules_of(criteria: Sequence[Criterion], measures: Mapping[str, Measure]) -> List[Tuple[str, float]]:
    """Returns the name of each criterion, and its threshold."""
    if not isinstance(criteria, (list, tuple)) or not criteria:
        raise ValueError(f"criteria={shown(criteria)} must be a list of at least one criterion, such as ['uniform']")
    rules = []
    for criterion in criteria:
        settings = dict(criterion) if isinstance(criterion, dict) else {'type': criterion}
        name = settings.pop('type', None)
        if not isinstance(name, str) or name not in BY_POSITION or settings.keys() - {'threshold'}:
            raise ValueError(
                f'criterion {criterion!r} is unknown: choose one of {tuple(BY_POSITION)} or '
                'dict(type=name, threshold=number)'
            )
        if name not in measures:
            raise TypeError(
                f'the criterion {name!r} is for Gaussian heads, of position-only attention: for others use the '
                f'criteria {tuple(measures)}'
            )
        threshold = settings.get('threshold', measures[name].threshold)
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not threshold >= 0:
            raise ValueError(f'threshold={threshold!r} of criterion {name!r} must be a number, 0 or more')
        rules.append((name, threshold))
    return rules


def found_by(
    num_heads: int, criteria: Sequence[Criterion], measures: Mapping[str, Measure], *of_layer: Any
) -> DegeneracyReport:
    """Returns the heads that the criteria find, each under the first; only the others are compared for duplicates."""
    found: Dict[int, DegenerateHead] = {}
    rules = sorted(rules_of(criteria, measures), key=lambda rule: rule[0] == 'duplicate')
    for name, threshold in rules if num_heads else ():
        measure = measures[name]
        values = measure.values(*of_layer).tolist()
        kept: List[int] = []
        for head in [head for head in range(num_heads) if head not in found]:
            value, nearest = values[head], None
            if name == 'duplicate':  # the nearest of the kept heads
                value, nearest = min(((value[other], other) for other in kept), default=(math.inf, None))
            if measure.is_beyond(value, threshold):
                why = measure.reason.format(value, threshold, nearest)
                found[head] = DegenerateHead(head, name, value, why, nearest)
            else:
                kept.append(head)
    return DegeneracyReport(num_heads, tuple(found[head] for head in sorted(found)))


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


def exact_maps(layer: AttentionLayer, size: Union[int, Sequence[int], None]) -> Tensor:
    """Computes the probabilities of every query for every key of a grid, ``(N_h, H*W, H*W)``, float64 on the CPU.

    Raises:
        ValueError: ``size`` is no size of a grid; the parameters give probabilities that are not finite.
    """
    if size is None:
        raise ValueError('size=None, but attention maps are those of a grid: give its height and width in tokens')
    return finite(layer.exact_attention_probs(per_axis('size', size, 2)))


def finite(values: Tensor) -> Tensor:
    """Returns values, if all are finite."""
    if not values.isfinite().all():
        raise ValueError('the attention of layer has values that are not finite: its parameters must be finite')
    return values


def map_distances(maps: Tensor) -> Tensor:
    """Computes the total-variation distances ½ Σ_k |P_h[q, k] − P_g[q, k]| of all pairs of maps, mean over queries.

    Args:
        maps (Tensor): ``(N_h, Q, K)``.

    Returns:
        Tensor: ``(N_h, N_h)``, 0 to 1.
    """
    distances = maps.new_zeros(len(maps), len(maps))
    first, second = torch.triu_indices(len(maps), len(maps), offset=1, device=maps.device)
    distances[first, second] = F.pdist(maps.flatten(1), p=1) / (2 * maps.shape[1])
    return distances + distances.T


def factor_of(gaussian: Any) -> Tensor:
    """Returns M with Σ⁻¹ = MMᵀ of Gaussian heads, ``(N_h, ndim, ndim)``, in float64 on the CPU.

    Raises:
        ValueError: Some of their widths are not finite.
    """
    return finite(gaussian.factor.detach().cpu().double())


def largest_eigenvalue(factor: Tensor) -> Tensor:
    """Computes λ₁ of Σ⁻¹ = MMᵀ, ``(N_h,)``, of M, ``(N_h, ndim, ndim)``."""
    return _singular_values(factor)[0].square()


def condition_number(factor: Tensor) -> Tensor:
    """Computes the largest eigenvalue of Σ⁻¹ = MMᵀ over the smallest, 1 for 0, of M, ``(N_h, ndim, ndim)``."""
    largest, smallest = _singular_values(factor)
    return torch.where(largest > 0, (largest / smallest).square(), 1.0)


def _singular_values(factor: Tensor) -> Tuple[Tensor, Tensor]:
    """Computes the largest and the smallest singular value of M."""
    if factor.shape[-1] != 2:
        values = torch.linalg.svdvals(factor)
        return values[:, 0], values[:, -1]
    # (s₁ ± s₂)² = (a ± d)² + (b ∓ c)² for det M ≥ 0, with the signs exchanged otherwise.
    (a, b), (c, d) = (row.unbind(-1) for row in factor.unbind(1))
    largest = (torch.hypot(a + d, b - c) + torch.hypot(a - d, b + c)) / 2
    # s₁ s₂ = |det M|. The products of float32 entries are exact in float64: a singular M has the determinant 0.
    return largest, (a * d - b * c).abs() / largest
