"""The sizes that modules keep beside their parameters, after heads were removed; and a record of them.

Attention that has lost heads has a buffer: the number of heads that it was built with, that of now, and which other
sizes follow, so that a state dict carries all that another model needs to take the same structure. Its name says who
reads it, as it stands in the error of a loading that does not.
"""

import functools
import re
from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Tuple

import torch
from torch import Tensor, nn

from ..attention.state_dicts import StructureError
from .forward import forward_of_class, forward_with_fewer_heads

RECORD = 'attncnn_follow_state_dict'
# How a module takes fewer heads, the first that runs: which sizes it keeps beside the number of heads, those of all
# heads together alone, or those that a token has too; then with the views of its forward pass rewritten.
OWN, TOKENS, VIEWS = 1, 2, 4
WAYS = 0, OWN, OWN | TOKENS, VIEWS, VIEWS | OWN, VIEWS | OWN | TOKENS
# Sizes of a token, whose number can be that of all heads.
OF_TOKENS = {'dim', 'dims', 'embed_dim', 'embed_dims', 'hidden_size', 'channels', 'in_channels', 'width', 'd_model'}
IS_SIZE = re.compile('dim|size|width|channel|group')  # in the name of a number that is not one of heads
IS_WIDTH = re.compile('all_head|^(?!.*head).*(dim|width|channel|feature|hidden)')  # in that of a number of channels
Shapes = Mapping[str, Tuple[torch.Size, torch.Size]]  # by the name of a parameter or buffer, before and after


def number_of_heads(number: int) -> str:
    """Returns a number of heads in words."""
    return f'{number} head' + 's' * (number != 1)


def shapes_of(module: nn.Module) -> Dict[str, torch.Size]:
    """Returns the shapes of the parameters and buffers of a module, by name."""
    return {name: own.shape for name, own in (*module.named_parameters(), *module.named_buffers())}


