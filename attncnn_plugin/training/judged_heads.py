"""Which heads of a model go, by all criteria: for the hook that prunes in training, and for the tool."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ..analysis.observed_attention import observed_attention
from ..attention.evaluation_mode import evaluating
from ..attention.heads import PrunableHeads
from ..attention.window import shown
from ..pruning import (
    DegeneracyReport,
    DegenerateHead,
    HeadMeans,
    ObservedAttention,
    find_degenerate_heads,
    head_costs,
    head_means,
    least_important,
    least_uniform_head,
    prunable_heads,
)
from ..pruning.amount import check_amount
from ..pruning.degenerate_heads import degenerate_heads_of_observed
from ..pruning.heads import Heads, check_prunable
from ..pruning.importance import HeadGradients, add_gradients, counting

IMPORTANCE = 'importance'

Run = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class JudgedHeads:
    """What is known about the heads of a model.

    Attributes:
        reports (dict[str, DegeneracyReport]): By the name of the layer, the heads that a criterion finds, and what they
            are: degenerate, least important, or one of the two.
        means (dict[str, HeadMeans]): By the name of the layer, the mean outputs of its heads; empty without images.
        entropies (dict[str, Tensor]): Of the layers that depend on content, ``(N_h,)``.
    """

    reports: Dict[str, DegeneracyReport]
    means: Dict[str, HeadMeans]
    entropies: Dict[str, Tensor]


class HeadJudge:
    """Judges the heads of a model by criteria.

    Args:
        forward (Callable): ``forward(model, batch)`` runs the model on a batch, without a loss.
        loss (Callable): ``loss(model, batch)`` is the mean loss of a batch; it calls the model once.
        criteria (Sequence): Those of :func:`~attncnn_plugin.pruning.find_degenerate_heads`, and
            ``dict(type='importance', …)`` with one of ``threshold``, ``keep`` and ``multiply_adds``, see
            :func:`~attncnn_plugin.pruning.least_important`, and ``normalize``, by default True, see
            :func:`~attncnn_plugin.pruning.head_importance`.
        layers (str): Glob of the names of the layers to judge. Defaults to ``'*'``.
        allow_empty (bool): Whether all heads of a layer may go. Defaults to False.

    Raises:
        ValueError: No criteria; an importance criterion that does not say how many heads go, or several.

    Attributes:
        total (float | None): Multiply-adds of the model for an image, of which ``multiply_adds`` is a share; None
            before they are counted.
    """

    def __init__(
        self, forward: Run, loss: Run, criteria: Sequence, layers: str = '*', allow_empty: bool = False
    ) -> None:
        self._forward, self._loss = forward, loss
        self.of_importance = [_settings(criterion) for criterion in criteria if _type_of(criterion) == IMPORTANCE]
        self.criteria = [criterion for criterion in criteria if _type_of(criterion) != IMPORTANCE]
        self.pattern = layers
        self.allow_empty = allow_empty
        self.total: Optional[float] = None
        if not criteria:
            raise ValueError(
                f"criteria={shown(criteria)} must be a list of at least one criterion, such as ['uniform']"
            )
        if len(self.of_importance) > 1:
            raise ValueError(f'criteria={list(criteria)!r} have {IMPORTANCE!r} {len(self.of_importance)} times')

    def layers(self, model: nn.Module) -> Dict[str, Heads]:
        """The layers to judge, by name."""
        return {name: layer for name, layer in prunable_heads(model).items() if fnmatchcase(name, self.pattern)}

    def check(self, model: nn.Module) -> None:
        """Refuses criteria and layers that do not go together, whatever the weights are.

        Raises:
            TypeError: A criterion that is not for a layer, or a layer that cannot be without a head.
            ValueError: A criterion that is unknown, or ``keep`` below the number of layers, or above that
                of their heads.
        """
        layers = {name: layer for name, layer in self.layers(model).items() if layer.num_heads > 0}
        keep = self.of_importance[0].get('keep') if self.of_importance else None
        if keep is not None and keep < len(layers) and not self.allow_empty:
            raise ValueError(f'keep={keep} heads cannot be reached: one of each of the {len(layers)} layers stays')
        built = sum(_built_heads(layer) for layer in self.layers(model).values())
        if keep is not None and layers and keep > built:
            raise ValueError(f'keep={keep} must be at most {built}, the number of heads of the {len(layers)} layers')
        for name, layer in layers.items():
            check_prunable(model, name, layer)
            try:
                layer.check_heads([0], allow_empty=True)
                if self.criteria and _depends_on_content(layer):
                    sample = ObservedAttention(layer.num_heads)
                    sample.add(torch.full((1, layer.num_heads, 2, 2), 0.5))
                    degenerate_heads_of_observed(sample, self.criteria)
                elif self.criteria:
                    find_degenerate_heads(layer, self.criteria, _smallest_size(layer))
            except TypeError as error:
                raise TypeError(f'{name}: {error}; layers={self.pattern!r} can leave it out') from error

    @property
    def counts_multiply_adds(self) -> bool:
        """Whether heads go until a share of the multiply-adds is left."""
        return bool(self.of_importance) and 'multiply_adds' in self.of_importance[0]

    def check_multiply_adds(self, model: nn.Module, batch: Any) -> None:
        """Counts the multiply-adds, and refuses a share of them that cannot be reached.

        Args:
            model (nn.Module): The model.
            batch: As ``forward`` takes it.

        Raises:
            ValueError: The share is too small.
        """
        layers = self.layers(model)
        with evaluating(model):
            costs = self._costs(model, batch, layers)
        any_rank = {name: torch.zeros(layer.num_heads) for name, layer in layers.items()}
        self._least_important(any_rank, costs)

    def needs_images(self, model: nn.Module) -> bool:
        """Whether a layer depends on content, or the loss decides."""
        return bool(self.of_importance) or any(_depends_on_content(layer) for layer in self.layers(model).values())

    def judge(
        self,
        model: nn.Module,
        batches: Iterable[Any] = (),
        size: Optional[Tuple[int, ...]] = None,
        reduce: Callable[[Tensor], Any] = lambda sums: None,
    ) -> JudgedHeads:
        """Judges the heads of the layers.

        Args:
            model (nn.Module): The model; it runs in evaluation mode.
            batches (Iterable): As ``forward`` and ``loss`` take them. Defaults to none.
            size (tuple[int, ...], optional): Height and width of the grid in tokens, for attention by position alone.
                Defaults to that of the batches.
            reduce (Callable): Adds the sums of other ranks, in place. Defaults to none.
        """
        layers, batches = self.layers(model), list(batches)
        by_content = {name: layer for name, layer in layers.items() if _depends_on_content(layer)}
        gradients = {name: HeadGradients(layer) for name, layer in layers.items() if layer.num_heads > 0}
        costs = None
        with evaluating(model):
            with ExitStack() as stack:
                means = dict(zip(layers, stack.enter_context(head_means(list(layers.values())))))
                observed = stack.enter_context(observed_attention(by_content if self.criteria else {}))
                for batch in batches:
                    with torch.no_grad():
                        self._forward(model, batch)
            if self.of_importance and batches:
                costs = self._costs(model, batches[0], layers) if self.counts_multiply_adds else None
                for batch in batches:
                    add_gradients(gradients, model, batch, self._loss)
        for own in means.values():
            _reduce(reduce, own, 'total', 'count')
        for seen in observed.values():
            _reduce(reduce, seen, 'entropy', 'from_uniform', 'distances', 'count')
        for gradient in gradients.values() if self.of_importance else ():
            _reduce(reduce, gradient, 'total', 'count')
        reports = {
            name: self._report(name, layer, observed, means[name].size or size) for name, layer in layers.items()
        }
        if self.of_importance:
            self._add_unimportant(reports, gradients, costs)
        entropies = {name: seen.mean('entropy') for name, seen in observed.items()}
        return JudgedHeads(reports, means if batches else {}, entropies)

    def to_remove(
        self, model: nn.Module, judged: JudgedHeads, size: Optional[Tuple[int, ...]] = None
    ) -> Dict[str, List[int]]:
        """The heads that go, by the name of the layer; without ``allow_empty`` the least uniform of a layer stays."""
        layers, found = self.layers(model), {}
        for name, report in judged.reports.items():
            heads = list(report.heads)
            if len(heads) == report.num_heads and heads and not self.allow_empty:
                if name in judged.entropies:
                    kept = int(judged.entropies[name].argmin())
                else:
                    means = judged.means.get(name)
                    kept = least_uniform_head(layers[name], means.size if means and means.size else size)
                heads.remove(kept)
            found[name] = heads
        return {name: heads for name, heads in found.items() if heads}

    def _costs(self, model: nn.Module, batch: Any, layers: Mapping[str, Heads]) -> Tuple[float, Dict[str, Tensor]]:
        """Multiply-adds of the model and of the layers' heads for an image."""
        images: List[int] = []
        with counting(model, images):
            total, costs = head_costs(model, lambda: self._forward(model, batch))
        self.total = self.total or total / sum(images)
        return total / sum(images), {name: costs[name] / sum(images) for name in layers}

    def _least_important(
        self, importance: Mapping[str, Tensor], costs: Optional[Tuple[float, Mapping[str, Tensor]]]
    ) -> Dict[str, List[int]]:
        settings = {key: value for key, value in self.of_importance[0].items() if key != 'normalize'}
        if 'keep' in settings:  # other criteria can have removed more
            settings['keep'] = min(settings['keep'], sum(map(len, importance.values())))
        if costs is not None:  # a share of those that there were at first
            settings['multiply_adds'] = min(1.0, settings['multiply_adds'] * self.total / costs[0])
        return least_important(importance, **settings, costs=costs, allow_empty=self.allow_empty)

    def _report(
        self, name: str, layer: Heads, observed: Mapping[str, ObservedAttention], size: Optional[Tuple[int, ...]]
    ) -> DegeneracyReport:
        if not self.criteria or layer.num_heads == 0:
            return DegeneracyReport(layer.num_heads, ())
        if name in observed:
            return degenerate_heads_of_observed(observed[name], self.criteria)
        return find_degenerate_heads(layer, self.criteria, size)

    def _add_unimportant(
        self,
        reports: Dict[str, DegeneracyReport],
        gradients: Mapping[str, HeadGradients],
        costs: Optional[Tuple[float, Mapping[str, Tensor]]],
    ) -> None:
        normalize = self.of_importance[0].get('normalize', True)
        importance = {name: own.mean(normalize).cpu() for name, own in gradients.items()}
        kind = 'degenerate or least important' if self.criteria else 'least important'
        for name, report in reports.items():
            reports[name] = replace(report, kind=kind)
        for name, own in importance.items():
            own[reports[name].heads] = -torch.inf  # those go first
        for name, heads in self._least_important(importance, costs).items():
            known = reports[name].found
            new = [
                DegenerateHead(head, IMPORTANCE, float(importance[name][head]))
                for head in heads
                if head not in reports[name].heads
            ]
            reports[name] = replace(reports[name], found=tuple(sorted([*known, *new], key=lambda entry: entry.head)))


