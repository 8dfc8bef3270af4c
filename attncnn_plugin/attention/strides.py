"""The strides of images that go into and out of a layer.

An axis of one entry can have any stride, and views of the tokens of a single image have the strides (C, 1, W·C, C).
PyTorch's batch norms compute wrong gradients on CPUs where their input has these and the gradient that comes in does
not, or the other way round.
"""

import torch
from torch import Tensor

# New in torch 2.7; before it, nothing tells an export from a compilation.
is_exporting = getattr(torch.compiler, 'is_exporting', torch.compiler.is_compiling)


def with_regular_strides(x: Tensor) -> Tensor:
    """Returns images ``(B, C, *size)`` with the strides of a new tensor, channels last if they are, else contiguous.

    Nothing is copied unless the entries lie in another order or with gaps.
    """
    if x.ndim == 3 or x.stride(1) != 1:  # PyTorch has no channels-last format of one axis
        return x.flatten().view(x.shape)
    x = x.movedim(1, -1)
    return x.flatten().view(x.shape).movedim(-1, 1)


def with_regular_gradient(x: Tensor) -> Tensor:
    """Returns images ``(B, C, *size)`` as they are; for a batch of one their gradient will have regular strides."""
    if is_exporting() or torch.jit.is_tracing():  # without gradients, for batches of any size
        return x
    # The gradients of flatten and view have the strides of new tensors.
    return with_regular_strides(x) if len(x) == 1 and x.requires_grad and torch.is_grad_enabled() else x
