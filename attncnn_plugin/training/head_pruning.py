"""Heads that go in a training: judged by criteria, and removed while the optimizer keeps training what is left."""

import itertools
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..attention.evaluation_mode import evaluating
from ..attention.window import shown
from ..change import Change, all_or_nothing, check_not_distributed
from ..heads.choice import Layers, chosen_by
from ..heads.found import Heads, find_entries
from ..pruning import (
    JudgedHeads,
    head_costs,
    head_importance,
    least_important,
    prunable_heads,
    prune_heads,
    replace_parameters,
)
from ..pruning.criteria import DegeneracyReport, DegenerateHead, rules_of
from ..pruning.degenerate import heads_to_remove, measures_of, observed_attention, report_of
from ..pruning.importance import Loss, check_amount, counting, normalized
from ..pruning.means import fold_into_bias, head_means, merge_duplicate, takes_duplicates
from ..pruning.prune import check_prunable
from .loops import Optimizers, check_epochs, in_list, random_numbers_kept, uncompiled

Costs = Tuple[float, Dict[str, Tensor]]
Scores = Callable[[nn.Module, List[Any], Loss], Mapping[str, Tensor]]


class PruneHeads:
    """Finds heads that a model can do without, and removes them at the beginning of some epochs, in any training loop.

    Parameters really shrink. The optimizer keeps its groups, and the state of the entries that are left.

    To resume, call :func:`follow_with_optimizer` before you load the model and the optimizer.

    Args:
        epoch (int | Sequence[int]): Epochs at whose beginning heads go, counted from 0. Defaults to none.
        batches (Iterable): The training batches by which heads are judged, at least one, the same ones each time, so
            that a resumed training loses the same heads: a list, or a data loader that does not shuffle. In distributed
            training each rank has its own.
        loss (Callable, optional): ``loss(model, batch)`` is the mean loss of a batch; it calls the model once, with the
            images first. Defaults to the cross-entropy of images and labels, ``(images, labels)``, or the ``loss`` that
            a model of Hugging Face computes from a dict. Without importance it need not be a loss.
        keep (int | float, optional): The number of heads of all layers that stay, the most important ones; or their
            share, above 0 and below 1, at each of the epochs of those that are left by then. Defaults to None.
        threshold (float, optional): The importance below which heads go. Defaults to None.
        multiply_adds (float, optional): The share of the model's multiply-adds that stays, likewise. Defaults to None.
        by (Callable, optional): What is called importance: ``by(model, batches, loss)`` gives that of the heads of each
            layer by name, ``(N_h,)``, such as ``lambda *args: head_ablation(*args).zero_loss``. In distributed
            training it is the mean over the images of all ranks. Defaults to
            :func:`~attncnn_plugin.pruning.head_importance`.
        criteria (Sequence): Those of :func:`~attncnn_plugin.pruning.find_degenerate_heads`: heads that they find go,
            too, and go first. Defaults to none.
        layers (str | Iterable[str] | callable, optional): The layers to judge, as of
            :func:`attncnn_plugin.attention_maps`. Defaults to ``'*'``.
        bias_correction (bool): Whether the mean output of a removed head is added to the bias of its layer, if that
            has one, and a duplicate's values to those of the head that it repeats, if they are as wide as a token.
            Defaults to True.

    Raises:
        ValueError: ``epoch`` has no epochs; neither criteria nor one of ``keep``, ``threshold`` and ``multiply_adds``
            says which heads go, or several of these do.
    """

    def __init__(
        self,
        epoch: Union[int, Sequence[int]] = (),
        batches: Iterable[Any] = (),
        loss: Optional[Loss] = None,
        keep: Optional[float] = None,
        threshold: Optional[float] = None,
        multiply_adds: Optional[float] = None,
        by: Optional[Scores] = None,
        criteria: Sequence = (),
        layers: Layers = '*',
        bias_correction: bool = True,
    ) -> None:
        self.epochs = check_epochs(f'epoch={epoch!r} of PruneHeads', epoch)
        amount = dict(keep=keep, threshold=threshold, multiply_adds=multiply_adds)
        self.amount = {name: value for name, value in amount.items() if value is not None}
        if not self.amount and not criteria:
            raise ValueError(
                f'criteria={criteria!r} of PruneHeads and nothing else say which heads go: give one of keep, threshold '
                "and multiply_adds, or criteria such as ['uniform']"
            )
        if self.amount:
            check_amount(**amount)
        self.batches, self.loss, self.by = batches, loss or loss_of_batch, by
        self.checked: Dict[str, Tuple[int, int]] = {}  # by layer, which module it is, and its number of heads
        self.criteria, self.chosen, self.bias_correction = list(criteria), layers, bias_correction

    def layers(self, model: nn.Module) -> Dict[str, Heads]:
        """Returns the layers to judge, by name: those that run on the first batch."""
        (batch,) = self._some(1)
        with random_numbers_kept(), torch.no_grad():
            found = prunable_heads(model, batch, self.loss)
        chosen = chosen_by(self.chosen)
        return {name: layer for name, layer in found.items() if chosen(name)}

    def check(self, model: nn.Module) -> None:
        """Refuses criteria and layers that do not go together, whatever the weights are; layers as before only once.

        Where multiply-adds are a criterion, it counts them on the first batch.

        Raises:
            TypeError: The model is wrapped for distributed training; a criterion that is not for a layer, or a layer
                that cannot be without a head.
            ValueError: A criterion that is unknown, or so few or so many heads that they cannot be reached.
        """
        model = uncompiled(model)
        check_not_distributed(model, nn.DataParallel)
        layers, (batch,) = self.layers(model), self._some(1)
        known = {name: (id(model.get_submodule(name)), layer.num_heads) for name, layer in layers.items()}
        if known == self.checked:
            return
        self._find(model, layers, batch)
        for name, layer in layers.items():
            try:
                if layer.num_heads > 1:  # the last one stays
                    check_prunable(model, name, layer)
                if self.criteria:
                    rules_of(self.criteria, measures_of(layer))
            except TypeError as error:
                raise TypeError(f'{name}: {error}; layers={self.chosen!r} can leave it out') from error
        if layers and 'keep' in self.amount:
            built = {name: torch.zeros(layer.built_heads, device='cpu') for name, layer in layers.items()}
            least_important(built, keep=self.amount['keep'])
        if layers and 'multiply_adds' in self.amount:
            with evaluating(model), random_numbers_kept():
                costs = self._costs(model, batch, layers)
            self._least_important({name: torch.zeros_like(own) for name, own in costs[1].items()}, costs)
        self.checked = known

    def on_epoch_begin(
        self, model: nn.Module, optimizer: Optimizers, epoch: int, copies: Iterable[nn.Module] = ()
    ) -> Optional[JudgedHeads]:
        """Removes heads, if this is one of the epochs; call it at the beginning of each.

        Not when a training resumes in the middle of an epoch whose heads have gone. The arguments are those of
        :meth:`attncnn_plugin.training.TwoPhases.on_epoch_begin`.

        Returns:
            JudgedHeads | None: What was found; None at other epochs, and where nothing was.

        Raises:
            TypeError, ValueError: Those of :meth:`check`; at an epoch of pruning, there is no attention in the model,
                and those of :meth:`remove`. Model, optimizer and copies are as they were.
        """
        if epoch > max(self.epochs, default=-1):
            return None
        with on_all_ranks():
            self.check(model)  # a mistake must not wait for the epoch of pruning
        if epoch not in self.epochs:
            return None
        model = uncompiled(model)
        if not self.layers(model):
            raise ValueError(f'PruneHeads finds, at epoch {epoch}, {self.nothing}')
        judged = self.judge(model)
        self.remove(model, judged, in_list(optimizer), map(uncompiled, copies))
        return judged or None

    @property
    def nothing(self) -> str:
        """What is missing in a model without heads to prune, in words."""
        return f'no attention with layers={self.chosen!r} in the model: give others, or a model with attention'

    def judge(self, model: nn.Module) -> JudgedHeads:
        """Judges the heads of the layers. In distributed training by the batches of all ranks.

        The model runs in evaluation mode, and no random numbers are drawn from those of the training.

        Args:
            model (nn.Module): The model, not wrapped for distributed training.
        """
        costs, images = None, []
        importance: Dict[str, Tensor] = {}
        with on_all_ranks(), random_numbers_kept(), evaluating(model), torch.no_grad():
            batches = self._some()
            layers = self.layers(model)
            wanted = lambda name: name.partition('#')[0] in layers  # noqa: E731
            observing = observed_attention(model, layers if self.criteria else {})
            with head_means(model, wanted) as means, observing as observed, counting(model, images):
                for batch in batches:
                    self.loss(model, batch)
            if self.amount:
                importance = self._importance(model, batches, layers)
            if 'multiply_adds' in self.amount:
                costs = self._costs(model, batches[0], layers)
        device = next(model.parameters()).device
        _add_ranks(device, [part for own in means.values() for part in (own.total, own.count)])
        _add_ranks(device, [part for own in observed.values() for part in own.sums.values()])
        count = torch.tensor(float(sum(images)), device='cpu')
        importance = {name: own * count for name, own in importance.items()}
        _add_ranks(device, [*importance.values(), count])
        reports = {name: DegeneracyReport(layer.num_heads, ()) for name, layer in layers.items()}
        reports.update({name: report_of(layers[name], self.criteria, own) for name, own in observed.items()})
        if self.amount:
            importance = {name: normalized(own) if self.by is None else own / count for name, own in importance.items()}
            self._add_unimportant(reports, importance, costs)
        judged: List[Any] = [reports, heads_to_remove(reports, layers, observed)]
        if _is_distributed():
            dist.broadcast_object_list(judged)
        return JudgedHeads(*judged, means)

    def remove(
        self,
        model: nn.Module,
        judged: JudgedHeads,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        copies: Iterable[nn.Module] = (),
    ) -> Change:
        """Removes the heads that go, from a model and from copies of it, and has optimizers train what is left.

        Args:
            model (nn.Module): The model, not wrapped for distributed training.
            judged (JudgedHeads): Of :meth:`judge`.
            optimizers (Iterable[Optimizer]): Those that train the model. Defaults to none.
            copies (Iterable[nn.Module]): Averages of the model. Defaults to none.

        Returns:
            Change: That of the model.

        Raises:
            TypeError, ValueError: A copy has other layers, or other heads; an optimizer cannot lose entries, see
                :func:`~attncnn_plugin.pruning.replace_parameters`; or heads of a model cannot be removed. Nothing has
                changed then.
        """
        models, optimizers, (batch,) = [model, *copies], list(optimizers), self._some(1)
        layers = [self.layers(own) for own in models]
        numbers = {name: layers[0][name].num_heads for name in judged}
        for own, of_model in zip(models, layers):
            found = {name: layer.num_heads for name, layer in of_model.items()}
            if not numbers.items() <= found.items():
                raise ValueError(
                    f'copies has a {type(own).__name__} whose attention has heads {found}, the model {numbers}: '
                    'give the average itself, such as the module of a ModelEmaV3'
                )
        values: List[Tensor] = []
        if self.bias_correction:
            for own, of_model in zip(models, layers):
                self._find(own, {name: of_model[name] for name in judged}, batch)
                outputs = [of_model[name].output for name in judged]
                values += [parameter for output in outputs if output is not None for parameter in output.parameters()]
        with all_or_nothing(models, optimizers, values), on_all_ranks():
            for of_model, (name, heads) in itertools.product(layers, judged.items() if self.bias_correction else ()):
                layer, same = of_model[name], {own.head: own.duplicate_of for own in judged.reports[name].found}
                merged = [head for head in heads if same[head] not in (None, *heads) and takes_duplicates(layer)]
                for head in merged:
                    merge_duplicate(layer, head, same[head])
                if getattr(layer.output, 'bias', None) is not None:
                    fold_into_bias(layer, [head for head in heads if head not in merged], judged.means[name].mean)
            changes = [prune_heads(own, judged, batch, call=self.loss) for own in models]
            for optimizer, change in itertools.product(optimizers, changes):
                replace_parameters(optimizer, change)
        return changes[0]

    def _find(self, model: nn.Module, layers: Mapping[str, Heads], batch: Any) -> None:
        """Finds the entries of the heads of layers of other libraries."""
        with random_numbers_kept():
            find_entries(model, list(layers.values()), lambda: self.loss(model, batch))

    def _some(self, number: Optional[int] = None) -> List[Any]:
        """Returns the first of the batches; a data loader draws a random number when it begins."""
        with random_numbers_kept():
            some = list(itertools.islice(self.batches, number))
        if not some:
            raise ValueError('there were no images: give batches, a list or a data loader that can be read again')
        return some

    def _importance(self, model: nn.Module, batches: List[Any], layers: Mapping[str, Heads]) -> Dict[str, Tensor]:
        numbers = {name: layer.num_heads for name, layer in layers.items()}
        by = self.by or partial(head_importance, normalize=False, layers=list(numbers))
        found = by(model, batches, self.loss) if numbers else {}
        for name, number in numbers.items():
            if getattr(found.get(name), 'shape', None) != (number,):
                raise ValueError(
                    f'by(…) of PruneHeads gave {shown(found.get(name))} for {name}, not a tensor of shape ({number},)'
                )
        return {name: found[name].double().cpu() for name in numbers}

    def _add_unimportant(
        self, reports: Dict[str, DegeneracyReport], importance: Mapping[str, Tensor], costs: Optional[Costs]
    ) -> None:
        kind = 'degenerate or least important' if self.criteria else 'least important'
        for name, own in importance.items():
            own[reports[name].heads] = -torch.inf  # those go first
        least = self._least_important(importance, costs)
        for name, known in reports.items():
            new = [
                DegenerateHead(head, 'importance', value := float(importance[name][head]), f'importance {value:.3g}')
                for head in least.get(name, ())
                if head not in known.heads
            ]
            found = sorted([*known.found, *new], key=lambda entry: entry.head)
            reports[name] = replace(known, found=tuple(found), kind=kind)

    def _least_important(self, importance: Mapping[str, Tensor], costs: Optional[Costs]) -> Dict[str, List[int]]:
        amount: Dict[str, Any] = dict(self.amount)
        if 'keep' in amount:  # other criteria can have removed more
            amount['keep'] = min(amount['keep'], sum(map(len, importance.values())))
        return least_important(importance, **amount, costs=costs)

    def _costs(self, model: nn.Module, batch: Any, layers: Mapping[str, Heads]) -> Costs:
        """Returns the multiply-adds of the model and of the layers' heads for an image."""
        images: List[int] = []
        with counting(model, images):
            total, costs = head_costs(model, lambda: self.loss(model, batch))
        return total / images[-1], {name: costs[name] / images[-1] for name in layers}


