"""What a pass through a layer costs: multiply-adds, and the memory that it keeps for the gradients."""

from typing import Dict, Tuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode


def layer_costs(layer: nn.Module, shape: torch.Size, dtype: torch.dtype) -> Tuple[int, int]:
    """Multiply-adds of a layer, and the bytes that it keeps for gradients, on its device; nothing is computed."""
    saved: Dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[_storage(tensor)] = tensor  # held, so that no other storage gets its address
        return tensor

    kept = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    fake = FakeTensorMode()
    named = (*layer.named_parameters(), *layer.named_buffers())
    tensors: Dict[str, Tensor] = {name: fake.from_tensor(tensor.detach()) for name, tensor in named}
    parameters = {_storage(tensor) for tensor in tensors.values()}
    with fake, torch.enable_grad(), FlopCounterMode(display=False) as counter, kept:
        for tensor in tensors.values():
            tensor.requires_grad_(tensor.is_floating_point())
        x = torch.empty(shape, dtype=dtype, device=named[0][1].device, requires_grad=True)
        torch.func.functional_call(layer, tensors, (x,))
    memory = sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in parameters)
    return counter.get_total_flops() // 2, memory


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
