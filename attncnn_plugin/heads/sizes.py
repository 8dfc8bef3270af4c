"""The sizes that modules keep beside their parameters, after heads were removed; and a record of them.

Attention that has lost heads has a buffer: the number of heads that it was built with, that of now, and which other
sizes follow, so that a state dict carries all that another model needs to take the same structure. Its name says who
reads it, as it stands in the error of a loading that does not.
"""

import re
import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Collection, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ..attention.state_dicts import StructureError
from ..change import resize
from .forward import RewrittenForward

RECORD = 'attncnn_follow_state_dict'
RECORD_LENGTH = 11  # three numbers, and at most eight attributes that stay
NOTE = 'attncnn_plugin'  # in configurations of Hugging Face transformers
# How a module takes fewer heads, the first that runs: which sizes it keeps beside the number of heads, those of all
# heads together alone, or those that a token has too; then with the views of its forward pass rewritten.
OWN, TOKENS, VIEWS = 1, 2, 4
WAYS = 0, OWN, OWN | TOKENS, VIEWS, VIEWS | OWN, VIEWS | OWN | TOKENS
NUMBER = re.compile(r'(?:^|_)(?:n|num)?_?heads?(?:_?(?:q|k|v|kv|query|key|value))?$')
# In the names of attributes that are no width, but may be the same number.
NO_WIDTH = re.compile('window|len|time|point|patch|kernel|grid|image|img|vocab|block|layer|depth|seed|max')
# Sizes of a token, whose number can be that of all heads.
OF_TOKENS = {'dim', 'dims', 'embed_dim', 'embed_dims', 'hidden_size', 'channels', 'in_channels', 'width', 'd_model'}
OF_KEYS = 'kv', 'key_value'  # in the name of a number of heads: that of the keys, which heads may share
Shapes = Mapping[str, Tuple[torch.Size, torch.Size]]  # by the name of a parameter or buffer, before and after
Taken = Tuple[Any, str, int]  # a module, its attribute that was taken for a width by its number, and this number


def number_of_heads(number: int) -> str:
    """Returns a number of heads in words."""
    return f'{number} head' + 's' * (number != 1)


def shapes_of(module: nn.Module) -> Dict[str, torch.Size]:
    """Returns the shapes of the parameters and buffers of a module, by name."""
    return {name: own.shape for name, own in (*module.named_parameters(), *module.named_buffers())}