def _type_of(criterion: Any) -> Any:
    return criterion.get('type') if isinstance(criterion, dict) else criterion


def _settings(criterion: Any) -> Dict[str, Any]:
    """The settings of an importance criterion."""
    settings = {key: value for key, value in criterion.items() if key != 'type'} if isinstance(criterion, dict) else {}
    unknown = settings.keys() - {'threshold', 'keep', 'multiply_adds', 'normalize'}
    if unknown:
        raise ValueError(
            f'criterion {criterion!r} has unknown settings: threshold, keep, multiply_adds and normalize are known'
        )
    check_amount(*(settings.get(name) for name in ('threshold', 'keep', 'multiply_adds')))
    return settings


def _depends_on_content(layer: Heads) -> bool:
    return not isinstance(layer, PrunableHeads) or layer.depends_on_content


def _built_heads(layer: Heads) -> int:
    return layer.built_heads if isinstance(layer, PrunableHeads) else layer.layout.num_heads


def _smallest_size(layer: PrunableHeads) -> Sequence[int]:
    """A grid on which the criteria can be tried."""
    window = [] if layer.window is None else zip(layer.window.kernel_size, layer.window.dilation)
    return [max(2, (k - 1) * d + 1) for k, d in window] or (2, 2)


def _reduce(reduce: Callable[[Tensor], Any], sums: Any, *names: str) -> None:
    for name in names:
        reduce(getattr(sums, name))
