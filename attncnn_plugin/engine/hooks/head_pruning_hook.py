"""Degenerate heads removed, or drawn anew, while a model is trained (Cordonnier et al. 2020 (C20), appendix E)."""

import itertools
from typing import Dict, Iterator, List, Optional, Sequence, Set, Union

import torch
from mmengine.dist import all_reduce, broadcast_object_list
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import EpochBasedTrainLoop
from mmpretrain.registry import HOOKS
from torch import nn

from ...layers.prunable_heads import PrunableHeads, Replacement
from ...layers.structure import follow_state_dict
from ...pruning import (
    DegeneracyReport,
    HeadMeans,
    find_degenerate_heads,
    fold_into_bias,
    head_means,
    least_uniform_head,
    merge_duplicate,
    replace_parameters,
    reset_heads,
    singular_penalty,
)
from ...utils.runner import compile_train_step, forward_tensors, is_resumed
from .phases import parts_in_phases
from .random_state import random_numbers_kept
from .rebuild import averaged_models, build_schedulers, check_wrapper, refresh_average, unwrapped, wrap_again
from .rehearsal import is_rehearsal, warn_of_rehearsal


@HOOKS.register_module()
class HeadPruningHook(Hook):
    """Finds degenerate heads at the beginning of some epochs, removes them, and lets the training go on.

    It works on every layer whose heads depend on positions alone, in a self-attention backbone or in the place of a
    convolution; those of a :class:`PhaseTransitionHook` are pruned at epochs after its transition. Parameters really
    shrink. The optimizer keeps its groups, and the state of the entries that are left. Schedulers go on. The copy of an
    ``EMAHook`` loses the same heads. A model that is trained on several ranks is wrapped anew, and all ranks remove the
    heads that the first one finds.

    For mmpretrain's ``vis_scheduler.py``, which shows a schedule without the model, the rates change at the first of
    these epochs, as where heads are found.

    A pruned checkpoint loads with the config that made it. In distributed training its ``load_from`` needs this hook
    too, with no epochs if nothing more is to be pruned.

    Args:
        epochs (Sequence[int]): Epochs at whose beginning heads are pruned, counted from 0; 0 is right after loading.
            Defaults to none.
        begin (int, optional): With ``interval``, the first of further such epochs. Defaults to None.
        interval (int, optional): Number of epochs from one to the next. Defaults to None.
        criteria (Sequence[str | dict | Callable]): The criteria of degenerate heads, see
            :func:`~attncnn_plugin.pruning.find_degenerate_heads`. Defaults to C20's, ``('uniform', 'stripe')``.
        allow_empty (bool): Whether a layer of degenerate heads alone becomes its bias; otherwise it keeps the least
            uniform one. Defaults to False.
        bias_correction (bool): Whether the mean output of a removed head, over some training batches, is added to the
            bias of its layer, and a duplicate's values to those of the head that it repeats. C20 does without, so that
            the accuracy falls at first (appendix E, Figure 13). A layer without a bias, as in the place of most
            convolutions before a batch norm, loses the mean output, and the log says so. Defaults to True.
        num_batches (int): Number of these batches, on each rank. Defaults to 8.
        reset (bool): Whether degenerate heads are drawn anew instead of being removed: centre, width and values as of
            a new layer, momentum at zero. Not for attention in the place of convolutions. Defaults to False.
        lr_scale (float): Factor of the learning rate from the first pruning on; C20 has 0.1. Defaults to 1.
        param_scheduler (dict | list[dict], optional): Schedulers that replace those of the run at the first pruning:
            they begin with the rate that the run began with, times ``lr_scale``, and their ``begin`` and ``end`` are
            counted from there. Defaults to None: those of the run go on.
        singular_penalty (float): Weight of :func:`~attncnn_plugin.pruning.singular_penalty` in the loss. Defaults
            to 0.
    """

    priority = 1  # after PhaseTransitionHook, before all that looks at parameters, and before EMAHook loads its copy

    def __init__(
        self,
        epochs: Sequence[int] = (),
        begin: Optional[int] = None,
        interval: Optional[int] = None,
        criteria: Sequence = ('uniform', 'stripe'),
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
        self.epochs = tuple(epochs)
        self.begin = begin
        self.interval = interval
        self.criteria = list(criteria)
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
            TypeError: The loop does not count epochs, or the model is wrapped by something else than DDP.
            ValueError: The model has no attention by positions alone; criteria that are not for it.
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
        layers = _layers(model)
        if not layers and not any(part.phase == 'conv' for part in parts_in_phases(model)):
            raise ValueError(f'HeadPruningHook finds {_nothing(model)}')
        for name, layer in layers.items():  # a mistake in the criteria must not wait for the epoch of pruning
            self._check(name, layer)
        if self.singular_penalty > 0:
            model.register_forward_hook(self._add_penalty)

    def before_train_epoch(self, runner) -> None:
        """Removes the degenerate heads, or draws them anew, at the epochs of pruning."""
        info = runner.message_hub.runtime_info  # goes into checkpoints
        if not self._is_due(runner.epoch) or info.get('heads_judged_at_epoch') == runner.epoch:
            return  # done before the run was stopped in the middle of this epoch
        runner.message_hub.update_info('heads_judged_at_epoch', runner.epoch)
        if is_rehearsal(runner):
            if not self.reset:
                self._change_rates(runner)
            return
        model = unwrapped(runner.model)
        layers = _layers(model)
        if not layers:
            runner.logger.warning(f'HeadPruningHook finds, at epoch {runner.epoch}, {_nothing(model)}')
            return
        means = self._observe(runner, model, layers)
        reports = self._find(layers, means)
        heads = {name: self._to_remove(layers[name], report, means[name]) for name, report in reports.items()}
        for name in layers:
            runner.logger.info(f'{name} at epoch {runner.epoch}: {reports[name]}')
        heads = {name: indices for name, indices in heads.items() if indices}
        if heads and self.reset:
            self._begin_anew(runner, layers, heads)
        elif heads:
            self._remove(runner, model, heads, reports, means)

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Takes the structure of a checkpoint, and the schedulers that it was saved with.

        Raises:
            ValueError: The checkpoint has attention where the model has convolutions.
        """
        if not isinstance(runner.optim_wrapper, OptimWrapper):
            return  # no training: the model follows its checkpoint by itself
        state_dict, model = checkpoint['state_dict'], unwrapped(runner.model)
        before = set(model.parameters())
        changed = follow_state_dict(model, state_dict)
        self._check_parameters(model, before)
        for averaged in averaged_models(runner):
            changed |= follow_state_dict(averaged.module, state_dict)
        if changed:
            wrap_again(runner)
        info = checkpoint.get('message_hub', {}).get('runtime_info', {})
        if is_resumed(runner) and info.get('heads_pruned') and self.param_scheduler is not None:
            self._replace_schedulers(runner, runner.max_epochs)

    @staticmethod
    def _check_parameters(model: nn.Module, known: Set[nn.Parameter]) -> None:
        """Refuses a model that has other parameters than those that the optimizer was built with."""
        new = [
            name
            for name, layer in model.named_modules()
            if isinstance(layer, PrunableHeads) and not known.issuperset(layer.parameters())
        ]
        if new:
            raise ValueError(
                f'the checkpoint has attention in the place of convolutions, {", ".join(new)}, whose parameters the '
                "optimizer does not have: build the model with it, with phase='attn' of the backbone ConvToAttention, "
                'or resume the run with the PhaseTransitionHook that it had'
            )

    def _check(self, name: str, layer: PrunableHeads) -> None:
        """Refuses what cannot be done with a layer, whatever its weights are."""
        if self.reset and layer.window is not None:
            raise TypeError(
                f'{name} is attention in the place of a convolution, whose heads cannot begin anew: leave out '
                'reset=True of HeadPruningHook'
            )
        window = [] if layer.window is None else zip(layer.window.kernel_size, layer.window.dilation)
        find_degenerate_heads(layer, self.criteria, [max(2, (k - 1) * d + 1) for k, d in window] or (2, 2))

    def _is_due(self, epoch: int) -> bool:
        regular = self.interval is not None and epoch >= self.begin and (epoch - self.begin) % self.interval == 0
        return epoch in self.epochs or regular

    @torch.no_grad()
    def _observe(self, runner, model: nn.Module, layers: Dict[str, nn.Module]) -> Dict[str, HeadMeans]:
        """Runs some training batches, the same ones whether or not the run was resumed, and draws no random number."""
        loader = runner.train_dataloader
        for sampler in (loader.sampler, getattr(loader.batch_sampler, 'sampler', None)):
            if hasattr(sampler, 'set_epoch'):
                sampler.set_epoch(runner.epoch)
        training = model.training
        model.eval()
        with head_means(layers.values()) as means, random_numbers_kept():
            for batch in itertools.islice(loader, self.num_batches):
                forward_tensors(model, batch)
        model.train(training)
        for own in means:
            all_reduce(own.total)
            all_reduce(own.count)
        return dict(zip(layers, means))

    def _find(self, layers: Dict[str, nn.Module], means: Dict[str, HeadMeans]) -> Dict[str, DegeneracyReport]:
        """The first rank's reports, on every rank."""
        reports = [
            {name: find_degenerate_heads(layer, self.criteria, means[name].size) for name, layer in layers.items()}
        ]
        broadcast_object_list(reports)
        return reports[0]

    def _to_remove(self, layer: nn.Module, report: DegeneracyReport, means: HeadMeans) -> List[int]:
        heads = list(report.heads)
        if len(heads) == layer.num_heads and heads and not (self.allow_empty or self.reset):
            heads.remove(least_uniform_head(layer, means.size))
        return heads

    def _begin_anew(self, runner, layers: Dict[str, nn.Module], heads: Dict[str, List[int]]) -> None:
        # From the run's own seed: the same on every rank, and in a run that was resumed before.
        generator = torch.Generator().manual_seed(runner.seed + runner.epoch)
        for name, indices in heads.items():
            layer = layers[name]
            reset_heads(layer, indices, generator)
            for parameter_name, (dim, index) in layer.head_entries(indices).items():
                parameter = layer.get_parameter(parameter_name)
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
        reports: Dict[str, DegeneracyReport],
        means: Dict[str, HeadMeans],
    ) -> None:
        before = sum(p.numel() for p in model.parameters())
        without_bias = [name for name in heads if model.get_submodule(name).value.bias is None]
        if self.bias_correction and without_bias:
            runner.logger.warning(
                f'{", ".join(without_bias)} of the model have no bias: nothing makes up for their heads that go, '
                'besides duplicates'
            )
        replaced = self._prune(model, heads, reports, means)
        for averaged in averaged_models(runner):
            self._prune(averaged.module, heads, reports, means)
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
        self,
        model: nn.Module,
        heads: Dict[str, List[int]],
        reports: Dict[str, DegeneracyReport],
        means: Dict[str, HeadMeans],
    ) -> Dict[nn.Parameter, Replacement]:
        replaced = {}
        for name, indices in heads.items():
            layer = model.get_submodule(name)
            if self.bias_correction:
                duplicates = {
                    entry.head: entry.duplicate_of
                    for entry in reports[name].found
                    if entry.duplicate_of is not None
                    and entry.head in indices
                    and getattr(layer, 'value_proj', None) is None
                }
                for head, kept in duplicates.items():
                    merge_duplicate(layer, head, kept)
                if layer.value.bias is not None:
                    fold_into_bias(layer, [head for head in indices if head not in duplicates], means[name].mean)
            replaced.update(layer.prune_heads(indices, self.allow_empty))
        return replaced

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
                singular_penalty(layer) for layer in _layers(model).values() if layer.gaussian_heads() is not None
            ]
            if penalties:
                outputs['loss_singular'] = self.singular_penalty * sum(penalties)
        return outputs


def _layers(model: nn.Module) -> Dict[str, PrunableHeads]:
    """The attention layers whose heads depend on positions alone, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, PrunableHeads) and not layer.depends_on_content
    }


def _nothing(model: nn.Module) -> str:
    """Why there is nothing to prune in a model without attention by positions alone."""
    by_content = [name for name, module in model.named_modules() if isinstance(module, PrunableHeads)]
    others = f'; what heads of {", ".join(by_content)} see depends on the image' if by_content else ''
    return 'no attention by positions alone in the model, such as SAQuadratic: there are no heads to prune' + others


def _optimizers(runner) -> Iterator[torch.optim.Optimizer]:
    wrapper = runner.optim_wrapper
    wrappers = wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    return (wrapper.optimizer for wrapper in wrappers)


def _schedulers(runner) -> list:
    schedulers = runner.param_schedulers or []
    return list(itertools.chain(*schedulers.values())) if isinstance(schedulers, dict) else schedulers
