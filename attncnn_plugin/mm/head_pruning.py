"""Heads removed in training (Cordonnier et al. 2020 (C20), appendix E; Michel et al. 2019)."""

from typing import Any, Optional, Sequence, Union

from mmpretrain.registry import HOOKS

from ..change import number_of_parameters
from ..training import PruneHeads, parts_in_phases
from .follow_state_dict import ChangingHook
from .runner import HEAD_NUMBERS, averaged_models, head_numbers, training_batches, training_loss, unwrapped, wrap_again


@HOOKS.register_module()
class HeadPruningHook(ChangingHook):
    """Removes heads that the model can do without, at the beginning of some epochs, and trains the rest on.

    It calls :class:`~attncnn_plugin.training.PruneHeads`, and works on every attention layer of this package, in a
    self-attention backbone, in a CMHSA or instead of a convolution, and on the vision transformers of mmpretrain and
    timm; layers of a :class:`~attncnn_plugin.mm.phase_transition.PhaseTransitionHook` are pruned from its epoch on.
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
            of most convolutions before a batch norm, loses the mean output.
    """

    def __init__(
        self,
        epochs: Union[int, Sequence[int]] = (),
        criteria: Optional[Sequence] = None,
        num_batches: int = 8,
        **settings: Any,
    ):
        if num_batches < 1:
            raise ValueError(f'num_batches={num_batches} of HeadPruningHook must be at least 1')
        if criteria is None:
            by_loss = any(settings.get(name) is not None for name in ('keep', 'threshold', 'multiply_adds'))
            criteria = () if by_loss else ('uniform', 'stripe')
        self.pruner = PruneHeads(epochs, (), training_loss, criteria=criteria, **settings)
        self.times, self.num_batches = self.pruner.epochs, num_batches

    def before_train(self, runner) -> None:
        """Checks that the run has heads to prune and counts epochs.

        Raises:
            TypeError: The loop does not count epochs; the model is wrapped by something else than DDP; a criterion is
                not for a layer; or a layer cannot lose heads.
            ValueError: The model has no attention with heads to prune; criteria that are unknown.
        """
        super().before_train(runner)
        model = unwrapped(runner.model)
        self.pruner.batches = training_batches(runner, 1)
        if not self.pruner.layers(model) and not parts_in_phases(model, 'conv'):
            raise ValueError(f'HeadPruningHook finds {self.pruner.nothing}')
        self.pruner.check(model)  # a mistake must not wait for the epoch of pruning
        self.pruner.batches = ()  # not in memory until the next pruning

    def before_train_epoch(self, runner) -> None:
        """Removes the heads that the criteria find, at the epochs of pruning; raises the errors of ``PruneHeads``."""
        epoch, info = runner.epoch, runner.message_hub.runtime_info  # goes into checkpoints
        own = [hook for hook in runner.hooks if isinstance(hook, HeadPruningHook)].index(self)
        judged_at = f'heads_judged_at_epoch_by_hook_{own}'
        if epoch not in self.times or info.get(judged_at) == epoch:
            return  # done before the run was stopped in the middle of this epoch
        model, copies = unwrapped(runner.model), [averaged.module for averaged in averaged_models(runner)]
        self.pruner.batches = training_batches(runner, self.num_batches)
        before, layers = number_of_parameters(model), self.pruner.layers(model).items()
        numbers = head_numbers(runner, {name: layer.num_heads for name, layer in layers})
        judged = self.pruner.on_epoch_begin(model, runner.optim_wrapper.optimizer, epoch, copies)
        self.pruner.batches = ()
        runner.message_hub.update_info(judged_at, epoch)
        if judged is None:
            runner.logger.info(f'HeadPruningHook finds no heads to remove at epoch {epoch}')
            return
        for name, report in judged.reports.items():
            runner.logger.info(f'{name} at epoch {epoch}: {report}')
        for name, heads in judged.items():
            numbers[name] = [number for head, number in enumerate(numbers[name]) if head not in heads]
        runner.message_hub.update_info(HEAD_NUMBERS, numbers)
        wrap_again(runner, compile=True)
        sizes = f'{before:,} parameters became {number_of_parameters(model):,}'
        runner.logger.info(f'Removed heads {dict(judged)}: {sizes}')
