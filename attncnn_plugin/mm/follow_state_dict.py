"""Models of other libraries take the structure of the checkpoint that a run loads."""

from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmpretrain.registry import HOOKS

from .runner import follow_checkpoint, unwrapped, wrap_again


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
        model = unwrapped(runner.model)
        trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
        changed = follow_checkpoint(runner, checkpoint)
        if not changed or not isinstance(runner.optim_wrapper, OptimWrapper):
            return
        now = {parameter for parameter in model.parameters() if parameter.requires_grad}
        if now != trained:
            new = [name for name, parameter in model.named_parameters() if parameter in now - trained]
            which = f'parameters that it does not have, such as {new[0]}' if new else 'parameters that do not train'
            raise ValueError(
                f'the optimizer was built before the model took the structure of the checkpoint, with {which}: build '
                "the model with that structure, such as phase='attn' of CMHSA or of the backbone ConvToAttention, or "
                'resume the run with the PhaseTransitionHook that it had'
            )
        wrap_again(runner)
