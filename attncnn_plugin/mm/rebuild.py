"""Steps of the hooks that replace parameters of a model in training: its wrapper, its schedulers, its average."""

import copy
import gc
from typing import Any, Iterator, List, Mapping, Union

from mmengine.hooks import EMAHook
from mmengine.model import BaseAveragedModel, BaseTTAModel, is_model_wrapper
from mmengine.optim import OptimWrapper
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..attention.state_dicts import without_prefix
from ..structure import follow_state_dict
from .runner import release_parameters


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without its wrappers, for distributed training and for test-time augmentation."""
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    return model


def follow_checkpoint(runner, checkpoint: Mapping[str, Any]) -> bool:
    """Brings the model of a run, and its averages, to the structure of a checkpoint that is about to be loaded.

    Entries of other names and shapes are left to the loading.

    Returns:
        bool: Whether any has changed.

    Raises:
        StructureError: See :func:`attncnn_plugin.follow_state_dict`.
    """
    state_dict = checkpoint.get('state_dict', checkpoint)
    if not isinstance(state_dict, Mapping):
        return False  # the loading says so
    state_dict = without_prefix(state_dict, 'module.')  # as mmengine does
    changed = follow_state_dict(unwrapped(runner.model), state_dict, strict=False)
    for averaged in averaged_models(runner):
        if follow_state_dict(unwrapped(averaged.module), state_dict, strict=False):
            refresh_average(averaged)
            changed = True
    return changed


def check_wrapper(runner) -> None:
    """Checks that :func:`wrap_again` can wrap the model.

    Raises:
        TypeError: The model is wrapped by something else than DDP.
    """
    if is_model_wrapper(runner.model) and not isinstance(runner.model, DistributedDataParallel):
        raise TypeError(
            f'the parameters of a model in {type(runner.model).__name__} cannot be replaced in training: '
            'use MMDistributedDataParallel'
        )


def wrap_again(runner) -> None:
    """A new wrapper for distributed training, if there was one, after parameters were replaced."""
    if is_model_wrapper(runner.model):
        model = unwrapped(runner.model)
        # DDP's reducer holds the parameters that it was built with, in the shapes that they had then, and listens to
        # those that stay: it has to be gone, cycles of references included, before there is a new one.
        release_parameters(runner.model)
        runner.model = model
        gc.collect()
        runner.model = runner.wrap_model(copy.deepcopy(runner.cfg.get('model_wrapper_cfg')), model)
        runner.model.train()


def make_groups_plain(optim_wrapper: OptimWrapper) -> None:
    """Turns the optimizer's parameter groups into plain dicts, so that ``compile=True`` works.

    With a ``paramwise_cfg`` mmengine makes them of its ``ConfigDict``. PyTorch 2.13 and 2.14 cannot compile the step
    of such an optimizer (``'UserDefinedDictVariable' object has no attribute 'items'``); 2.15 can.
    """
    groups = optim_wrapper.optimizer.param_groups
    groups[:] = [dict(group) for group in groups]


def build_schedulers(runner, schedulers: Union[dict, List[dict]], left: int, by_epoch: bool = True) -> None:
    """Gives the run new schedulers, counted from now.

    Args:
        runner (Runner): The run.
        schedulers (dict | list[dict]): Their configs.
        left (int): How long they go on without an ``end``, in what the loop counts.
        by_epoch (bool): Whether that is epochs, not iterations. Defaults to True.

    Raises:
        ValueError: A scheduler that counts epochs, which would never make a step, in a loop that does not.
    """
    schedulers = copy.deepcopy(schedulers)
    for scheduler in [schedulers] if isinstance(schedulers, dict) else schedulers:
        if not scheduler.get('by_epoch', True):
            scheduler.setdefault('end', left * len(runner.train_dataloader) if by_epoch else left)
        elif by_epoch:
            scheduler.setdefault('end', left)
        else:
            raise ValueError(
                f'the scheduler {scheduler} counts epochs, but the loop counts iterations: give it by_epoch=False, and '
                'begin and end in iterations'
            )
    runner.param_schedulers = runner.build_param_scheduler(schedulers)


def averaged_models(runner) -> Iterator[BaseAveragedModel]:
    """The copies of the model that ``EMAHook`` keeps."""
    return (hook.ema_model for hook in runner.hooks if isinstance(hook, EMAHook))


def refresh_average(averaged: BaseAveragedModel) -> None:
    """The averaged model's own list of its parameters, after some were replaced."""
    module = averaged.module.requires_grad_(False)
    averaged.avg_parameters = module.state_dict() if averaged.update_buffers else dict(module.named_parameters())
