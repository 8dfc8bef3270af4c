"""Glue to mmengine's runner: what the hooks have in common."""

import copy
import gc
import itertools
from typing import Any, Dict, List, Mapping, Tuple, Union

import numpy as np
from mmengine.dist import get_rank, master_only
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseAveragedModel, BaseModel, BaseTTAModel, is_model_wrapper
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner, set_random_seed
from mmengine.visualization import LocalVisBackend
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..change import Change
from ..structure import follow_state_dict
from ..training.loops import random_numbers_kept

HEAD_NUMBERS = 'attention_heads'  # in ``runtime_info``: by layer, what its heads were called when the training began


def record_new_parameters(model: nn.Module, incompatible_keys=None) -> None:
    """Adds parameters that a model got by loading to mmengine's record of ``init_weights``: a post-hook of loading."""
    record = getattr(model, '_params_init_info', None)
    if record is None:
        return
    for module in model.modules():
        module._params_init_info = record
    for parameter in set(model.parameters()) - set(record):
        mean = parameter.data.mean().cpu()
        record[parameter] = dict(init_info='The structure of the checkpoint', tmp_mean_value=mean)


def head_numbers(runner: Runner, counts: Mapping[str, int]) -> Dict[str, List[int]]:
    """Returns the numbers that the heads of layers, of which so many are left, had when the training began."""
    known = runner.message_hub.runtime_info.get(HEAD_NUMBERS, {})
    return {name: list(known.get(name, range(count))) for name, count in counts.items()}


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model without its wrappers, for distributed training and for test-time augmentation."""
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    return model


def check_loop(runner: Runner, hook: Hook, unit: str = 'epoch') -> None:
    """Raises ``TypeError`` for a loop that counts something else than a hook."""
    by_epoch = unit == 'epoch'
    if not isinstance(runner.train_loop, EpochBasedTrainLoop if by_epoch else IterBasedTrainLoop):
        raise TypeError(
            f'{type(hook).__name__} counts {"epochs" if by_epoch else "iterations"}, but the loop is a '
            f'{type(runner.train_loop).__name__}: use train_cfg=dict(by_epoch={by_epoch}, …)'
        )


def wrap_again(runner: Runner, compile: bool = False) -> None:
    """Has averages list the parameters that a model has now, and builds a new wrapper for distributed training.

    The wrapper only if there was one; ``compile`` is for the middle of a training.
    """
    refresh_averages(runner)
    if is_model_wrapper(runner.model):
        model = unwrapped(runner.model)
        # DDP's reducer holds the parameters that it was built with, in the shapes that they had then, and listens to
        # those that stay: it has to be gone, cycles of references included, before there is a new one.
        runner.model._remove_autograd_hooks()
        runner.model = model
        gc.collect()
        runner.model = runner.wrap_model(copy.deepcopy(runner.cfg.get('model_wrapper_cfg')), model)
        runner.model.train()
        if compile:
            runner._maybe_compile('train_step')


def make_groups_plain(runner: Runner) -> None:
    """Turns optimizers' groups into plain dicts: PyTorch 2.13 and 2.14 cannot compile steps with ``ConfigDict``."""
    groups = runner.optim_wrapper.optimizer.param_groups
    groups[:] = [dict(group) for group in groups]


def averaged_models(runner: Runner) -> List[BaseAveragedModel]:
    """Returns the copies of the model that ``EMAHook`` keeps."""
    return [hook.ema_model for hook in runner.hooks if isinstance(hook, EMAHook)]


def refresh_averages(runner: Runner) -> None:
    """Brings averaged models' own lists of their parameters up to date, after some were replaced.

    Those that the model itself has are among them, such as the momentum encoder of MoCo.
    """
    own = (module for module in unwrapped(runner.model).modules() if isinstance(module, BaseAveragedModel))
    for averaged in (*averaged_models(runner), *own):
        module = averaged.module.requires_grad_(False)
        averaged.avg_parameters = module.state_dict() if averaged.update_buffers else dict(module.named_parameters())


def follow_checkpoint(runner: Runner, checkpoint: Mapping[str, Any]) -> Change:
    """Brings the model of a run, and its averages, to the structure of a checkpoint; returns what changed."""
    models = [unwrapped(own) for own in (runner.model, *(averaged.module for averaged in averaged_models(runner)))]
    changes = [follow_state_dict(model, checkpoint, strict=False) for model in models]
    refresh_averages(runner)
    return changes[0]


@master_only
def add_scalars(runner: Runner, scalars: Dict[str, float], step: int) -> None:
    """Shows scalars by all of the run's backends; those on the disk go into ``attention.json``.

    A line of ``scalars.json`` is of a training iteration or of a validation for mmpretrain's ``analyze_logs.py``.
    """
    for backend in runner.visualizer._vis_backends.values():
        if isinstance(backend, LocalVisBackend):
            backend = LocalVisBackend(f'{runner.log_dir}/vis_data', scalar_save_file='attention.json')
        backend.add_scalars(scalars, step)


def training_loss(model: BaseModel, batch: Any) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Computes the training loss on a batch of a data loader, preprocessed as for tests: no images are mixed.

    A classifier whose head has ``cal_acc`` also gives the number of right predictions.
    """
    data = model.data_preprocessor(batch, False)
    losses = model(**data, mode='loss') if isinstance(data, dict) else model(*data, mode='loss')
    loss, accuracy = model.parse_losses(losses)[0], losses.get('accuracy_top-1')
    return loss if accuracy is None else (loss, (accuracy[0] * len(data['inputs']) / 100).round())


def seed_epoch(runner: Runner) -> None:
    """Seeds Python, numpy and PyTorch by only the seed of the run, the epoch and the rank."""
    sequence = np.random.SeedSequence([runner.seed, runner.epoch, get_rank()])
    set_random_seed(int(sequence.generate_state(1)[0]))


def samplers_of(loader: DataLoader) -> Tuple[Any, Any]:
    """Returns the sampler of a data loader, and that in its sampler of batches, or None."""
    return loader.sampler, getattr(loader.batch_sampler, 'sampler', None)


def training_batches(runner: Runner, number: int) -> List[Any]:
    """Returns training batches, the same ones whether or not the run was resumed; random numbers stay as they are."""
    loader = runner.train_dataloader
    for sampler in samplers_of(loader):
        if hasattr(sampler, 'set_epoch'):
            sampler.set_epoch(runner.epoch)
    with random_numbers_kept():
        seed_epoch(runner)  # of augmentations
        return list(itertools.islice(loader, number))
