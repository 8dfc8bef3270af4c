"""Checkpoints that are whole, and fit."""
import re

from mmengine.hooks import CheckpointHook
from mmengine.runner import find_latest_checkpoint
from mmpretrain.registry import HOOKS

from ...utils import atomic_backend  # noqa: F401
from ...utils.checkpoints import find_whole_checkpoint


@HOOKS.register_module()
class AtomicCheckpointHook(CheckpointHook):
    """mmengine's ``CheckpointHook``, with files that are whole or not there.

    A killed process or a full disk damages no checkpoint. Where the last one is damaged all the same, ``--resume`` says
    so and takes the one before. A checkpoint of another model, or one of weights alone to resume from, is an error.

    Args:
        backend_args (dict, optional): Where the files go. Defaults to ``dict(backend='atomic')``, the local disk.
        **kwargs: As in :class:`mmengine.hooks.CheckpointHook`.
    """

    def __init__(self, *args, backend_args: dict = dict(backend='atomic'), **kwargs):
        super().__init__(*args, backend_args=backend_args, **kwargs)

    def before_run(self, runner) -> None:
        """Which checkpoint the run resumes from, where none is named."""
        if runner._resume and runner._load_from is None:
            whole, last = find_whole_checkpoint(runner.work_dir), find_latest_checkpoint(runner.work_dir)
            if whole != last:
                runner.logger.warning(f'{last or "last_checkpoint"} is damaged or missing: resuming from {whole} instead')
                runner._load_from = whole

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Whether the checkpoint is of this model; mmengine warns of what does not fit, and goes on with nothing.

        Raises:
            KeyError: There is nothing to resume but weights.
            ValueError: Hardly any weight has the name and the shape of one of the model.
        """
        name = runner._load_from or 'the checkpoint'
        if runner._resume and not {'meta', 'message_hub'} <= checkpoint.keys():
            raise KeyError(f'{name} holds weights alone and cannot be resumed from: start from them with '
                           f'--cfg-options load_from={name}, without --resume')
        theirs = _shapes(checkpoint.get('state_dict', checkpoint))
        ours = _shapes(runner.model.state_dict())
        fitting = ours.items() & theirs.items()
        if len(fitting) < len(ours) / 10:  # heads and statistics of the pixels fit many models
            raise ValueError(f'{name} is of another model: {len(fitting)} of the {len(ours)} weights of this one are in '
                             'it under the same name and with the same shape; give the config that it was trained with')


def _shapes(state_dict: dict) -> dict:
    """Shapes of tensors by their names, without the prefix of wrappers."""
    return {re.sub(r'^(module\.)+', '', name): tuple(value.shape) for name, value in state_dict.items()
            if hasattr(value, 'shape')}
