"""The parameters that take the place of a layer's, and what of an optimizer's state is theirs."""

from dataclasses import dataclass, field
from typing import Callable, Dict, Optional

import torch
from torch import Tensor, nn

from ..layers.image_attention import ImageAttention
from .kernels import Convolution


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


def to_attention(name: str, conv: Convolution, attention: ImageAttention) -> Replaced:
    """What takes the place of a convolution's parameters: values that of the bias, all else that of the weight."""
    old, new = dict(conv.named_parameters()), dict(attention.named_parameters())
    shape = new['value.weight'].shape
    replaced = {parameter: Succession() for parameter in old.values()}
    if 'bias' in old:
        bias = new.pop('value.bias')
        replaced[old['bias']] = _succession(old['bias'], {f'{name}.value.bias': bias}, bias, lambda x: x)
    replaced[old['weight']] = _succession(
        old['weight'],
        {f'{name}.{key}': parameter for key, parameter in new.items()},
        new['value.weight'],
        lambda x: x.flatten(2).transpose(1, 2).reshape(shape),
    )
    return replaced


def to_convolution(name: str, attention: ImageAttention, conv: Convolution) -> Replaced:
    """What takes the place of the parameters of attention: its positions are just gone."""
    old, new = dict(attention.named_parameters()), dict(conv.named_parameters())
    shape = new['weight'].shape
    replaced = {parameter: Succession() for parameter in old.values()}
    if 'bias' in new:
        bias = old['value.bias']
        replaced[bias] = _succession(bias, {f'{name}.bias': new['bias']}, new['bias'], lambda x: x)
    replaced[old['value.weight']] = _succession(
        old['value.weight'],
        {f'{name}.weight': new['weight']},
        new['weight'],
        lambda x: x.reshape(shape[0], -1, shape[1]).transpose(1, 2).reshape(shape),
    )
    return replaced


def _succession(
    old: nn.Parameter, new: Dict[str, nn.Parameter], heir: nn.Parameter, reorder: Callable[[Tensor], Tensor]
) -> Succession:
    """With an heir where its entries are those of the old parameter, so that their momentum is theirs too."""
    if old.numel() == heir.numel() and torch.equal(reorder(old.detach()), heir.detach()):
        return Succession(new, heir, reorder)
    return Succession(new)
