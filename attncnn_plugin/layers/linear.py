"""When a linear layer may be replaced by products with its weight."""
from torch import nn


def is_plain_linear(linear: nn.Module) -> bool:
    """Whether a module does what its weight and bias say, and nothing else happens when it is called.

    Not so for an adapter in its place (LoRA), a parametrization, or a hook: then it must be called.
    """
    return type(linear) is nn.Linear and not (linear._forward_hooks or linear._forward_pre_hooks)
