"""What is measured of a model: a forward pass, or a training step."""

import contextlib
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEARNING_RATE = 1e-5  # no weight moves by much, however often a step is repeated


def precision(device: str, dtype: torch.dtype):
    """A context: autocast for bfloat16, nothing for float32."""
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype)


def forward_pass(model: nn.Module, images: Tensor, dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    """The model in evaluation mode, without gradients."""
    model.eval().requires_grad_(False)  # FlopCounterMode fails on views of parameters without gradients otherwise

    @torch.no_grad()
    def run() -> None:
        with precision(images.device.type, dtype):
            model(images)

    return run


def training_step(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Callable[[], None]:
    """Forward and backward pass of the cross-entropy and a step of SGD with momentum and weight decay.

    The optimizer is that of C20's Table 2, for every model.
    """
    model.train().requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, weight_decay=1e-4)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        with precision(images.device.type, dtype):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return run
