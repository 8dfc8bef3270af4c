"""All that importing the plugin changes in mmengine, mmpretrain and PyTorch, beside entries in their registries.

Each change may be made twice, by another plugin too, without harm.
"""

import functools
from typing import Any, Callable, Optional

import torch
from mmengine import runner
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.runner import CheckpointLoader, checkpoint
from mmpretrain import ModelHub
from torch import nn

from .checkpoint_files import PACKAGE_SCHEME, load_from_local, load_from_package
from .config_paths import MIM
from .init_info import record_new_parameters
from .safe_globals import register_safe_globals


def patch_mmengine() -> Optional[str]:
    """Makes the changes that the docstring of :mod:`attncnn_plugin` lists.

    Returns:
        str | None: Why a malicious checkpoint could still be run, in one sentence; None if nothing in it is.
    """
    register_safe_globals()
    CheckpointLoader.register_scheme(prefixes='', loader=load_from_local, force=True)
    CheckpointLoader.register_scheme(prefixes=PACKAGE_SCHEME, loader=load_from_package, force=True)
    if hasattr(checkpoint, '_safe_torch_load'):  # onedl-mmengine: it would load what PyTorch refuses all the same
        checkpoint._safe_torch_load = _load_plain_data
    if not ModelHub.has('sa_quadratic_cifar10'):  # it takes no name twice
        ModelHub.register_model_index(MIM / 'model-index.yml', config_prefix=MIM)
    loader = CheckpointLoader._get_checkpoint_loader('epoch_1.pth')
    if loader is load_from_local:
        return None
    return (
        f'local checkpoints are loaded by {loader.__module__}.{loader.__qualname__} and not by attncnn_plugin, '
        'which cannot promise that nothing in them is run: load none that you do not trust'
    )


def _load_plain_data(file, map_location=None, weights_only: Optional[bool] = None) -> Any:
    """``torch.load`` of tensors and plain data alone, whatever ``weights_only`` says."""
    register_safe_globals()
    return torch.load(file, map_location=map_location, weights_only=True)


def patch_load_state_dict(prepare: Callable[[nn.Module, Any], None]) -> None:
    """Has mmengine's own ``load_state_dict``, which does not call PyTorch's, prepare the model first.

    Args:
        prepare (callable): Prepares a module for a state dict,
            :func:`~attncnn_plugin.layers.structure_loading.replace_before_loading`.
    """
    load = checkpoint.load_state_dict
    if hasattr(load, 'replaces_modules'):
        return

    @functools.wraps(load)
    def load_state_dict(module: nn.Module, state_dict: dict, *args, **kwargs) -> None:
        inner = module
        while is_model_wrapper(inner) or isinstance(inner, BaseTTAModel):  # which mmengine's names leave out
            inner = inner.module
        prepare(inner, state_dict)
        load(module, state_dict, *args, **kwargs)
        record_new_parameters(inner)  # while it initializes weights by a checkpoint

    load_state_dict.replaces_modules = True
    runner.load_state_dict = checkpoint.load_state_dict = load_state_dict
