"""The strides of images that go into and out of a layer.

An axis of one entry can have any stride, and views of the tokens of a single image have the strides (C, 1, W·C, C).
PyTorch's batch norms compute wrong gradients on CPUs where their input has these and the gradient that comes in does
not, or the other way round.
"""

import torch
from torch import Tensor

# New in torch 2.7; before it, nothing tells an export from a compilation.
_is_exporting = getattr(torch.compiler, 'is_exporting', torch.compiler.is_compiling)


def is_exporting() -> bool:
    """Returns whether a graph for images of any size is being made, which a branch on the size would limit."""
    return _is_exporting() or torch.jit.is_tracing()


def is_channels_last(x: Tensor) -> bool:
    """Returns whether PyTorch's convolutions treat images, ``(B, C, *size)``, or a kernel as channels last."""
    # Contiguous, whatever the size is, or copied to be it, as PyTorch does with images of one axis.
    if x.stride(-1) == 1 < x.shape[1] or (x.ndim == 3 and not x.is_contiguous()):
        return False
    order = (1, *range(x.ndim - 1, 1, -1), 0)  # a step along each axis is over all of the axes before it
    ends = [x.stride(axis) * x.shape[axis] for axis in order]
    return all(x.stride(axis) >= end for axis, end in zip(order[1:], ends)) and 0 < x.stride(1) < ends[-2]


def with_new_strides(x: Tensor, channels_last: bool) -> Tensor:
    """Returns images ``(B, C, *size)`` with the strides of a new tensor, contiguous or with the channels last.

    Nothing is copied unless the entries lie in another order or with gaps.
    """
    if channels_last:
        return with_new_strides(x.movedim(1, -1), False).movedim(-1, 1)
    return x.flatten().view(x.shape)


def with_regular_gradient(x: Tensor) -> Tensor:
    """Returns images ``(B, C, *size)`` as they are; for a batch of one their gradient will have regular strides."""
    if is_exporting() or len(x) > 1 or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return with_new_strides(x, is_channels_last(x))  # the gradients of flatten and view have those of new tensors
