"""Checkpoints that are complete, and that a run checks before it loads them."""

import re
from pathlib import Path
from typing import Dict, Optional, Tuple

from mmengine.dist import is_main_process
from mmengine.hooks import CheckpointHook
from mmengine.runner import find_latest_checkpoint
from mmpretrain.registry import HOOKS

from ...utils.runner import checkpoint_to_load, is_resumed, load_from
from . import atomic_backend  # noqa: F401
from .whole_checkpoint import find_whole_checkpoint, load_or_empty


@HOOKS.register_module()
class AtomicCheckpointHook(CheckpointHook):
    """mmengine's ``CheckpointHook``, with files that are either complete or not there.

    A killed process or a full disk damages no checkpoint, and ``max_keep_ckpts`` removes an old one when the new one is
    there. Where the last one is damaged all the same, ``--resume`` names it in the log and takes the one before. A run
    whose folder was moved or copied goes on from the checkpoints in it. A
    checkpoint of another model, or one of weights alone to resume from, is an error.

    Args:
        backend_args (dict, optional): Where the files go. Defaults to None, means ``dict(backend='atomic')``, the
            local disk.
        **kwargs: As in :class:`mmengine.hooks.CheckpointHook`.
    """

    def __init__(self, *args, backend_args: Optional[dict] = None, **kwargs):
        super().__init__(*args, backend_args=backend_args or dict(backend='atomic'), **kwargs)

    def before_run(self, runner) -> None:
        """Finds the checkpoint to resume from, where none is named, and checks that it is one of this model.

        Raises:
            KeyError: There is nothing to resume but weights.
            ValueError: Hardly any weight has the name and the shape of one of the model; mmengine would only warn.
        """
        name = checkpoint_to_load(runner)
        if is_resumed(runner) and name is None:
            last = find_latest_checkpoint(runner.work_dir)
            name = find_whole_checkpoint(runner.work_dir, self.out_dir)
            if name != last:
                copied = last and Path(last).name == Path(name).name
                why = 'of another folder' if copied else 'damaged or missing'
                runner.logger.warning(f'{last or "last_checkpoint"} is {why}: resuming from {name} instead')
                load_from(runner, name)
        checkpoint = load_or_empty(name) if name else {}
        if not checkpoint:
            return  # there is none, or it is elsewhere, or mmengine's attempt to load it will raise an error
        if is_resumed(runner) and not {'meta', 'message_hub'} <= checkpoint.keys():
            raise KeyError(
                f'{name} holds weights alone and cannot be resumed from: start from them with '
                f'--cfg-options load_from={name}, without --resume'
            )
        theirs, ours = _shapes(checkpoint.get('state_dict', checkpoint)), _shapes(runner.model.state_dict())
        fitting = ours.items() & theirs.items()
        if len(fitting) < len(ours) / 10:  # heads and statistics of the pixels fit many models
            raise ValueError(
                f'{name} is of another model: {len(fitting)} of the {len(ours)} weights of this one are in it under '
                'the same name and with the same shape; give the config that it was trained with'
            )

    def before_train(self, runner) -> None:
        """Removes the incomplete files that a killed process has left."""
        super().before_train(runner)
        if is_main_process():
            for part in Path(self.out_dir).glob('*.pth.part'):
                part.unlink()

    def _save_checkpoint_with_step(self, runner, step: int, meta: dict) -> None:
        """Removes the oldest checkpoint after the new one is written; mmengine does so before."""
        kept, oldest = self.keep_ckpt_ids if self.max_keep_ckpts > 0 else (), None
        if len(kept) == self.max_keep_ckpts and step not in kept:
            oldest = kept.popleft()
        super()._save_checkpoint_with_step(runner, step, meta)
        if oldest is not None and is_main_process():
            path = self.file_backend.join_path(self.out_dir, self.filename_tmpl.format(oldest))
            if self.file_backend.isfile(path):
                self.file_backend.remove(path)
            elif self.file_backend.isdir(path):  # of DeepSpeed
                self.file_backend.rmtree(path)


def _shapes(state_dict: dict) -> Dict[str, Tuple[int, ...]]:
    """Shapes of tensors by their names, without the prefix of wrappers."""
    return {
        re.sub(r'^(module\.)+', '', name): tuple(value.shape)
        for name, value in state_dict.items()
        if hasattr(value, 'shape')
    }
