"""From convolution to attention in the middle of a training (L21, section 4)."""

import copy
from typing import Dict, List, Optional, Union

import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from mmpretrain.registry import HOOKS
from torch import Tensor, nn

from ..convert.drift import relative_change, tensors_in, untouched
from ..training.phases import parts_in_phases
from .rebuild import (
    averaged_models,
    build_schedulers,
    check_wrapper,
    follow_checkpoint,
    make_groups_plain,
    refresh_average,
    unwrapped,
    wrap_again,
)
from .rehearsal import is_rehearsal, warn_of_rehearsal
from .runner import accumulative_counts, compile_train_step, forward_tensors, images_of_one_size, is_resumed

LOOPS = {'epoch': EpochBasedTrainLoop, 'iter': IterBasedTrainLoop}  # what counts in these units
UNITS = {'epoch': 'epochs', 'iter': 'iterations'}
DRIFT = {'features': 'transition_drift_of_features', 'output': 'transition_drift'}  # names in the message hub


@HOOKS.register_module()
class PhaseTransitionHook(Hook):
    """Turns the convolutions of a model into attention after some epochs, or after some iterations.

    The model has a :class:`~attncnn_plugin.mm.backbones.CMHSA`, a backbone of
    :func:`~attncnn_plugin.mm.conv_to_attention.conv_to_attention`, or any other module with a ``phase``, ``'conv'`` or
    ``'attn'``, and a ``to_attention(generator)`` that returns something to print.

    At the first iteration of the second phase, on every rank, the hook converts the model, builds the optimizer wrapper
    and the schedulers of the second phase, wraps the model anew for distributed training and converts the copy of
    an ``EMAHook``. It logs what it did, and how far the features and the output on the current batch moved.

    A checkpoint of either phase resumes with the structure, the optimizer and the schedule that it was saved with.

    For mmpretrain's ``vis_scheduler.py``, which shows a schedule without the model, there are the rates of both phases.

    ``compile=True`` compiles the training steps of both phases. Runs without this hook that have ``compile=True`` and a
    ``paramwise_cfg`` fail with PyTorch 2.13 and 2.14, which cannot compile mmengine's parameter groups; 2.15 can.

    Args:
        epoch (int, optional): Number of epochs of the first phase. 0 is right after the weights were loaded, by
            ``load_from`` for instance.
        optim_wrapper (dict, optional): The optimizer wrapper of the second phase: what it does not say is that of
            the first, as when configs inherit (``_delete_=True`` included). Defaults to None, means the same.
        param_scheduler (dict | list[dict], optional): The schedulers of the second phase; their ``begin`` and ``end``
            are counted from its beginning, and ``end`` is its end if not given. Defaults to None, means a constant
            rate; with ``epoch=0`` or ``iter=0`` it means those of the run.
        iter (int, optional): Number of iterations of the first phase, in the place of ``epoch``, for runs that count
            iterations: ``train_cfg=dict(by_epoch=False, …)``, as mmsegmentation's. The schedulers of the second phase
            then need ``by_epoch=False``.

    Examples:
        >>> custom_hooks = [
        ...     dict(
        ...         type='PhaseTransitionHook',
        ...         epoch=200,
        ...         optim_wrapper=dict(optimizer=dict(lr=5e-5)),
        ...         param_scheduler=[
        ...             dict(type='LinearLR', start_factor=1e-3, begin=0, end=5, convert_to_iter_based=True),
        ...             dict(type='CosineAnnealingLR', begin=5, convert_to_iter_based=True),
        ...         ])
        ... ]
    """

    priority = 'HIGHEST'  # before all that looks at the optimizer, and before EMAHook loads its copy

    def __init__(
        self,
        epoch: Optional[int] = None,
        optim_wrapper: Optional[dict] = None,
        param_scheduler: Optional[Union[dict, List[dict]]] = None,
        iter: Optional[int] = None,
    ):
        if (epoch is None) == (iter is None):
            raise ValueError(
                f'epoch={epoch} and iter={iter} of PhaseTransitionHook: give one of them, the length of the first phase'
            )
        self.unit = 'epoch' if iter is None else 'iter'
        self.begin = epoch if iter is None else iter  # of the second phase
        if not isinstance(self.begin, int) or self.begin < 0:
            raise ValueError(
                f'{self._when} of PhaseTransitionHook must be the number of {UNITS[self.unit]} of the first phase, '
                '0 for none'
            )
        self.optim_wrapper = optim_wrapper
        self.param_scheduler = param_scheduler

    def before_train(self, runner) -> None:
        """Whether the run can make the transition.

        Raises:
            TypeError: The loop counts something else, or the model is wrapped by something else than DDP.
            ValueError: There is nothing to convert, or a mistake in the settings of the second phase.
        """
        if not isinstance(runner.train_loop, LOOPS[self.unit]):
            raise TypeError(
                f'{self._when} of PhaseTransitionHook counts {UNITS[self.unit]}, but the loop is a '
                f'{type(runner.train_loop).__name__}: epoch is for train_cfg=dict(by_epoch=True, …), and iter for '
                'by_epoch=False'
            )
        if is_rehearsal(runner):
            warn_of_rehearsal(runner, 'PhaseTransitionHook', 'The rates of the second phase follow all the same')
            return
        check_wrapper(runner)
        make_groups_plain(runner.optim_wrapper)
        parts = parts_in_phases(unwrapped(runner.model))
        if not parts:
            raise ValueError(
                'PhaseTransitionHook finds no CMHSA in the model, nor a backbone of the type ConvToAttention: there '
                'is nothing to convert'
            )
        done = self._done(runner)
        begins = done < self.begin or not is_resumed(runner)  # a first phase, of no length for 0
        if begins and any(part.phase == 'attn' for part in parts):
            raise ValueError(
                f"the model is in phase='attn' at {self.unit} {done}, before {self._when} of "
                "PhaseTransitionHook turns it: start with phase='conv'; go on with a checkpoint of the second phase by "
                f"resume=True and the {self.unit} that it was trained with; or train phase='attn' without this hook"
            )
        if self._planned(runner) <= self.begin:
            runner.logger.warning(
                f'The run ends after {self._planned(runner)} {UNITS[self.unit]}, before the transition to attention '
                f'after {self.unit} {self.begin} of PhaseTransitionHook'
            )
        elif any(part.phase == 'conv' for part in parts):
            # A mistake in the second phase's settings must not wait for the end of the first.
            first_phase = runner.optim_wrapper, runner.param_schedulers
            self._build_optimization(runner, max(self.begin, done))
            runner.optim_wrapper, runner.param_schedulers = first_phase

    def before_train_epoch(self, runner) -> None:
        """The rates of the second phase, where only the schedule is shown."""
        if self.unit == 'epoch' and runner.epoch == self.begin and is_rehearsal(runner):
            self._rehearse_second_phase(runner)

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        """The transition, when its time has come."""
        done = self._done(runner)
        if done < self.begin:
            return
        if self.unit == 'iter' and done == self.begin and is_rehearsal(runner):
            self._rehearse_second_phase(runner)
        model = unwrapped(runner.model)
        parts = [part for part in parts_in_phases(model) if part.phase == 'conv']
        if not parts:
            return
        self._warn_of_lost_gradients(runner)
        before = self._outputs(runner, model, data_batch)
        for part in parts:
            # From the run's own seed: the same on every rank, and in a run that was resumed before.
            change = part.to_attention(torch.Generator().manual_seed(runner.seed))
            runner.logger.info(f'Transition at {self.unit} {done}:\n{change}')
        model.zero_grad(set_to_none=True)
        self._begin_second_phase(runner, done)
        runner.optim_wrapper.initialize_count_status(runner.model, runner.iter, runner.max_iters)
        if is_model_wrapper(runner.model):  # a new one
            compile_train_step(runner)
        for averaged in averaged_models(runner):
            _average_attention(averaged, runner.seed)
        self._log_drift(runner, before, self._outputs(runner, model, data_batch))

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Before a checkpoint of the second phase is resumed: the model, optimizer and schedulers of that phase."""
        changed = follow_checkpoint(runner, checkpoint)
        if changed and is_resumed(runner) and isinstance(runner.optim_wrapper, OptimWrapper):
            runner.logger.info('The checkpoint is of the second phase: attention, and its optimizer and schedulers')
            self._begin_second_phase(runner, self.begin)

    @property
    def _when(self) -> str:
        return f'{self.unit}={self.begin!r}'

    def _done(self, runner) -> int:
        """The epochs or iterations that are over."""
        return runner.epoch if self.unit == 'epoch' else runner.iter

    def _planned(self, runner) -> int:
        """The epochs or iterations of the whole run."""
        return runner.max_epochs if self.unit == 'epoch' else runner.max_iters

    def _begin_second_phase(self, runner, begin: int) -> None:
        """Wrapper, optimizer and schedulers for the parameters that the model now has."""
        wrap_again(runner)
        self._build_optimization(runner, begin)

    def _build_optimization(self, runner, begin: int) -> None:
        """Optimizer wrapper and schedulers of a second phase that begins at an epoch or iteration."""
        config = Config(dict(optim_wrapper=runner.cfg.get('optim_wrapper') or {}))
        config.merge_from_dict(dict(optim_wrapper=copy.deepcopy(self.optim_wrapper or {})))
        if not config.optim_wrapper.get('constructor') and 'type' not in config.optim_wrapper.get('optimizer', {}):
            raise ValueError(
                f'optim_wrapper={self.optim_wrapper} of PhaseTransitionHook names no type of optimizer, and the config '
                "of the run has none to inherit: optim_wrapper=dict(optimizer=dict(type='AdamW', lr=…))"
            )
        runner.param_schedulers = None  # scale_lr wants it before them
        runner.optim_wrapper = runner.build_optim_wrapper(config.optim_wrapper)
        make_groups_plain(runner.optim_wrapper)
        runner.scale_lr(runner.optim_wrapper, runner.auto_scale_lr)
        self._build_schedulers(runner, begin)

    def _build_schedulers(self, runner, begin: int) -> None:
        build_schedulers(runner, self._schedulers(runner), self._planned(runner) - begin, self.unit == 'epoch')

    def _schedulers(self, runner) -> Union[dict, List[dict]]:
        """The configs of the second phase's schedulers."""
        if self.param_scheduler is None and self.begin == 0:
            return runner.cfg.get('param_scheduler') or []
        return self.param_scheduler or []

    def _rehearse_second_phase(self, runner) -> None:
        """The second phase's settings and schedulers for the optimizer of the first: a tool has told no config."""
        settings = (self.optim_wrapper or {}).get('optimizer', {})
        for group in runner.optim_wrapper.param_groups:
            for key in [key for key in group if key.startswith('initial_')]:  # as before the first phase's schedulers
                group[key[len('initial_') :]] = group.pop(key)
            group.update({key: value for key, value in settings.items() if key in group})
        self._build_schedulers(runner, self.begin)

    @staticmethod
    def _outputs(runner, model: nn.Module, data_batch) -> Dict[str, List[Tensor]]:
        """The tensors that the parts that turn, and the model, put out for a batch in evaluation mode."""
        features: List[Tensor] = []
        hooks = [
            part.register_forward_hook(lambda _module, _inputs, output: features.extend(tensors_in(output)))
            for part in parts_in_phases(model)
            if part is not model
        ]
        outputs: List[Tensor] = []
        try:
            with untouched(model):
                outputs += tensors_in(forward_tensors(model, images_of_one_size(data_batch)))
        except Exception as error:  # some models have no such mode; the training must not end for a line in the log
            runner.logger.warning(
                f'The change of the output is not known: {type(model).__name__} has no output for a '
                f"batch in mode='tensor' ({error})"
            )
        finally:
            for hook in hooks:
                hook.remove()
        found = {'features': features, 'output': outputs}
        return {what: tensors for what, tensors in found.items() if tensors}

    @staticmethod
    def _log_drift(runner, before: Dict[str, List[Tensor]], after: Dict[str, List[Tensor]]) -> None:
        """Logs how far the features and the output moved.

        A detector that chooses boxes by their scores may choose others: then its features alone can be compared.
        """
        for what in [what for what in before if what in after]:
            drift = relative_change(before[what], after[what])
            if drift is None:
                numbers, were = (sum(tensor.numel() for tensor in tensors[what]) for tensors in (after, before))
                runner.logger.info(
                    f'The {what} on the current batch has {numbers} numbers, and had {were}: its relative change is '
                    'not known'
                )
                continue
            runner.message_hub.update_info(DRIFT[what], drift)
            runner.logger.info(f'Relative change of the {what} on the current batch: {drift:.3g}')

    @staticmethod
    def _warn_of_lost_gradients(runner) -> None:
        counts = accumulative_counts(runner.optim_wrapper)
        if runner.iter % counts:
            runner.logger.warning(
                f'The first phase ends after {runner.iter} iterations, not a multiple of accumulative_counts={counts}: '
                f'the gradients of the last {runner.iter % counts} are dropped'
            )


def _average_attention(averaged: nn.Module, seed: int) -> None:
    """The average of the first phase, as attention: its function stays as it was too."""
    for part in parts_in_phases(averaged.module):
        part.to_attention(torch.Generator().manual_seed(seed))  # no average of two random draws
    refresh_average(averaged)
