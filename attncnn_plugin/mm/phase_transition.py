"""From convolution to attention in the middle of a training (L21, section 4)."""

import copy
from typing import List, Optional, Sequence, Union

from mmengine.config import Config
from mmengine.dist import all_gather_object
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmpretrain.registry import HOOKS
from torch import Tensor, nn

from ..convert.drift import evaluated_copy, relative_change, tensors_in
from ..training import parts_in_phases, to_attention
from .runner import (
    UNITS,
    add_scalars,
    averaged_models,
    build_schedulers,
    check_loop,
    check_wrapper,
    follow_checkpoint,
    forward,
    have_stepped,
    is_resumed,
    make_groups_plain,
    refresh_averages,
    unwrapped,
    wrap_again,
)


@HOOKS.register_module()
class PhaseTransitionHook(Hook):
    """Turns the convolutions of a model into attention after some epochs, or after some iterations.

    The model has a :class:`~attncnn_plugin.mm.backbones.CMHSA`, a backbone of
    :func:`~attncnn_plugin.mm.conv_to_attention.conv_to_attention`, or any other module with a ``phase``, ``'conv'`` or
    ``'attn'``, and a ``to_attention(generator)`` that returns something to print.

    At the first iteration of the second phase, on every rank, the hook converts the model, builds the optimizer wrapper
    and the schedulers of the second phase, wraps the model anew for distributed training and converts the copy of
    an ``EMAHook``. It logs what it did, and how far the features of an image of the current batch moved.

    A checkpoint of either phase resumes with the structure, the optimizer and the schedule that it was saved with.

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
        iter (int, optional): Number of iterations of the first phase, instead of ``epoch``, for runs that count
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
        given = [length for length in (epoch, iter) if length is not None]
        if len(given) != 1 or not isinstance(given[0], int) or given[0] < 0:
            raise ValueError(
                f'epoch={epoch!r} and iter={iter!r} of PhaseTransitionHook: give one of them, the number of epochs or '
                'of iterations of the first phase, 0 for none'
            )
        self.unit = 'epoch' if iter is None else 'iter'
        self.begin = given[0]  # of the second phase
        self.optim_wrapper = optim_wrapper or {}
        self.param_scheduler = param_scheduler

    def before_train(self, runner) -> None:
        """Checks that the run can make the transition.

        Raises:
            TypeError: The loop counts something else, or the model is wrapped by something else than DDP.
            ValueError: There is nothing to convert, or a mistake in the settings of the second phase.
        """
        check_loop(runner, self, self.unit)
        check_wrapper(runner)
        make_groups_plain(runner)
        model = unwrapped(runner.model)
        if not parts_in_phases(model):
            raise ValueError(
                'PhaseTransitionHook finds no CMHSA in the model, nor a backbone of the type ConvToAttention: there '
                'is nothing to convert'
            )
        done = self._done(runner)
        begins = done < self.begin or not is_resumed(runner)  # a first phase, of no length for 0
        if begins and parts_in_phases(model, 'attn'):
            raise ValueError(
                f"the model is in phase='attn' at {self.unit} {done}, before {self.unit}={self.begin} of "
                "PhaseTransitionHook turns it: start with phase='conv'; keep training a checkpoint of the second phase "
                f"by resume=True and the {self.unit} that it was trained with; or train phase='attn' without this hook"
            )
        self._warn_of_end(runner, self._planned(runner))
        if self._planned(runner) > self.begin and parts_in_phases(model, 'conv'):
            # A mistake in the second phase's settings must not wait for the end of the first.
            first_phase = runner.optim_wrapper, runner.param_schedulers
            self._build_optimization(runner, max(self.begin, done))
            runner.optim_wrapper, runner.param_schedulers = first_phase

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        """Makes the transition, when its time has come."""
        done, model = self._done(runner), unwrapped(runner.model)
        parts = parts_in_phases(model, 'conv')
        if done < self.begin or not parts:
            return
        if not have_stepped(runner):
            runner.logger.warning(
                f'The first phase ends after {runner.iter} iterations, in the middle of those whose gradients are '
                'accumulated: the gradients of the last ones are dropped'
            )
        before = _features(runner, model, parts, data_batch)
        # The same draw on every rank, in a run that was resumed before, and in averages.
        seed = all_gather_object(runner.seed)[0]
        for change in to_attention(model, seed):
            runner.logger.info(f'Transition at {self.unit} {done}:\n{change}')
        for averaged in averaged_models(runner):
            to_attention(averaged.module, seed)
        refresh_averages(runner)
        wrap_again(runner, compile=True)
        self._build_optimization(runner, done)
        runner.optim_wrapper.initialize_count_status(runner.model, runner.iter, runner.max_iters)
        drift = relative_change(before, _features(runner, model, parts, data_batch)) if before else None
        if drift is not None:
            runner.message_hub.update_info('transition_drift', drift)
            add_scalars(runner, {'transition/relative_change': drift}, done)  # curves are marked here
            runner.logger.info(f'Relative change of the features on the current batch: {drift:.3g}')

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Brings a run that resumes a checkpoint of the second phase to that phase: model, optimizer, schedulers."""
        changed = follow_checkpoint(runner, checkpoint)
        if changed and is_resumed(runner) and isinstance(runner.optim_wrapper, OptimWrapper):
            runner.logger.info('The checkpoint is of the second phase: attention, and its optimizer and schedulers')
            wrap_again(runner)
            self._build_optimization(runner, self.begin)

    def after_train(self, runner) -> None:
        """Warns of a run without a second phase, which another hook may have stopped."""
        self._warn_of_end(runner, self._done(runner))

    def _warn_of_end(self, runner, end: int) -> None:
        if end <= self.begin:
            runner.logger.warning(
                f'The run ends after {end} {UNITS[self.unit]}, before the transition to attention after {self.unit} '
                f'{self.begin} of PhaseTransitionHook'
            )

    def _done(self, runner) -> int:
        """Returns the epochs or iterations that are over."""
        return runner.epoch if self.unit == 'epoch' else runner.iter

    def _planned(self, runner) -> int:
        """Returns the epochs or iterations of the whole run."""
        return runner.max_epochs if self.unit == 'epoch' else runner.max_iters

    def _build_optimization(self, runner, begin: int) -> None:
        """Builds optimizer wrapper and schedulers of a second phase that begins at an epoch or iteration."""
        config = Config(dict(optim_wrapper=runner.cfg.get('optim_wrapper') or {}))
        config.merge_from_dict(dict(optim_wrapper=copy.deepcopy(self.optim_wrapper)))
        if not config.optim_wrapper.get('constructor') and 'type' not in config.optim_wrapper.get('optimizer', {}):
            raise ValueError(
                f'optim_wrapper={self.optim_wrapper} of PhaseTransitionHook names no type of optimizer, and the config '
                "of the run has none to inherit: optim_wrapper=dict(optimizer=dict(type='AdamW', lr=…))"
            )
        runner.param_schedulers = None  # scale_lr wants it before them
        runner.optim_wrapper = runner.build_optim_wrapper(config.optim_wrapper)
        make_groups_plain(runner)
        runner.scale_lr(runner.optim_wrapper, runner.auto_scale_lr)
        schedulers = self.param_scheduler
        if schedulers is None and self.begin == 0:
            schedulers = runner.cfg.get('param_scheduler')
        build_schedulers(runner, schedulers or [], self._planned(runner) - begin, self.unit == 'epoch')


def _features(runner, model: nn.Module, parts: Sequence[nn.Module], batch) -> List[Tensor]:
    """Returns what parts of a model put out for the first image of a batch, in evaluation mode; none if it fails."""
    # A copy: the preprocessor writes into the samples of images that are trained on next.
    image = copy.deepcopy({key: values[:1] for key, values in batch.items()} if isinstance(batch, dict) else batch)
    features: List[Tensor] = []
    names = {module: name for name, module in model.named_modules()}
    try:
        with evaluated_copy(model) as trial:
            for part in parts:
                own = trial.get_submodule(names[part])
                own.register_forward_hook(lambda _module, _inputs, output: features.extend(tensors_in(output)))
            forward(trial, image, 'tensor')
    except Exception as error:  # some models have no such mode; the training must not end for a line in the log
        runner.logger.warning(
            f'The change of the features is not known: {type(model).__name__} has no output for a batch in '
            f"mode='tensor' ({error})"
        )
        return []
    return features
