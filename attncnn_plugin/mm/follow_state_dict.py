"""Models of other libraries take the structure of the checkpoint that a run loads."""

from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmpretrain.registry import HOOKS

from .runner import follow_checkpoint, wrap_again


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
                'CMHSA or of the backbone ConvToAttention, or resume the run with the PhaseTransitionHook that it had'
            )
        wrap_again(runner)
