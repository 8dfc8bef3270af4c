"""The parameters that take the place of a layer's, and what of an optimizer's state is theirs."""

from dataclasses import dataclass, field
from typing import Callable, Dict, Optional

import torch
from torch import Tensor, nn

from ..attention.image_attention import ImageAttention


@dataclass(frozen=True, eq=False)
class Succession:
    """The parameters that took the place of another.

    Attributes:
        parameters (dict[str, Parameter]): By their names in the model; empty where the old one is just gone.
        heir (Parameter | None): The one of them that has the entries of the old one, in another order or the same.
        reorder (callable | None): Brings a tensor of the old one's shape to the shape and the order of the heir.
    """

    parameters: Dict[str, nn.Parameter] = field(default_factory=dict)
    heir: Optional[nn.Parameter] = None
    reorder: Optional[Callable[[Tensor], Tensor]] = None


Replaced = Dict[nn.Parameter, Succession]


def successions(name: str, layer: nn.Module, successor: nn.Module) -> Replaced:
    """Returns what takes the place of the parameters of a convolution that became attention, or of such attention.

    The bias of the values is that of the convolution. Its weight is that of the values, as long as both have the same
    entries, and with the weight positions, queries and keys come and go.

    Args:
        name (str): Name of the layer in its model.
        layer (nn.Module): The convolution, or the attention.
        successor (nn.Module): The attention, or the convolution.
    """
    old, new = dict(layer.named_parameters()), dict(successor.named_parameters())
    to_attention = isinstance(successor, ImageAttention)
    weight, heir = ('weight', 'value.weight') if to_attention else ('value.weight', 'weight')
    shape = new[heir].shape

    def reorder(x: Tensor) -> Tensor:
        if to_attention:
            return x.flatten(2).transpose(1, 2).reshape(shape)
        return x.reshape(shape[0], -1, shape[1]).transpose(1, 2).reshape(shape)

    replaced = {parameter: Succession() for parameter in old.values()}
    bias, heir_of_bias = weight.replace('weight', 'bias'), heir.replace('weight', 'bias')
    if heir_of_bias in new:
        own = new.pop(heir_of_bias)
        replaced[old[bias]] = _succession(old[bias], {f'{name}.{heir_of_bias}': own}, own, lambda x: x)
    parameters = {f'{name}.{key}': parameter for key, parameter in new.items()}
    replaced[old[weight]] = _succession(old[weight], parameters, new[heir], reorder)
    return replaced


def _succession(
    old: nn.Parameter, new: Dict[str, nn.Parameter], heir: nn.Parameter, reorder: Callable[[Tensor], Tensor]
) -> Succession:
    """Returns one with an heir where its entries are those of the old parameter, so that their momentum is theirs."""
    if old.numel() == heir.numel() and torch.equal(reorder(old.detach()), heir.detach()):
        return Succession(new, heir, reorder)
    return Succession(new)