def loss_of_batch(model: nn.Module, batch: Any) -> Tensor:
    """Computes the loss of a batch: of ``(images, labels)`` the cross-entropy, of a dict what the model says."""
    like = next(model.parameters())
    if isinstance(batch, Mapping):
        output = model(**{name: value.to(like.device) for name, value in batch.items()})
        return output.get('loss')
    images, labels = batch
    cast = images.dtype == torch.float32 and like.is_floating_point()
    output = model(images.to(like if cast else like.device))
    logits = getattr(output, 'logits', output)  # of Hugging Face
    if not isinstance(logits, Tensor):
        raise ValueError(
            f'the cross-entropy needs a model with logits, not a {type(model).__name__}: give another loss, or criteria'
        )
    if labels.max() >= (classes := logits.shape[1]):
        raise ValueError(
            f'label {labels.max()} is none of the classes 0 to {classes - 1}; each subfolder of images is one'
        )
    return cross_entropy(logits, labels.to(like.device))


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def on_all_ranks() -> Iterator[None]:
    """Raises on all ranks what one of them raises inside: the others would wait for it at the next exchange."""
    error: Optional[Exception] = None
    try:
        yield
    except Exception as own:
        error = own
    if _is_distributed():
        found: List[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, error and f'{type(error).__name__}: {error}')
        others = [f'rank {rank} raised {text}' for rank, text in enumerate(found) if text]
        if others and error is None:
            raise RuntimeError(f'no heads are removed: {"; ".join(others)}')
    if error is not None:
        raise error


def _add_ranks(device: torch.device, sums: Iterable[Tensor]) -> None:
    """Adds the sums of all ranks, in place; they meet on the device of the model."""
    for own in sums if _is_distributed() else ():
        of_ranks = own.to(device)
        dist.all_reduce(of_ranks)
        own.copy_(of_ranks)
