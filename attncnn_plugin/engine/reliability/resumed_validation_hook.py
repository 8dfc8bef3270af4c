"""The validation that a run was stopped before."""

from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop
from mmpretrain.registry import HOOKS

from ...utils.runner import is_resumed


@HOOKS.register_module()
class ResumedValidationHook(Hook):
    """Validates once more where a run goes on from the end of an epoch.

    The checkpoint of an epoch is written before the validation, so a run that is stopped in between has none of that
    epoch. With this hook the curves of a run that was stopped have all their points. It leaves loops of iterations
    alone.

    Examples:
        >>> default_hooks = dict(resumed_validation=dict(type='ResumedValidationHook'))
    """

    def before_train(self, runner) -> None:
        """Runs the validation if the last epoch had one."""
        loop, epoch = runner.train_loop, runner.epoch
        if not isinstance(loop, EpochBasedTrainLoop) or runner.val_loop is None or not is_resumed(runner):
            return
        is_last = epoch == loop.max_epochs  # the loop has nothing left to do, and does not validate
        if epoch >= max(loop.val_begin, 1) and (epoch % loop.val_interval == 0 or is_last):
            runner.val_loop.run()
