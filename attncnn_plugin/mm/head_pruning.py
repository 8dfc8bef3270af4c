"""Heads removed, or drawn anew, in training (Cordonnier et al. 2020 (C20), appendix E; Michel et al. 2019)."""

import dataclasses
import itertools
from typing import Any, Dict, Iterator, List, Optional, Sequence, Union

import torch
from mmengine.dist import all_reduce, broadcast_object_list
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import EpochBasedTrainLoop
from mmpretrain.registry import HOOKS
from torch import nn

from ..attention.heads import PrunableHeads
from ..change import Successor
from ..pruning import (
    fold_into_bias,
    merge_duplicate,
    prunable_heads,
    prune_heads,
    replace_parameters,
    reset_heads,
    singular_penalty,
)
from ..pruning.bias_correction import takes_duplicates
from ..pruning.heads import Heads
from ..training.judged_heads import HeadJudge, JudgedHeads
from ..training.phases import parts_in_phases
from ..training.random_state import random_numbers_kept
from .follow_state_dict import FollowStateDictHook
from .rebuild import averaged_models, build_schedulers, check_wrapper, refresh_average, unwrapped, wrap_again
from .rehearsal import is_rehearsal, warn_of_rehearsal
from .runner import compile_train_step, forward_tensors, is_resumed, training_loss

MULTIPLY_ADDS = 'multiply_adds_before_pruning'  # in ``runtime_info``, for runs that are resumed


