"""The hook that gives a model the structure of the checkpoint of its run, and the base of hooks that change models."""

from typing import Tuple

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper
from mmpretrain.registry import HOOKS
from torch.nn.parallel import DistributedDataParallel

from .runner import check_loop, follow_checkpoint, wrap_again


@HOOKS.register_module()
class FollowStateDictHook(Hook):
    """Brings the model of a run to the structure of its checkpoint, see :func:`attncnn_plugin.follow_state_dict`.

    It is for models of other libraries: a ResNet whose checkpoint has attention, a vision transformer whose checkpoint
    has fewer heads. It acts for ``load_from`` and ``--resume``, and the copy of an ``EMAHook`` follows, too.
    ``tools/train.py`` and ``tools/test.py`` of this package add it to every config.
    """

    priority = 1  # after PhaseTransitionHook, before all that looks at parameters, and before EMAHook loads its copy

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Takes the structure of a checkpoint.

        Raises:
            StructureError: Attention of the checkpoint cannot be in the place that it has there.
            ValueError: In training, the checkpoint has parameters that the optimizer does not have.
        """
        change = follow_checkpoint(runner, checkpoint)
        if not change or not isinstance(runner.optim_wrapper, OptimWrapper):
            return
        new = [own.parameters for own in change.replaced.values()]
        trained = [name for own in new for name, parameter in own.items() if parameter.requires_grad]
        if trained:
            raise ValueError(
                'the optimizer was built before the model took the structure of the checkpoint, with parameters that '
                f"it does not have, such as {trained[0]}: build the model with that structure, such as phase='attn' of "
                'CMHSA or of the backbone ConvToAttention, or give the run its PhaseTransitionHook, or one of epoch=0'
            )
        wrap_again(runner)


class ChangingHook(FollowStateDictHook):
    """A hook that changes the model of a training at some ``times``, epochs or iterations."""

    unit = 'epoch'  # or 'iter'
    times: Tuple[int, ...]

    def before_train(self, runner) -> None:
        """Checks the run, and warns of one that ends early.

        Raises:
            TypeError: The loop counts something else, or the model is in a wrapper that cannot be built anew.
        """
        check_loop(runner, self, self.unit)
        if is_model_wrapper(runner.model) and not isinstance(runner.model, DistributedDataParallel):
            raise TypeError(
                f'parameters in {type(runner.model).__name__} cannot be replaced: use MMDistributedDataParallel'
            )
        self._warn_of_end(runner, getattr(runner, f'max_{self.unit}s'))

    def after_train(self, runner) -> None:
        """Warns of a run that another hook has stopped."""
        self._warn_of_end(runner, getattr(runner, self.unit))

    def _warn_of_end(self, runner, end: int) -> None:
        late = ', '.join(str(time) for time in self.times if time >= end)
        if late:
            name = type(self).__name__
            runner.logger.warning(f'The run ends after {end} {self.unit}s: {name} does nothing at {self.unit} {late}')
