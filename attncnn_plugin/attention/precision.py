"""The precision that scores are computed in, whatever that of the model is."""

import contextlib
from typing import ContextManager, Union

import torch
from torch import Tensor

Device = Union[str, torch.device, None]


def at_least_float32(tensor: Tensor) -> Tensor:
    """Casts float16 and bfloat16 to float32, but not float32 and float64: the precision of all scores."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def widest_float(tensor: Tensor) -> torch.dtype:
    """Returns float64 where the tensor's device has it."""
    return torch.float32 if tensor.device.type == 'mps' else torch.float64


@torch.compiler.assume_constant_result  # torch 2.6 cannot trace it
def has_autocast(device_type: str) -> bool:
    """Returns whether there is autocast for a kind of device: the meta device, for one, has none."""
    return torch.amp.is_autocast_available(device_type)


def full_precision(device_type: str) -> ContextManager:
    """Returns a context without autocast."""
    if not has_autocast(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)