@HOOKS.register_module()
class HeadPruningHook(FollowStateDictHook):
    """Finds heads to do without at the beginning of some epochs, removes them, and lets the training go on.

    It works on every attention layer of this package, in a self-attention backbone, in a CMHSA or in the place of a
    convolution, and on the vision transformers of mmpretrain and timm; layers of a :class:`PhaseTransitionHook` are
    pruned at epochs after its transition. Parameters really shrink. The optimizer keeps its groups, and the state of
    the entries that are left. Schedulers go on. The copy of an ``EMAHook`` loses the same heads. A model that is
    trained on several ranks is wrapped anew, and all ranks remove the same heads, judged by the batches of all of them.

    For mmpretrain's ``vis_scheduler.py``, which shows a schedule without the model, the rates change at the first of
    these epochs, as where heads are found.

    A pruned checkpoint loads with the config that made it: the hook brings the model to its structure. Give the hook no
    epochs if nothing more is to be pruned.

    Args:
        epochs (Sequence[int]): Epochs at whose beginning heads are pruned, counted from 0; 0 is right after loading.
            Defaults to none.
        begin (int, optional): With ``interval``, the first of further such epochs. Defaults to None.
        interval (int, optional): Number of epochs from one to the next. Defaults to None.
        criteria (Sequence[str | dict | Callable]): The criteria that find heads, degenerate ones, see
            :func:`~attncnn_plugin.pruning.find_degenerate_heads`. Where attention depends on content, they are means
            over training images, see :func:`~attncnn_plugin.pruning.degenerate_heads_of_observed`. One of them can be
            ``dict(type='importance', …)`` with one of ``threshold``, ``keep`` (heads of all layers) and
            ``multiply_adds`` (a share of those before any pruning), and with ``normalize=False``: the heads on
            which the loss depends least, see :func:`~attncnn_plugin.pruning.head_importance`. Defaults to C20's,
            ``('uniform', 'stripe')``, which are for Gaussian heads.
        layers (str): Glob of the names of the layers. Defaults to ``'*'``, all.
        allow_empty (bool): Whether a layer all of whose heads are found becomes its bias; otherwise it keeps the least
            uniform one. Defaults to False.
        bias_correction (bool): Whether the mean output of a removed head, over some training batches, is added to the
            bias of its layer, and a duplicate's values to those of the head that it repeats. C20 does without, so that
            the accuracy falls at first (appendix E, Figure 13). A layer without a bias, as in the place of most
            convolutions before a batch norm, loses the mean output, and the log says so. Defaults to True.
        num_batches (int): Number of the training batches that heads are judged by, on each rank, without random
            augmentation of whole batches. Defaults to 8.
        reset (bool): Whether the heads that are found are drawn anew instead of being removed: centre, width and values
            as of a new layer, momentum at zero; the copy of an ``EMAHook`` has the same new heads. For attention over a
            grid by positions alone, without ``lr_scale``, ``param_scheduler`` and ``allow_empty``. Defaults to False.
        lr_scale (float): Factor of the learning rate from the first pruning on; C20 has 0.1. Defaults to 1.
        param_scheduler (dict | list[dict], optional): Schedulers that replace those of the run at the first pruning:
            they begin with the rate that the run began with, times ``lr_scale``, and their ``begin`` and ``end`` are
            counted from there. Defaults to None: those of the run go on.
        singular_penalty (float): Weight of :func:`~attncnn_plugin.pruning.singular_penalty` in the loss. Defaults
            to 0.
    """

    def __init__(
        self,
        epochs: Sequence[int] = (),
        begin: Optional[int] = None,
        interval: Optional[int] = None,
        criteria: Sequence = ('uniform', 'stripe'),
        layers: str = '*',
        allow_empty: bool = False,
        bias_correction: bool = True,
        num_batches: int = 8,
        reset: bool = False,
        lr_scale: float = 1.0,
        param_scheduler: Optional[Union[dict, List[dict]]] = None,
        singular_penalty: float = 0.0,
    ):
        if any(not isinstance(epoch, int) or epoch < 0 for epoch in epochs):
            raise ValueError(f'epochs={epochs} of HeadPruningHook must be epochs, counted from 0')
        if (begin is None) != (interval is None) or interval is not None and (interval < 1 or begin < 0):
            raise ValueError(
                f'begin={begin} and interval={interval} of HeadPruningHook go together, an epoch from 0 '
                'on and a number of epochs of at least 1'
            )
        if num_batches < 1 or lr_scale <= 0 or singular_penalty < 0:
            raise ValueError(
                f'num_batches={num_batches} and lr_scale={lr_scale} of HeadPruningHook must be above 0, '
                f'singular_penalty={singular_penalty} at least 0'
            )
        if reset and (lr_scale != 1 or param_scheduler is not None or allow_empty):
            raise ValueError(
                f'lr_scale={lr_scale}, param_scheduler={param_scheduler} and allow_empty={allow_empty} of '
                'HeadPruningHook are for heads that are removed: leave them out with reset=True'
            )
        self.epochs = tuple(epochs)
        self.begin = begin
        self.interval = interval
        self.judge = HeadJudge(forward_tensors, training_loss, criteria, layers, allow_empty)
        self.allow_empty = allow_empty
        self.bias_correction = bias_correction
        self.num_batches = num_batches
        self.reset = reset
        self.lr_scale = lr_scale
        self.param_scheduler = param_scheduler
        self.singular_penalty = singular_penalty

    def before_train(self, runner) -> None:
        """Checks that the run has heads to prune and counts epochs; adds the penalty to the loss.

        Raises:
            TypeError: The loop does not count epochs; the model is wrapped by something else than DDP; a criterion is
                not for a layer; or a layer cannot lose heads.
            ValueError: The model has no attention with heads to prune; criteria that are unknown.
        """
        if not isinstance(runner.train_loop, EpochBasedTrainLoop):
            raise TypeError(
                f'HeadPruningHook counts epochs, but the loop is a {type(runner.train_loop).__name__}: use '
                'train_cfg=dict(by_epoch=True, …)'
            )
        if is_rehearsal(runner):
            warn_of_rehearsal(runner, 'HeadPruningHook', 'The rates change as where it finds heads')
            return
        check_wrapper(runner)
        model = unwrapped(runner.model)
        layers = self.judge.layers(model)
        if not layers and not any(part.phase == 'conv' for part in parts_in_phases(model)):
            raise ValueError(f'HeadPruningHook finds {self._nothing}')
        self.judge.check(model)  # a mistake in the criteria must not wait for the epoch of pruning
        for name, layer in layers.items():
            self._check(name, layer)
        self.judge.total = runner.message_hub.runtime_info.get(MULTIPLY_ADDS)
        if layers and self.judge.counts_multiply_adds:
            self.judge.check_multiply_adds(model, self._batches(runner, 1)[0])
            runner.message_hub.update_info(MULTIPLY_ADDS, self.judge.total)
        if self.singular_penalty > 0:
            model.register_forward_hook(self._add_penalty)

    def before_train_epoch(self, runner) -> None:
        """Removes the heads that the criteria find, or draws them anew, at the epochs of pruning."""
        info = runner.message_hub.runtime_info  # goes into checkpoints
        if not self._is_due(runner.epoch) or info.get('heads_judged_at_epoch') == runner.epoch:
            return  # done before the run was stopped in the middle of this epoch
        runner.message_hub.update_info('heads_judged_at_epoch', runner.epoch)
        if is_rehearsal(runner):
            if not self.reset:
                self._change_rates(runner)
            return
        model = unwrapped(runner.model)
        layers = self.judge.layers(model)
        if not layers:
            runner.logger.warning(f'HeadPruningHook finds, at epoch {runner.epoch}, {self._nothing}')
            return
        try:
            self.judge.check(model)
        except (TypeError, ValueError) as error:  # of layers that a transition has made since
            runner.logger.warning(f'HeadPruningHook removes no heads at epoch {runner.epoch}: {error}')
            return
        judged = self._judged(runner, model)
        heads = {name: list(report.heads) for name, report in judged.reports.items() if report.heads}
        if not self.reset:
            heads = self.judge.to_remove(model, judged)
        for name, report in judged.reports.items():
            runner.logger.info(f'{name} at epoch {runner.epoch}: {report}')
        if heads and self.reset:
            self._begin_anew(runner, layers, heads)
        elif heads:
            self._remove(runner, model, heads, judged)

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Takes the structure of a checkpoint, and the schedulers that it was saved with.

        Raises:
            StructureError: Attention of the checkpoint cannot be in the place that it has there.
            ValueError: In training, the checkpoint has parameters that the optimizer does not have.
        """
        super().after_load_checkpoint(runner, checkpoint)
        info = checkpoint.get('message_hub', {}).get('runtime_info', {})
        pruned_before = is_resumed(runner) and info.get('heads_pruned')
        if pruned_before and self.param_scheduler is not None and isinstance(runner.optim_wrapper, OptimWrapper):
            self._replace_schedulers(runner, runner.max_epochs)

    @property
    def _nothing(self) -> str:
        """What a model has that has nothing to prune."""
        return (
            f'no attention with layers={self.judge.pattern!r} in the model, such as SAQuadratic or VisionTransformer: '
            'there are no heads to prune'
        )

    def _check(self, name: str, layer: Heads) -> None:
        """Refuses what cannot be done with a layer, whatever its weights are."""
        by_positions = isinstance(layer, PrunableHeads) and not layer.depends_on_content
        if self.reset and not (by_positions and layer.window is None):
            kind = 'attention in the place of a convolution' if by_positions else 'attention that depends on content'
            raise TypeError(f'{name} is {kind}, whose heads cannot begin anew: leave out reset=True of HeadPruningHook')

    def _is_due(self, epoch: int) -> bool:
        regular = self.interval is not None and epoch >= self.begin and (epoch - self.begin) % self.interval == 0
        return epoch in self.epochs or regular

    def _judged(self, runner, model: nn.Module) -> JudgedHeads:
        """Judges heads by some training batches. All ranks have the first one's reports."""
        batches = self._batches(runner, self.num_batches)
        with random_numbers_kept():
            judged = self.judge.judge(model, batches, reduce=lambda sums: _add_ranks(sums, runner))
        if self.judge.counts_multiply_adds:
            runner.message_hub.update_info(MULTIPLY_ADDS, self.judge.total)
        reports = [judged.reports]
        broadcast_object_list(reports)
        return dataclasses.replace(judged, reports=reports[0])

    def _batches(self, runner, number: int) -> List[Any]:
        """Training batches, the same ones whether or not the run was resumed; no random number is drawn."""
        loader = runner.train_dataloader
        for sampler in (loader.sampler, getattr(loader.batch_sampler, 'sampler', None)):
            if hasattr(sampler, 'set_epoch'):
                sampler.set_epoch(runner.epoch)
        with random_numbers_kept():
            return list(itertools.islice(loader, number))

    def _begin_anew(self, runner, layers: Dict[str, nn.Module], heads: Dict[str, List[int]]) -> None:
        # From the run's own seed: the same on every rank, and in a run that was resumed before.
        generator = torch.Generator().manual_seed(runner.seed + runner.epoch)
        for name, indices in heads.items():
            layer = layers[name]
            reset_heads(layer, indices, generator)
            for parameter_name, (dim, index) in layer.head_entries(indices).items():
                parameter = layer.get_parameter(parameter_name)
                for averaged in averaged_models(runner):
                    copied = averaged.module.get_submodule(name).get_parameter(parameter_name)
                    copied.data.index_copy_(dim, index, parameter.data.index_select(dim, index))
                for optimizer in _optimizers(runner):
                    for value in optimizer.state.get(parameter, {}).values():
                        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                            value.index_fill_(dim, index, 0)
            runner.logger.info(f'{name}: heads {indices} begin anew')

    def _remove(
        self,
        runner,
        model: nn.Module,
        heads: Dict[str, List[int]],
        judged: JudgedHeads,
    ) -> None:
        before = sum(p.numel() for p in model.parameters())
        layers = prunable_heads(model)
        without_bias = [name for name in heads if layers[name].output.bias is None]
        if self.bias_correction and without_bias:
            runner.logger.warning(
                f'{", ".join(without_bias)} of the model have no bias: nothing makes up for their heads that go, '
                'besides duplicates'
            )
        replaced = self._prune(model, heads, judged)
        for averaged in averaged_models(runner):
            self._prune(averaged.module, heads, judged)
            refresh_average(averaged)
        for optimizer in _optimizers(runner):
            replace_parameters(optimizer, replaced)
        wrap_again(runner)
        if is_model_wrapper(runner.model):
            compile_train_step(runner)
        after = sum(p.numel() for p in model.parameters())
        runner.logger.info(f'Removed heads {heads}: {before:,} parameters became {after:,}')
        self._change_rates(runner)

    def _prune(
        self, model: nn.Module, heads: Dict[str, List[int]], judged: JudgedHeads
    ) -> Dict[nn.Parameter, Successor]:
        layers = prunable_heads(model)
        for name, indices in heads.items() if self.bias_correction else ():
            layer = layers[name]
            duplicates = {
                entry.head: entry.duplicate_of
                for entry in judged.reports[name].found
                if entry.duplicate_of is not None and entry.head in indices and takes_duplicates(layer)
            }
            for head, kept in duplicates.items():
                merge_duplicate(layer, head, kept)
            if layer.output.bias is not None:
                others = [head for head in indices if head not in duplicates]
                fold_into_bias(layer, others, judged.means[name].mean)
        return prune_heads(model, heads, self.allow_empty)

    def _change_rates(self, runner) -> None:
        """The rates and the schedulers from the first pruning on."""
        if not runner.message_hub.runtime_info.get('heads_pruned'):
            self._scale_learning_rate(runner)
            if self.param_scheduler is not None:
                self._replace_schedulers(runner, runner.max_epochs - runner.epoch)
        runner.message_hub.update_info('heads_pruned', True)

    def _scale_learning_rate(self, runner) -> None:
        for optimizer in _optimizers(runner):
            for group in optimizer.param_groups:
                for key in {'lr', 'initial_lr'} & group.keys():
                    group[key] *= self.lr_scale
        for scheduler in _schedulers(runner):
            if scheduler.param_name == 'lr':
                scheduler.base_values = [value * self.lr_scale for value in scheduler.base_values]

    def _replace_schedulers(self, runner, epochs: int) -> None:
        for optimizer in _optimizers(runner):
            for group in optimizer.param_groups:
                group['lr'] = group.get('initial_lr', group['lr'])
        build_schedulers(runner, self.param_scheduler, epochs)

    def _add_penalty(self, model: nn.Module, args, outputs):
        """Adds the penalty to the losses that a model returns in training."""
        if model.training and isinstance(outputs, dict):
            penalties = [
                singular_penalty(layer)
                for layer in model.modules()
                if isinstance(layer, PrunableHeads)
                and not layer.depends_on_content
                and layer.gaussian_heads() is not None
            ]
            if penalties:
                outputs['loss_singular'] = self.singular_penalty * sum(penalties)
        return outputs


def _add_ranks(sums: torch.Tensor, runner) -> None:
    """Adds the sums of all ranks, in place; the backend of distributed training may need them on another device."""
    of_ranks = sums.to(next(runner.model.parameters()).device)
    all_reduce(of_ranks)
    sums.copy_(of_ranks)


def _optimizers(runner) -> Iterator[torch.optim.Optimizer]:
    wrapper = runner.optim_wrapper
    wrappers = wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    return (wrapper.optimizer for wrapper in wrappers)


def _schedulers(runner) -> list:
    schedulers = runner.param_schedulers or []
    return list(itertools.chain(*schedulers.values())) if isinstance(schedulers, dict) else schedulers
