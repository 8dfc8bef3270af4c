"""Heads removed in training (Cordonnier et al. 2020 (C20), appendix E; Michel et al. 2019)."""

from typing import Any, Optional, Sequence, Union

from mmpretrain.registry import HOOKS
from torch import nn

from ..training import JudgedHeads, PruneHeads, parts_in_phases
from ..training.loops import check_epochs
from .follow_state_dict import FollowStateDictHook
from .runner import (
    HEAD_NUMBERS,
    averaged_models,
    check_loop,
    check_wrapper,
    head_numbers,
    optimizers,
    training_batches,
    training_loss,
    unwrapped,
    wrap_again,
)

MULTIPLY_ADDS = 'multiply_adds_before_pruning'  # in ``runtime_info``, for runs that are resumed


@HOOKS.register_module()
class HeadPruningHook(FollowStateDictHook):
    """Finds heads to do without at the beginning of some epochs, removes them, and keeps training the rest.

    It works on every attention layer of this package, in a self-attention backbone, in a CMHSA or instead of a
    convolution, and on the vision transformers of mmpretrain and timm; layers of a
    :class:`~attncnn_plugin.mm.phase_transition.PhaseTransitionHook` are pruned at epochs after its transition.
    Parameters really shrink. The optimizer keeps its groups, and the state of the entries that are left, and schedulers
    stay. The copy of an ``EMAHook`` loses the same heads. A model that is trained on several ranks is wrapped anew, and
    all ranks remove the same heads, judged by the batches of all of them.

    A pruned checkpoint loads with the config that made it: the hook brings the model to its structure. Give the hook no
    epochs if nothing more is to be pruned.

    Args:
        epochs (int | Sequence[int]): Epochs at whose beginning heads are pruned, counted from 0; 0 is right after
            loading. Defaults to none.
        criteria (Sequence[str | dict], optional): The criteria that find heads, degenerate ones, see
            :func:`~attncnn_plugin.pruning.find_degenerate_heads`. Where attention depends on content, they are means
            over training images. A layer all of whose heads are found keeps the least uniform one. Defaults to C20's,
            ``('uniform', 'stripe')``, which are for Gaussian heads; to none with ``keep``, ``threshold`` or
            ``multiply_adds``.
        num_batches (int): Number of the training batches that heads are judged by, on each rank, without random
            augmentation of whole batches. Defaults to 8.
        **settings (Any): ``keep``, ``threshold``, ``multiply_adds``, for the heads on which the loss depends least,
            ``layers`` and ``bias_correction``: those of :class:`~attncnn_plugin.training.PruneHeads`. C20 does without
            the correction, so that the accuracy falls at first (appendix E, Figure 13). A layer without a bias, instead
            of most convolutions before a batch norm, loses the mean output, and the log says so.
    """

    def __init__(
        self,
        epochs: Union[int, Sequence[int]] = (),
        criteria: Optional[Sequence] = None,
        num_batches: int = 8,
        **settings: Any,
    ):
        self.epochs = check_epochs(f'epochs={epochs!r} of HeadPruningHook', epochs)
        if num_batches < 1:
            raise ValueError(f'num_batches={num_batches} of HeadPruningHook must be at least 1')
        if criteria is None:
            by_loss = any(settings.get(name) is not None for name in ('keep', 'threshold', 'multiply_adds'))
            criteria = () if by_loss else ('uniform', 'stripe')
        self.pruner = PruneHeads(self.epochs, (), training_loss, criteria=criteria, **settings)
        self.num_batches = num_batches

    def before_train(self, runner) -> None:
        """Checks that the run has heads to prune and counts epochs.

        Raises:
            TypeError: The loop does not count epochs; the model is wrapped by something else than DDP; a criterion is
                not for a layer; or a layer cannot lose heads.
            ValueError: The model has no attention with heads to prune; criteria that are unknown.
        """
        check_loop(runner, self)
        self._warn_of_end(runner, runner.max_epochs)
        check_wrapper(runner)
        model = unwrapped(runner.model)
        layers = self.pruner.layers(model)
        if not layers and not parts_in_phases(model, 'conv'):
            raise ValueError(f'HeadPruningHook finds {self.pruner.nothing}')
        # A mistake in the criteria must not wait for the epoch of pruning.
        self.pruner.multiply_adds_before = runner.message_hub.runtime_info.get(MULTIPLY_ADDS)
        counts = layers and 'multiply_adds' in self.pruner.amount
        self.pruner.check(model, training_batches(runner, 1) if counts else ())
        if counts:
            runner.message_hub.update_info(MULTIPLY_ADDS, self.pruner.multiply_adds_before)

    def after_train(self, runner) -> None:
        """Warns of a run that ends before heads were removed; another hook may have stopped it."""
        self._warn_of_end(runner, runner.epoch)

    def _warn_of_end(self, runner, end: int) -> None:
        late = ', '.join(str(epoch) for epoch in self.epochs if epoch >= end)
        if late:
            runner.logger.warning(f'The run ends after {end} epochs: HeadPruningHook removes no heads at epoch {late}')

    def before_train_epoch(self, runner) -> None:
        """Removes the heads that the criteria find, at the epochs of pruning."""
        epoch, info = runner.epoch, runner.message_hub.runtime_info  # goes into checkpoints
        own = [hook for hook in runner.hooks if isinstance(hook, HeadPruningHook)].index(self)
        judged_at = f'heads_judged_at_epoch_by_hook_{own}'
        if epoch not in self.epochs or info.get(judged_at) == epoch:
            return  # done before the run was stopped in the middle of this epoch
        runner.message_hub.update_info(judged_at, epoch)
        model = unwrapped(runner.model)
        if not self.pruner.layers(model):
            runner.logger.warning(f'HeadPruningHook finds, at epoch {epoch}, {self.pruner.nothing}')
            return
        try:
            self.pruner.check(model, ())
        except (TypeError, ValueError) as error:  # of layers that a transition has made since
            runner.logger.warning(f'HeadPruningHook removes no heads at epoch {epoch}: {error}')
            return
        judged = self.pruner.judge(model, training_batches(runner, self.num_batches))
        if 'multiply_adds' in self.pruner.amount:
            runner.message_hub.update_info(MULTIPLY_ADDS, self.pruner.multiply_adds_before)
        for name, report in judged.reports.items():
            runner.logger.info(f'{name} at epoch {epoch}: {report}')
        if judged.heads:
            self._remove(runner, model, judged)

    def _remove(self, runner, model: nn.Module, judged: JudgedHeads) -> None:
        layers = self.pruner.layers(model, judged.example)
        self.pruner.find(model, {name: layers[name] for name in judged.heads}, *judged.example)
        without_bias = [name for name in judged.heads if getattr(layers[name].output, 'bias', None) is None]
        if self.pruner.bias_correction and without_bias:
            runner.logger.warning(
                f'{", ".join(without_bias)} of the model have no bias: nothing makes up for their heads that go, '
                'besides duplicates'
            )
        numbers = head_numbers(runner, {name: layer.num_heads for name, layer in layers.items()})
        for name, heads in judged.heads.items():
            numbers[name] = [number for head, number in enumerate(numbers[name]) if head not in heads]
        runner.message_hub.update_info(HEAD_NUMBERS, numbers)
        copies = [averaged.module for averaged in averaged_models(runner)]
        change = self.pruner.remove(model, judged, optimizers(runner), copies)
        wrap_again(runner, compile=True)
        sizes = f'{change.parameters_before:,} parameters became {change.parameters_after:,}'
        runner.logger.info(f'Removed heads {judged.heads}: {sizes}')
