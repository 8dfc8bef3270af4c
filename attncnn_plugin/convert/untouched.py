"""A model that runs, or is about to be changed, and stays as it was."""

import contextlib
from typing import Iterator, List, Optional

import torch
from torch import nn


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, at the end of which modes, buffers and random numbers are as before.

    ``model.eval()`` can do more than it says, merge layers for instance: the modes are set one by one.
    """
    modules = list(model.modules())
    modes = [module.training for module in modules]
    buffers = [(dict(module._buffers), set(module._non_persistent_buffers_set)) for module in modules]
    values = [(buffer, buffer.clone(), buffer._version) for buffer in model.buffers()]
    with torch.random.fork_rng(_cuda_devices(model)), torch.no_grad():
        try:
            for module in modules:
                module.training = False
            yield
        finally:
            for module, mode, (own, not_saved) in zip(modules, modes, buffers):
                module.training = mode
                module._buffers.clear()  # of those that a forward pass has registered
                module._buffers.update(own)
                module._non_persistent_buffers_set = not_saved
            for buffer, value, version in values:
                if buffer._version != version:
                    buffer.copy_(value)


@contextlib.contextmanager
def random_numbers_on_failure(model: nn.Module, generator: Optional[torch.Generator], always: bool) -> Iterator[None]:
    """Restores PyTorch's random numbers and those of a generator after an error, or always."""
    devices = _cuda_devices(model)
    states = torch.random.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
    own = None if generator is None else generator.get_state()
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        if always or not succeeded:
            torch.random.set_rng_state(states[0])
            for device, state in zip(devices, states[1]):
                torch.cuda.set_rng_state(state, device)
            if generator is not None and own is not None:
                generator.set_state(own)


def _cuda_devices(model: nn.Module) -> List[int]:
    tensors = (*model.parameters(), *model.buffers())
    return sorted({tensor.device.index for tensor in tensors if tensor.device.type == 'cuda'})
