"""Linear layers in a row as one: the one place that decides when matrices are multiplied before tokens go through."""

from dataclasses import dataclass
from typing import Any, Optional, Sequence, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .precision import widest_float

# New in torch 2.7; before it, nothing tells an export from a compilation.
is_exporting = getattr(torch.compiler, 'is_exporting', torch.compiler.is_compiling)


@dataclass(frozen=True, eq=False)  # torch 2.6 cannot trace a call of a named tuple
class LinearMap:
    """A weight and a bias.

    Attributes:
        weight (Tensor): W, ``(out, in)``.
        bias (Tensor | None): b, ``(out,)``.
    """

    weight: Tensor
    bias: Optional[Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """W x + b, ``(…, in)`` to ``(…, out)``."""
        return F.linear(x, self.weight, self.bias)

    def then(self, other: 'LinearMap') -> 'LinearMap':
        """W' (W x + b) + b' as one map."""
        bias = other.bias
        if self.bias is not None:
            bias = other.weight @ self.bias if bias is None else torch.addmv(bias, other.weight, self.bias)
        return LinearMap(other.weight @ self.weight, bias)

    def exactly_then(self, other: 'LinearMap') -> 'LinearMap':
        """As :meth:`then`, in float64 (where the device has it), rounded once."""
        wide = widest_float(self.weight)
        return self.to(wide).then(other.to(wide)).to(self.weight.dtype)

    def to(self, dtype: torch.dtype) -> 'LinearMap':
        """The map in another dtype."""
        return LinearMap(self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


def product_is_cheaper(layers: Sequence[nn.Module], tokens: int, saved: int, cost: int) -> bool:
    """Whether the product of the matrices of linear layers costs less than it saves.

    Args:
        layers (Sequence[nn.Module]): The layers.
        tokens (int): Tokens T that go through them.
        saved (int): Multiply-adds that the product saves a token.
        cost (int): Multiply-adds of the product.
    """
    # A size that an exported program takes later cannot decide now.
    return not is_exporting() and all(map(is_plain_linear, layers)) and tokens * saved > cost


def joined_maps(first: nn.Module, second: nn.Module, tokens: int) -> Optional[LinearMap]:
    """Two linear layers in a row as one map.

    Args:
        first (nn.Module): From E to D channels.
        second (nn.Module): From D to D' channels.
        tokens (int): Tokens T that go through them.

    Returns:
        LinearMap | None: None where two maps are cheaper, or a layer is more than its weight and bias.
    """
    if not (is_plain_linear(first) and is_plain_linear(second)):
        return None
    # The product costs D'·D·E multiply-adds. It saves the second map, D'·D a token.
    inner, outer = _weights_of(first), _weights_of(second)
    saved = outer.weight.numel()
    if not product_is_cheaper((first, second), tokens, saved, saved * inner.weight.shape[1]):
        return None
    return inner.then(outer)


def as_map(linear: nn.Module) -> Union[LinearMap, nn.Module]:
    """Weight and bias of a linear layer where they are all there is; the layer, to be called, otherwise."""
    return _weights_of(linear) if is_plain_linear(linear) else linear


def _weights_of(linear: Any) -> LinearMap:
    return LinearMap(linear.weight, linear.bias)


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
