"""From convolution to attention in the middle of a training (L21, section 4)."""

import copy
from typing import List, Optional, Union

from mmengine.config import Config
from mmengine.dist import all_gather_object
from mmengine.optim import OptimWrapper
from mmpretrain.registry import HOOKS

from ..training import TwoPhases, parts_in_phases
from ..training.loops import check_epochs
from .follow_state_dict import ChangingHook
from .runner import add_scalars, averaged_models, follow_checkpoint, make_groups_plain, unwrapped, wrap_again


@HOOKS.register_module()
class PhaseTransitionHook(ChangingHook):
    """Turns the convolutions of a model into attention after some epochs, or after some iterations.

    It calls :class:`~attncnn_plugin.training.TwoPhases`. The model has a
    :class:`~attncnn_plugin.mm.backbones.CMHSA`, a backbone of
    :func:`~attncnn_plugin.mm.conv_to_attention.conv_to_attention`, or any other
    :class:`~attncnn_plugin.training.PhasedModule`.

    When the second phase begins, on every rank, the hook turns the model and the copy of an ``EMAHook``, logs what has
    changed, builds the optimizer wrapper and the schedulers of the second phase, and wraps the model anew for
    distributed training.

    A checkpoint of either phase resumes with the structure, the optimizer and the schedule that it was saved with. With
    ``epoch=0`` a model that is attention already trains by the second phase's optimizer at once.

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
        if (epoch is None) == (iter is None):
            raise ValueError(
                f'epoch={epoch!r} and iter={iter!r} of PhaseTransitionHook: give one, the end of the first phase'
            )
        self.unit, given = ('epoch', epoch) if iter is None else ('iter', iter)
        self.times = check_epochs(f'{self.unit}={given!r} of PhaseTransitionHook', [given])
        self.phases = TwoPhases(self.times[0])
        self.optim_wrapper = optim_wrapper or {}
        self.param_scheduler = param_scheduler

    def before_train(self, runner) -> None:
        """Checks that the run can make the transition.

        Raises:
            TypeError: The loop counts something else, or the model is wrapped by something else than DDP.
            ValueError: There is nothing to convert, or a mistake in the settings of the second phase.
        """
        super().before_train(runner)
        make_groups_plain(runner)
        # The same draw on every rank, in a run that was resumed before, and in averages.
        self.phases.seed = all_gather_object(runner.seed)[0]
        model = unwrapped(runner.model)
        self.phases.check(model)
        if getattr(runner, f'max_{self.unit}s') > self.phases.epoch and parts_in_phases(model, 'conv'):
            # A mistake in the second phase's settings must not wait for the end of the first.
            first_phase = runner.optim_wrapper, runner.param_schedulers
            self._build_optimization(runner)
            runner.optim_wrapper, runner.param_schedulers = first_phase

    def before_train_epoch(self, runner) -> None:
        """Makes the transition, if its time has come; a run that counts iterations begins with its only epoch."""
        count, model = getattr(runner, self.unit), unwrapped(runner.model)
        copies = [averaged.module for averaged in averaged_models(runner)]
        changes = self.phases.on_epoch_begin(model, (), count, copies)
        if not changes and not runner.iter == count == self.phases.epoch:  # attention from the start
            return
        for change in changes:
            runner.logger.info(f'Transition at {self.unit} {count}:\n{change}')
            add_scalars(runner, {'transition/parameters': change.parameters_after}, count)  # curves are marked here
        wrap_again(runner, compile=True)
        self._build_optimization(runner)
        runner.optim_wrapper.initialize_count_status(runner.model, runner.iter, runner.max_iters)

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        """Makes the transition of a run that counts iterations."""
        if self.unit == 'iter' and runner.iter == self.phases.epoch > 0:
            self.before_train_epoch(runner)

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Brings a run that resumes a checkpoint of the second phase to that phase: model, optimizer, schedulers."""
        follow_checkpoint(runner, checkpoint)
        is_attention = not parts_in_phases(unwrapped(runner.model), 'conv')
        if is_attention and runner._resume and isinstance(runner.optim_wrapper, OptimWrapper):
            runner.logger.info('The checkpoint is of the second phase: attention, and its optimizer and schedulers')
            wrap_again(runner)
            self._build_optimization(runner)

    def _build_optimization(self, runner) -> None:
        """Builds optimizer wrapper and schedulers of the second phase; schedulers without an end end with it."""
        config = Config(dict(optim_wrapper=runner.cfg.get('optim_wrapper') or {}))
        config.merge_from_dict(dict(optim_wrapper=copy.deepcopy(self.optim_wrapper)))
        schedulers = copy.deepcopy(self.param_scheduler)
        if schedulers is None:
            schedulers = copy.deepcopy(runner.cfg.get('param_scheduler')) if self.phases.epoch == 0 else []
        left, by_epochs = getattr(runner, f'max_{self.unit}s') - self.phases.epoch, self.unit == 'epoch'
        for scheduler in [schedulers] if isinstance(schedulers, dict) else schedulers or []:
            if not scheduler.get('by_epoch', True):
                scheduler.setdefault('end', left * len(runner.train_dataloader) if by_epochs else left)
            elif by_epochs:
                scheduler.setdefault('end', left)
            else:
                raise ValueError(
                    f'the scheduler {scheduler} counts epochs, but the loop counts iterations: give it by_epoch=False, '
                    'and begin and end in iterations'
                )
        runner.param_schedulers = None  # scale_lr wants it before them
        runner.optim_wrapper = runner.build_optim_wrapper(config.optim_wrapper)
        make_groups_plain(runner)
        runner.scale_lr(runner.optim_wrapper, runner.auto_scale_lr)
        runner.param_schedulers = runner.build_param_scheduler(schedulers or [])
