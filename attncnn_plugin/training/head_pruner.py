"""Heads that go in a training: judged by criteria, and removed while the optimizer keeps training what is left."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..analysis.observed_attention import observed_attention
from ..attention.evaluation_mode import evaluating
from ..attention.heads import PrunableHeads
from ..attention.window import shown
from ..pruning import (
    find_degenerate_heads,
    head_costs,
    least_important,
    prunable_heads,
    prune_heads,
    replace_parameters,
)
from ..pruning.criteria import (
    DegeneracyReport,
    DegenerateHead,
    ObservedAttention,
    degenerate_heads_of_observed,
    exact_maps,
    relative_entropy_of_maps,
)
from ..pruning.importance import HeadGradients, add_gradients, check_amount, counting
from ..pruning.prune import (
    HeadMeans,
    Heads,
    check_prunable,
    fold_into_bias,
    head_means,
    merge_duplicate,
    takes_duplicates,
)

IMPORTANCE = 'importance'

Run = Callable[[nn.Module, Any], Any]
Costs = Tuple[float, Dict[str, Tensor]]


@dataclass(frozen=True)
class JudgedHeads:
    """The heads of a model as criteria judge them. All ranks have the same.

    Attributes:
        reports (dict[str, DegeneracyReport]): By the name of the layer, the heads that a criterion finds, and what they
            are: degenerate, least important, or one of the two.
        heads (dict[str, list[int]]): By the name of the layer, those of them that go: the least uniform head of a layer
            stays. Layers that lose none are left out.
        means (dict[str, HeadMeans]): By the name of the layer, the mean outputs of its heads; empty without images.
    """

    reports: Dict[str, DegeneracyReport]
    heads: Dict[str, List[int]]
    means: Dict[str, HeadMeans]


class HeadPruner:
    """Finds heads to do without by criteria, and removes them.

    Args:
        forward (Callable): ``forward(model, batch)`` runs the model on a batch, without a loss.
        loss (Callable): ``loss(model, batch)`` is the mean loss of a batch; it calls the model once.
        criteria (Sequence): Those of :func:`~attncnn_plugin.pruning.find_degenerate_heads`, and
            ``dict(type='importance', …)`` with one of ``threshold``, ``keep`` and ``multiply_adds``, see
            :func:`~attncnn_plugin.pruning.least_important`, and ``normalize``, by default True, see
            :func:`~attncnn_plugin.pruning.head_importance`.
        layers (str): Glob of the names of the layers to judge. Defaults to ``'*'``.

    Raises:
        ValueError: No criteria; an importance criterion that does not say how many heads go, or several.

    Attributes:
        multiply_adds (float | None): Those of the model for an image before any pruning, of which the criterion's
            ``multiply_adds`` is a share; None before they are counted. Set it where a training is resumed.
    """

    def __init__(self, forward: Run, loss: Run, criteria: Sequence, layers: str = '*') -> None:
        of_importance = [criterion for criterion in criteria if _is_of_importance(criterion)]
        if not criteria:
            raise ValueError(
                f"criteria={shown(criteria)} must be a list of at least one criterion, such as ['uniform']"
            )
        if len(of_importance) > 1:
            raise ValueError(f'criteria={list(criteria)!r} have {IMPORTANCE!r} {len(of_importance)} times')
        self.forward, self.loss, self.pattern = forward, loss, layers
        self.criteria = [criterion for criterion in criteria if not _is_of_importance(criterion)]
        self.of_importance = _settings(of_importance[0]) if of_importance else None
        self.multiply_adds: Optional[float] = None

    def layers(self, model: nn.Module) -> Dict[str, Heads]:
        """Returns the layers to judge, by name."""
        return {name: layer for name, layer in prunable_heads(model).items() if fnmatchcase(name, self.pattern)}

    def needs_images(self, model: nn.Module) -> bool:
        """Returns True if a layer depends on content, or the loss decides."""
        return self.of_importance is not None or any(map(_depends_on_content, self.layers(model).values()))

    def check(self, model: nn.Module, batch: Any = None) -> None:
        """Refuses criteria and layers that do not go together, whatever the weights are.

        Args:
            model (nn.Module): The model.
            batch: As ``forward`` takes it, to count multiply-adds where they are a criterion. Defaults to None, means
                that they are not counted.

        Raises:
            TypeError: A criterion that is not for a layer, or a layer that cannot be without a head.
            ValueError: A criterion that is unknown, or so few or so many heads that they cannot be reached.
        """
        layers = {name: layer for name, layer in self.layers(model).items() if layer.num_heads > 0}
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
        if layers and self.of_importance and 'keep' in self.of_importance:
            built = {name: torch.zeros(layer.built_heads) for name, layer in layers.items()}
            least_important(built, keep=self.of_importance['keep'])
        if layers and batch is not None and self.counts_multiply_adds:
            with evaluating(model):
                costs = self._costs(model, batch, layers)
            self._least_important({name: torch.zeros(layer.num_heads) for name, layer in layers.items()}, costs)

    @property
    def counts_multiply_adds(self) -> bool:
        """Returns True if heads go until a share of the multiply-adds is left."""
        return self.of_importance is not None and 'multiply_adds' in self.of_importance

    def judge(
        self, model: nn.Module, batches: Iterable[Any] = (), size: Optional[Tuple[int, ...]] = None
    ) -> JudgedHeads:
        """Judges the heads of the layers. In distributed training by the batches of all ranks.

        Args:
            model (nn.Module): The model, not wrapped for distributed training; it runs in evaluation mode.
            batches (Iterable): As ``forward`` and ``loss`` take them. Defaults to none.
            size (tuple[int, ...], optional): Height and width of the grid in tokens, for attention by position alone.
                Defaults to that of the batches.
        """
        layers, batches, costs = self.layers(model), list(batches), None
        seen = {name: layer for name, layer in layers.items() if self.criteria and _depends_on_content(layer)}
        gradients: Dict[str, HeadGradients] = {}
        with evaluating(model):
            with head_means(list(layers.values())) as of_layers, observed_attention(seen) as observed, torch.no_grad():
                for batch in batches:
                    self.forward(model, batch)
            if self.of_importance is not None:
                gradients = {name: HeadGradients(layer) for name, layer in layers.items() if layer.num_heads > 0}
                for batch in batches:
                    add_gradients(gradients, model, batch, self.loss)
            if self.counts_multiply_adds and batches:
                costs = self._costs(model, batches[0], layers)
        means = dict(zip(layers, of_layers))
        device = next(model.parameters()).device
        _add_ranks(device, means, 'total', 'count')
        _add_ranks(device, observed, 'entropy', 'from_uniform', 'distances', 'count')
        _add_ranks(device, gradients, 'total', 'count')
        sizes = {name: own.size or size for name, own in means.items()}
        reports = {name: self._report(layer, observed.get(name), sizes[name]) for name, layer in layers.items()}
        if self.of_importance is not None:
            importance = {
                name: own.mean(self.of_importance.get('normalize', True)).cpu() for name, own in gradients.items()
            }
            self._add_unimportant(reports, importance, costs)
        heads = {name: list(report.heads) for name, report in reports.items() if report.heads}
        for name, found in heads.items():
            if len(found) == reports[name].num_heads:
                found.remove(_least_uniform(layers[name], observed.get(name), sizes[name]))
        judged = [reports, {name: found for name, found in heads.items() if found}]
        if _is_distributed():
            dist.broadcast_object_list(judged)
        return JudgedHeads(judged[0], judged[1], means if batches else {})

    def remove(
        self,
        model: nn.Module,
        judged: JudgedHeads,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        copies: Iterable[nn.Module] = (),
        bias_correction: bool = True,
    ) -> None:
        """Removes the heads that go, from a model and from copies of it, and has optimizers train what is left.

        Optimizers keep their groups, and the state of the entries that are left. A wrapper for distributed training
        has to be built anew.

        Args:
            model (nn.Module): The model, not wrapped for distributed training.
            judged (JudgedHeads): Of :meth:`judge`.
            optimizers (Iterable[Optimizer]): Those that train the model. Defaults to none.
            copies (Iterable[nn.Module]): Averages of the model. Defaults to none.
            bias_correction (bool): Whether the mean output of a removed head is added to the bias of its layer, if that
                has one, and a duplicate's values to those of the head that it repeats. Defaults to True.
        """
        for module in (model, *copies):
            if bias_correction:
                self._make_up(module, judged)
            change = prune_heads(module, judged.heads)
            for optimizer in optimizers:
                replace_parameters(optimizer, change)

    def _make_up(self, model: nn.Module, judged: JudgedHeads) -> None:
        """Has what stays in a layer do on average what the heads did that go."""
        layers = prunable_heads(model)
        for name, heads in judged.heads.items():
            layer = layers[name]
            duplicates = {
                entry.head: entry.duplicate_of
                for entry in judged.reports[name].found
                if entry.duplicate_of is not None and entry.head in heads and takes_duplicates(layer)
            }
            for head, kept in duplicates.items():
                merge_duplicate(layer, head, kept)
            if layer.output.bias is not None:
                fold_into_bias(layer, [head for head in heads if head not in duplicates], judged.means[name].mean)

    def _report(
        self, layer: Heads, observed: Optional[ObservedAttention], size: Optional[Tuple[int, ...]]
    ) -> DegeneracyReport:
        if not self.criteria or layer.num_heads == 0:
            return DegeneracyReport(layer.num_heads, ())
        if observed is not None:
            return degenerate_heads_of_observed(observed, self.criteria)
        return find_degenerate_heads(layer, self.criteria, size)

    def _add_unimportant(
        self, reports: Dict[str, DegeneracyReport], importance: Mapping[str, Tensor], costs: Optional[Costs]
    ) -> None:
        kind = 'degenerate or least important' if self.criteria else 'least important'
        for name, report in reports.items():
            reports[name] = replace(report, kind=kind)
        for name, own in importance.items():
            own[reports[name].heads] = -torch.inf  # those go first
        for name, heads in self._least_important(importance, costs).items():
            known = reports[name]
            new = [
                DegenerateHead(head, IMPORTANCE, value := float(importance[name][head]), f'importance {value:.3g}')
                for head in heads
                if head not in known.heads
            ]
            reports[name] = replace(known, found=tuple(sorted([*known.found, *new], key=lambda entry: entry.head)))

    def _least_important(self, importance: Mapping[str, Tensor], costs: Optional[Costs]) -> Dict[str, List[int]]:
        settings = {key: value for key, value in (self.of_importance or {}).items() if key != 'normalize'}
        if 'keep' in settings:  # other criteria can have removed more
            settings['keep'] = min(settings['keep'], sum(map(len, importance.values())))
        if costs is not None and self.multiply_adds is not None:  # a share of those that there were at first
            settings['multiply_adds'] = min(1.0, settings['multiply_adds'] * self.multiply_adds / costs[0])
        return least_important(importance, **settings, costs=costs)

    def _costs(self, model: nn.Module, batch: Any, layers: Mapping[str, Heads]) -> Costs:
        """Returns the multiply-adds of the model and of the layers' heads for an image."""
        images: List[int] = []
        with counting(model, images):
            total, costs = head_costs(model, lambda: self.forward(model, batch))
        self.multiply_adds = self.multiply_adds or total / sum(images)
        return total / sum(images), {name: costs[name] / sum(images) for name in layers}


def _is_of_importance(criterion: Any) -> bool:
    return (criterion.get('type') if isinstance(criterion, dict) else criterion) == IMPORTANCE


def _settings(criterion: Any) -> Dict[str, Any]:
    """Returns the settings of an importance criterion."""
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


def _least_uniform(layer: Heads, observed: Optional[ObservedAttention], size: Optional[Tuple[int, ...]]) -> int:
    entropy = relative_entropy_of_maps(exact_maps(layer, size)) if observed is None else observed.mean('entropy')
    return int(entropy.argmin())


def _smallest_size(layer: PrunableHeads) -> Sequence[int]:
    """Returns a grid on which the criteria can be tried."""
    window = [] if layer.window is None else zip(layer.window.kernel_size, layer.window.dilation)
    return [max(2, (k - 1) * d + 1) for k, d in window] or (2, 2)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _add_ranks(device: torch.device, sums: Mapping[str, Any], *names: str) -> None:
    """Adds the sums of all ranks, in place; they meet on the device of the model."""
    if not _is_distributed():
        return
    for own in sums.values():
        for name in names:
            value = getattr(own, name)
            of_ranks = value.to(device)
            dist.all_reduce(of_ranks)
            value.copy_(of_ranks)
