"""The validation that a run was stopped before."""

from mmengine.hooks import Hook
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
        interval = getattr(runner.train_loop, 'val_interval', None)
        is_due = is_resumed(runner) and runner.epoch > 0 and interval and runner.epoch % interval == 0
        if is_due and runner.val_loop is not None and runner.epoch < runner.max_epochs:
            runner.val_loop.run()
