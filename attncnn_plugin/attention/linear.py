"""Whether the weight and bias of a linear layer are all there is to it."""

import torch
from torch import nn


def is_plain_linear(linear: nn.Module) -> bool:
    """Whether a module does what its weight and bias say, and nothing else happens when it is called.

    Not so for an adapter in its place (LoRA), a parametrization, or a hook: then it must be called.
    """
    return (
        type(linear) is nn.Linear
        and not has_hooks(linear)
        and all(
            tensor is None or type(tensor) in (torch.Tensor, nn.Parameter) for tensor in (linear.weight, linear.bias)
        )
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether something happens when a module is called that its class does not say."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or 'forward' in module.__dict__  # torch 2.6 cannot trace vars()
    )


def check_plain_linear(name: str, linear: nn.Module) -> None:
    """Refuses to merge what is more than a weight and a bias.

    Raises:
        RuntimeError: ``linear`` is no plain linear layer.
    """
    if not is_plain_linear(linear):
        raise RuntimeError(
            f'{name} is a {type(linear).__name__}, or has hooks: only the weight of a plain nn.Linear can be merged '
            'with another; merge adapters and remove parametrizations and hooks first'
        )
