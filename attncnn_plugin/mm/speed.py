"""Mixed precision with bfloat16 for trainings on a CPU."""

from contextlib import contextmanager
from typing import Iterator

import torch
from mmengine.optim import OptimWrapper
from mmpretrain.registry import OPTIM_WRAPPERS
from torch import nn


@OPTIM_WRAPPERS.register_module()
class BFloat16OptimWrapper(OptimWrapper):
    """mmengine's ``OptimWrapper`` with bfloat16 autocast in the forward pass, on CPUs too.

    mmengine's ``AmpOptimWrapper`` refuses CPUs. Parameters, gradients and validation stay in float32; no gradient is
    scaled. A CPU is faster with it where it computes with bfloat16 (``avx512_bf16`` or ``amx_bf16`` among the flags of
    ``lscpu``), and slower elsewhere: ``tools/train.py CONFIG --cfg-options optim_wrapper.type=BFloat16OptimWrapper``.
    """

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Adds autocast to what mmengine's wrapper does when gradients are accumulated."""
        device = next(model.parameters()).device.type
        with super().optim_context(model), torch.autocast(device, torch.bfloat16):
            yield