def set_sizes(module: nn.Module, shapes: Shapes, built: int, before: int, after: int, way: int) -> None:
    """Lets attention in a module compute with another number of heads, whose parameters are as they shall be.

    Args:
        module (nn.Module): The module that has the attention and all that is of its heads.
        shapes (Mapping[str, tuple[Size, Size]]): Of what has changed.
        built, before, after (int): The number of heads that it was built with, has now, and is to have.
        way (int): One of ``WAYS``.

    Raises:
        TypeError: A forward pass cannot be rewritten.
    """
    widths: Dict[int, int] = {}
    owners = []
    for name, (old, new) in shapes.items():
        path, _, leaf = name.rpartition('.')
        owners.append(module.get_submodule(path))
        _set_sizes_of_map(owners[-1], leaf, old, new)
        widths.update({was: own for was, own in zip(old, new) if was != own})
    forget_caches(module)
    views = 0
    for part in module.modules():
        counts = [key for key, value in vars(part).items() if 'head' in key and _counts_heads(key, value, before)]
        if not counts:
            continue
        owners.append(part)
        for key, value in [(key, value) for key, value in vars(part).items() if type(value) is int]:
            if key in counts:
                setattr(part, key, value * after // before)
            elif way & OWN and value in widths and IS_WIDTH.search(key) and (way & TOKENS or key not in OF_TOKENS):
                setattr(part, key, widths[value])
        views += bool(way & VIEWS and _rewrite(part, built))
    for own in owners:
        for key, value in vars(own).items():  # the shape of biases
            if isinstance(value, tuple) and value[-1:] == (before,):
                vars(own)[key] = (*value[:-1], after)
    if way & VIEWS and not views:
        raise TypeError('no forward pass could be rewritten')


def forget_caches(module: nn.Module) -> None:
    """Empties the dicts of tensors that modules fill by themselves, as with biases of another number of heads."""
    for own in module.modules():
        for key, value in vars(own).items():
            is_cache = key not in ('_parameters', '_buffers') and isinstance(value, dict)
            if is_cache and value and all(isinstance(tensor, Tensor) for tensor in value.values()):
                vars(own)[key] = type(value)()


def _counts_heads(key: str, value: Any, number: int) -> bool:
    """Says whether an attribute is the number of heads, or that of keys, which heads may share."""
    of_keys = 'kv' in key or 'key_value' in key
    return type(value) is int and not IS_SIZE.search(key) and (value == number or of_keys and 0 < value < number)


def _set_sizes_of_map(owner: Any, leaf: str, old: torch.Size, new: torch.Size) -> None:
    """Sets what a map says about the shape of its weight."""
    if isinstance(owner, nn.Linear) and leaf == 'weight':
        owner.out_features, owner.in_features = new
    elif isinstance(owner, nn.modules.conv._ConvNd) and leaf == 'weight':
        if owner.groups == old[0] != new[0]:  # of each channel
            owner.groups = owner.in_channels = new[0]
        owner.out_channels, owner.in_channels = new[0], new[1] * owner.groups
    elif leaf == 'weight':  # a norm
        for key in ('num_features', 'num_channels'):
            if vars(owner).get(key) == old[0]:
                setattr(owner, key, new[0])
        if vars(owner).get('normalized_shape') == tuple(old):
            owner.normalized_shape = tuple(new)


def _rewrite(module: Any, built: int) -> bool:
    """Gives a module a forward pass that needs no number of heads, where that is possible; says whether it was."""
    forward = vars(module).get('forward')
    if forward is not None and getattr(forward, 'func', None) is not forward_with_fewer_heads:
        raise TypeError(f'something else has replaced the forward pass of a {type(module).__name__}')
    try:
        forward_of_class(type(module), built)
    except TypeError:
        return False
    module.forward = functools.partial(forward_with_fewer_heads, module, built)
    if isinstance(module, nn.MultiheadAttention):
        module._qkv_same_embed_dim = False  # else nn.TransformerEncoderLayer does not call it
    return True


@dataclass(frozen=True)
class FewerHeads:
    """The number of heads that attention has in a state dict, with the shapes there.

    Attributes:
        built, now, left (int): The number of heads that it was built with, has now, and is to have.
        way (int): One of ``WAYS``.
        shapes (dict[str, torch.Size]): Those of the parameters and buffers, by name.
    """

    built: int
    now: int
    left: int
    way: int
    shapes: Mapping[str, torch.Size]

    @classmethod
    def of(cls, module: nn.Module, state_dict: Mapping[str, Tensor], prefix: str) -> Optional['FewerHeads']:
        """Returns the structure in a state dict; None for that of the module, or without all of its parameters.

        Raises:
            StructureError: The module was built with another number of heads.
        """
        own, there = record_of(module), state_dict.get(f'{prefix}{RECORD}')
        built, left, way = (own[0], own[0], own[2]) if own and there is None else map(int, there.tolist())  # type: ignore
        shapes = {name: state_dict[prefix + name].shape for name in shapes_of(module) if prefix + name in state_dict}
        shapes.pop(RECORD, None)
        if own == (built, left, way) or any(name not in shapes for name, _ in module.named_parameters()):
            return None
        now = own[1] if own else built
        attributes = [item for part in module.modules() for item in vars(part).items()]
        numbers = [value for key, value in attributes if 'head' in key and not IS_SIZE.search(key)]
        if numbers and now not in numbers or own and own[0] != built:
            raise StructureError(
                f'{prefix.rstrip(".") or "model"} was built with {built} heads in the state dict, but not in the '
                'model: build it with as many'
            )
        return cls(built, now, left, way, shapes)

    def apply(self, module: nn.Module) -> None:
        """Gives a module this structure, with values that are yet to be loaded; parameters stay the same objects."""
        before = shapes_of(module)
        for name, shape in self._changed(module).items():
            _resize(module, name, shape)
        after = shapes_of(module)
        shapes = {name: (size, after[name]) for name, size in before.items() if size != after[name]}
        set_sizes(module, shapes, self.built, self.now, self.left, self.way)
        write_record(module, self.built, self.left, self.way)

    def _changed(self, module: nn.Module) -> Dict[str, torch.Size]:
        """Returns the shapes that change; buffers that state dicts leave out are as wide as their heads."""
        before = shapes_of(module)
        found = {name: size for name, size in self.shapes.items() if size != before[name]}
        widths = {was: own for name, size in found.items() for was, own in zip(before[name], size) if was != own}
        beside = [name for name, size in before.items() if name not in self.shapes and len(size) == 1]
        return {
            **found,
            **{name: torch.Size([widths[before[name][0]]]) for name in beside if before[name][0] in widths},
        }


def _resize(module: nn.Module, name: str, shape: torch.Size) -> None:
    """Gives a parameter or buffer another shape, all 0; it stays the same object, which an optimizer may hold."""
    path, _, leaf = name.rpartition('.')
    own: Any = getattr(module.get_submodule(path), leaf)
    with torch.inference_mode(own.is_inference()):  # of a model that was built in inference mode
        own.data, own.grad = own.data.new_zeros(shape), None


def write_record(module: nn.Module, built: int, left: int, way: int) -> None:
    """Notes a structure in a buffer; none where all heads are there."""
    if left == built:
        if RECORD in module._buffers:
            delattr(module, RECORD)
        return
    like = next(module.parameters(), None)
    record = torch.tensor([built, left, way], device=None if like is None else like.device)
    if RECORD in module._buffers:
        setattr(module, RECORD, record)
    else:
        module.register_buffer(RECORD, record)


def record_of(module: nn.Module) -> Optional[Tuple[int, ...]]:
    """Returns the number of heads a module was built with, has now, and the way; None where it has lost none."""
    record = module._buffers.get(RECORD)
    return None if record is None else tuple(record.tolist())
