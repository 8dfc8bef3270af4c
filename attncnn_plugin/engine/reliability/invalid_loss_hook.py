"""Ends a training whose loss or weights are no longer finite."""

import math
from typing import List, Optional

import torch
from mmengine.dist import all_gather_object, all_reduce
from mmengine.hooks import Hook
from mmengine.runner import find_latest_checkpoint
from mmpretrain.registry import HOOKS


@HOOKS.register_module()
class InvalidLossHook(Hook):
    """Ends the training, on every rank, when a loss is NaN or infinite, and keeps such weights out of checkpoints.

    The error names the iteration and the last checkpoint; the images of the batch are in the log. Infinite gradients,
    which are normal with automatic mixed precision, are not looked at.
    """

    priority = 'HIGH'  # before EMAHook, and before anything is saved

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs: Optional[dict] = None) -> None:
        """Checks the losses of the iteration, on every rank.

        Raises:
            FloatingPointError: One of them, on any rank, is NaN or infinite.
        """
        logged = {name: float(torch.as_tensor(value).detach()) for name, value in (outputs or {}).items()}
        invalid = {name: value for name, value in logged.items() if 'loss' in name and not math.isfinite(value)}
        invalid_anywhere = torch.tensor(float(bool(invalid)))
        all_reduce(invalid_anywhere, op='max')
        if not invalid_anywhere:
            return
        ranks = all_gather_object((invalid, _images(data_batch) if invalid else []))
        losses = next(losses for losses, _ in ranks if losses)
        images = [name for _, names in ranks for name in names]
        runner.logger.error(f'The images of the batch: {", ".join(images)}')
        values = ', '.join(f'{name}={value}' for name, value in losses.items())
        raise FloatingPointError(
            f'{values} at iteration {runner.iter + 1} (epoch {runner.epoch + 1}), for the batch of {_first(images)}; '
            f'nothing was saved since {_last_checkpoint(runner)}: look at these images, or resume with a lower rate'
        )

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:
        """Checks the weights: a step of the optimizer after a finite loss can make them infinite.

        Raises:
            FloatingPointError: A learned weight is NaN or infinite.
        """
        for name, parameter in runner.model.named_parameters():
            if parameter.requires_grad and not parameter.isfinite().all():
                raise FloatingPointError(
                    f'{name} is not finite any more after iteration {runner.message_hub.get_info("iter") + 1}; nothing '
                    f'was saved since {_last_checkpoint(runner)}: resume with a lower rate, or with clip_grad'
                )


def _images(data_batch) -> List[str]:
    """File names of the images of a batch, or their numbers in the data set where they have none."""
    samples = data_batch.get('data_samples') if isinstance(data_batch, dict) else None
    return [str(sample.get('img_path') or f'number {sample.get("sample_idx")}') for sample in samples or []]


def _first(images: List[str]) -> str:
    """The names of three images, and how many others there are."""
    return ', '.join(images[:3]) + (f' and {len(images) - 3} more, which are in the log' if len(images) > 3 else '')


def _last_checkpoint(runner) -> str:
    """The file that the run can go on from, in words where there is none."""
    return find_latest_checkpoint(runner.work_dir) or 'the start'