def set_sizes(
    module: nn.Module, shapes: Shapes, built: int, before: int, after: int, way: int, spared: Collection[int]
) -> List[Taken]:
    """Sets what a module keeps of the number of heads to that of its parameters, which have changed already.

    Args:
        module (nn.Module): The module that has the attention and all that is of its heads.
        shapes (Mapping[str, tuple[Size, Size]]): Of what has changed.
        built, before, after (int): The number of heads that it was built with, has now, and is to have.
        way (int): One of ``WAYS``.
        spared (Collection[int]): The :func:`mark` of each attribute that stays.

    Returns:
        list[tuple[nn.Module, str, int]]: The attributes that were taken for widths by their number, and this number.

    Raises:
        TypeError: A forward pass cannot be rewritten.
    """
    widths: Dict[int, int] = {}
    owners: List[nn.Module] = []
    taken: List[Taken] = []
    take = partial(_take, taken, spared)
    for name, (old, new) in shapes.items():
        path, _, leaf = name.rpartition('.')
        owner = module.get_submodule(path)
        _set_sizes_of_map(owner, leaf, old, new, take)
        owners.append(owner)
        widths.update({was: own for was, own in zip(old, new) if was not in (own, before)})
    views = 0
    for own in module.modules():
        numbers = {key: value for key, value in vars(own).items() if type(value) is int}
        counts = _numbers_of_heads(numbers, before)
        if not counts:
            continue
        of_one = {value for key, value in numbers.items() if key not in counts and ('dim' in key or 'head' in key)}
        for key, value in counts.items():
            setattr(own, key, value * after // before)
        for key, value in numbers.items():
            if value % before == 0 and value // before in of_one:  # of all heads, beside that of one
                widths.setdefault(value, value // before * after)
            is_of_one = key in counts or 'head' in key and 'all' not in key
            is_width = value in widths and not NO_WIDTH.search(key)
            if way & OWN and not is_of_one and is_width and (way & TOKENS or key not in OF_TOKENS):
                take(own, key, widths[value])
        owners.append(own)
        views += bool(way & VIEWS and _rewrite(own, built))
    for own in owners:
        for key, value in vars(own).items():  # the shape of biases
            if 'bias' in key and isinstance(value, tuple) and value[-1:] == (before,):
                vars(own)[key] = (*value[:-1], after)
    compute_anew(module)
    if way & VIEWS and not views:
        raise TypeError('no forward pass could be rewritten')
    return taken


def _take(taken: List[Taken], spared: Collection[int], owner: Any, key: str, value: int) -> None:
    """Sets an attribute that was taken for a width, and notes what it was."""
    if mark(key) not in spared:
        taken.append((owner, key, vars(owner)[key]))
        setattr(owner, key, value)


def _numbers_of_heads(numbers: Mapping[str, int], before: int) -> Dict[str, int]:
    """Returns the attributes that are the number of heads, or that of the keys, which they may share."""
    of_keys = {key for key in numbers if any(word in key for word in OF_KEYS)}
    counts = {key: value for key, value in numbers.items() if is_number_of_heads(key, value)}
    return {key: own for key, own in counts.items() if own == before or key in of_keys and 0 < own < before}


def spare(taken: Sequence[Taken], homes: Iterable[nn.Module], check: Callable[[], None]) -> Iterator[int]:
    """Puts attributes back that were taken for widths, but that heads do without; yields their marks.

    What is the same number by chance, such as a window, would else change what the example does not show.
    """

    def put(values: Sequence[Taken]) -> None:
        for own, key, value in values:
            setattr(own, key, value)
        for home in homes:
            compute_anew(home)

    for name in dict.fromkeys(key for _, key, _ in taken):
        old = [(own, key, value) for own, key, value in taken if key == name]
        new = [(own, key, getattr(own, key)) for own, key, _ in old]
        put(old)
        try:
            check()
        except Exception:  # of whatever kind, as numbers that do not fit raise
            put(new)
        else:
            yield mark(name)


def mark(key: str) -> int:
    """Returns the number by which a record knows the name of an attribute."""
    return zlib.crc32(key.encode())


def compute_anew(module: nn.Module) -> None:
    """Makes a module recompute what it caches in evaluation mode, such as biases of relative positions."""
    modes = {own: own.training for own in module.modules()}
    module.train()
    module.eval()
    for own, mode in modes.items():
        own.training = mode


def is_number_of_heads(key: str, value: Any) -> bool:
    """Says whether an attribute is a number of heads, by its name, such as ``num_kv_heads`` or ``nhead``."""
    return type(value) is int and NUMBER.search(key) is not None


def _set_sizes_of_map(owner: Any, leaf: str, old: torch.Size, new: torch.Size, take: Callable[..., None]) -> None:
    """Sets what a map says about the shape of its weight."""
    if isinstance(owner, nn.Linear) and leaf == 'weight':
        owner.out_features, owner.in_features = new
    elif isinstance(owner, nn.modules.conv._ConvNd) and leaf == 'weight':
        if owner.groups == old[0] != new[0]:  # of each channel
            owner.groups = owner.in_channels = new[0]
        owner.out_channels, owner.in_channels = new[0], new[1] * owner.groups
    elif leaf == 'weight':
        changed = {was: own for was, own in zip(old, new) if was not in new}
        for key, value in list(vars(owner).items()):  # of a norm, or a map of another library
            if type(value) is int and value in changed:
                take(owner, key, changed[value])
        if vars(owner).get('normalized_shape') == tuple(old):
            owner.normalized_shape = tuple(new)


def _rewrite(module: Any, built: int) -> bool:
    """Gives a module a forward pass that needs no number of heads, where that is possible; says whether it was."""
    if not isinstance(vars(module).get('forward'), (type(None), RewrittenForward)):
        raise TypeError(f'something else has replaced the forward pass of a {type(module).__name__}')
    try:
        module.forward = RewrittenForward(module, built)
    except TypeError:
        return False
    if isinstance(module, nn.MultiheadAttention):
        module._qkv_same_embed_dim = False  # else nn.TransformerEncoderLayer does not call it
    return True


@dataclass(frozen=True)
class FewerHeads:
    """The number of heads that attention has in a state dict, with the shapes there.

    Attributes:
        built, left (int): The number of heads that it was built with, and has now.
        way (int): One of ``WAYS``.
        spared (list[int]): As of :func:`set_sizes`, and the marks of buffers of heads that state dicts leave out.
        shapes (dict[str, torch.Size]): Those of the parameters and buffers, by name.
        before (int): The number of heads in the model.
    """

    built: int
    left: int
    way: int
    spared: List[int]
    shapes: Mapping[str, torch.Size]
    before: int

    @classmethod
    def of(cls, module: nn.Module, state_dict: Mapping[str, Tensor], prefix: str) -> Optional['FewerHeads']:
        """Returns the structure in a state dict; None for that of the module, or without all of its parameters.

        Raises:
            StructureError: The module was built with another number of heads, or the record of them is damaged.
        """
        own, there = record_of(module), state_dict.get(f'{prefix}{RECORD}')
        if there is not None:  # floating-point where all entries were cast or averaged
            exact = 1 / torch.finfo(there.dtype).eps if there.is_floating_point() else torch.inf
            if there.shape != (RECORD_LENGTH,) or not (there.abs() <= exact).all():
                raise StructureError(
                    f'{prefix}{RECORD} of the state dict is damaged, or has lost digits as {there.dtype}: cast and '
                    'average only entries that have floating numbers'
                )
            there = tuple(there.round().long().tolist())
        record = there or (own[0], own[0], *own[2:])
        built, left, way, *spared = record
        shapes = {name: state_dict[prefix + name].shape for name in shapes_of(module) if prefix + name in state_dict}
        shapes.pop(RECORD, None)
        if own == record or any(name not in shapes for name, _ in module.named_parameters()):
            return None
        now = own[1] if own else built
        values = [
            value for part in module.modules() for key, value in vars(part).items() if is_number_of_heads(key, value)
        ]
        if values and now not in values or own and own[0] != built:
            raise StructureError(
                f'{prefix.rstrip(".") or "model"} was built with {built} heads in the state dict, but not in the '
                'model: build it with as many'
            )
        return cls(built, left, way, spared, shapes, now)

    def apply(self, module: nn.Module) -> None:
        """Gives a module this structure, with values that are yet to be loaded; parameters stay the same objects."""
        before = shapes_of(module)
        changed = {name: size for name, size in self.shapes.items() if size != before[name]}
        for name, size in changed.items():
            resize(module, name, size)
        widths = {was: own for name, size in changed.items() for was, own in zip(before[name], size)}
        for name, own in module.named_buffers():
            path, _, leaf = name.rpartition('.')
            if name in changed:
                module.get_submodule(path).register_buffer(leaf, own)  # which state dicts may have left out
            elif name not in self.shapes and mark(name) in self.spared:  # as they do one of equal entries
                value = own.flatten()[0].clone()
                resize(module, name, [widths.get(side, side) for side in own.shape])
                own.data.fill_(value)
        after = shapes_of(module)
        shapes = {name: (size, after[name]) for name, size in before.items() if size != after[name]}
        set_sizes(module, shapes, self.built, self.before, self.left, self.way, self.spared)
        write_record(module, self.built, self.left, self.way, self.spared)


def write_record(module: nn.Module, built: int, left: int, way: int, spared: Iterable[int]) -> None:
    """Notes a structure in a buffer, or removes it where all heads are there."""
    if left == built:
        module._buffers.pop(RECORD, None)
        return
    like = next(module.parameters(), None)
    values = [built, left, way, *sorted({*spared} - {0})]
    if len(values) > RECORD_LENGTH:
        raise TypeError(f'{len(values) - 3} attributes are as large as a width, but are none')
    values += [0] * (RECORD_LENGTH - len(values))
    record = torch.tensor(values, device='cpu' if like is None else like.device)
    module.register_buffer(RECORD, record)


def record_of(module: nn.Module) -> Optional[Tuple[int, ...]]:
    """Returns the number of heads a module was built with, has now, the way, and what is spared; None for no loss."""
    record = module._buffers.get(RECORD)
    return None if record is None else tuple(record.tolist())


def note_in_configs(model: nn.Module) -> None:
    """Notes in configurations of Hugging Face transformers, which ``save_pretrained`` writes, what loads the model."""
    modules: List[Any] = [own for own in model.modules() if hasattr(getattr(own, 'config', None), 'architectures')]
    for module in modules:
        vars(module.config).pop(NOTE, None)
    for module in modules:
        if any(RECORD in own._buffers for own in module.modules()):
            setattr(module.config, NOTE, 'heads are pruned: load with attncnn_plugin.load_hugging_face(folder)')
