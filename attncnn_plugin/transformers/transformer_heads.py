"""The heads of the attention modules of timm's and mmpretrain's vision transformers: their parameters, without some.

Modules are told by what they have, not by their class: ``num_heads``, a linear map ``proj`` of the outputs of all
heads, and linear maps to queries, keys and values. Whether a module then computes the same as with the heads' outputs
at zero is tried, on a copy: a module that has other parts for heads, or mixes heads, is refused.

A state dict carries the number of heads in its shapes, as that of
:class:`~attncnn_plugin.attention.heads.PrunableHeads` does; :func:`attncnn_plugin.follow_state_dict` takes it.
"""

import copy
import logging
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Type

import torch
from torch import Tensor, nn

from ..attention.attention_layer import AttentionLayer
from ..attention.heads import check_heads, keep_entries, resize_parameter
from ..attention.state_dicts import StructureError
from ..change import Successor
from .mixed_classes import mixed
from .narrow_attention import NarrowAttention, NarrowClassAttention

logger = logging.getLogger(__name__)

# Linear maps to queries, keys and values, and how many of them are one: the rows of a map lie map by map, head by head.
MAPS: Dict[str, Tuple[Tuple[str, int], ...]] = {
    'one map': (('qkv', 3),),
    'queries apart': (('q', 1), ('kv', 2)),
    'three maps': (('q_proj', 1), ('k_proj', 1), ('v_proj', 1)),
    'three short names': (('q', 1), ('k', 1), ('v', 1)),
}
BIASES = ('q_bias', 'k_bias', 'v_bias')  # of qkv, beside it
TABLES = ('relative_position_bias_table', 'rel_pos.relative_position_bias_table')  # (shifts, N_h)
SHARED_BIASES = ('shared_rel_pos', 'rel_pos_bias')  # modules of the whole transformer, for all its layers
POSITION_MLP = 'rel_pos.mlp.fc2'  # from hidden channels to N_h
NUMBERS = ('num_heads', 'num_kv_heads')  # attributes that are N_h,
WIDTHS = ('attn_dim', 'kv_dim', 'embed_dims')  # … and those that are the channels of all heads


@dataclass(frozen=True)
class Layout:
    """Where the heads of a module are, as it was built.

    Attributes:
        num_heads (int): Number of heads.
        entries (dict[str, tuple[int, int, int]]): Of each parameter, and each buffer, with entries for single heads:
            the dimension, the number of maps in it, one after the other, and the entries of a head in each.
    """

    num_heads: int
    entries: Dict[str, Tuple[int, int, int]]


class TransformerHeads:
    """The heads of an attention module of another library, as :class:`~.heads.PrunableHeads` has its own.

    Args:
        module (nn.Module): With a layout, see :func:`transformer_heads`.
        layout (Layout): It.
    """

    def __init__(self, module: Any, layout: Layout) -> None:
        self.module = module
        self.layout = layout
        self._tried: Dict[Tuple[int, ...], Type[nn.Module]] = {}  # the classes by the heads there are and are to be

    @property
    def num_heads(self) -> int:
        """Number of heads N_h there are now."""
        return int(self.module.num_heads)

    @property
    def output(self) -> Any:
        """The linear map that takes the outputs of all heads, which lie one after the other."""
        return self.module.proj

    def output_entries(self, heads: Sequence[int]) -> Tensor:
        """The columns of the weight of :attr:`output` that take the outputs of some heads, ``(n,)``."""
        return self.head_entries(heads)['proj.weight'][1]

    def head_entries(self, heads: Sequence[int]) -> Dict[str, Tuple[int, Tensor]]:
        """Of every parameter, and buffer, with entries for single heads: the dimension, and those of these heads."""
        found = {}
        for name, (dim, maps, width) in self.layout.entries.items():
            index = torch.arange(maps * self.num_heads * width, device=_tensor(self.module, name).device)
            found[name] = dim, index.view(maps, self.num_heads, width)[:, list(heads)].flatten()
        return found

    def check_heads(self, heads: Sequence[int], allow_empty: bool = False) -> None:
        """Whether these heads can be removed.

        Raises:
            TypeError: The module without them would compute something else.
            ValueError: A head that is not there, or all of them.
        """
        check_heads(heads, self.num_heads, allow_empty)
        self._class_with(self._others(heads))

    @torch.no_grad()
    def prune_heads(self, heads: Sequence[int], allow_empty: bool = False) -> Dict[nn.Parameter, Successor]:
        """Removes heads, see :meth:`~attncnn_plugin.attention.heads.PrunableHeads.prune_heads`.

        Without any heads the module gives the bias of ``proj``.

        Raises:
            TypeError: The module without them would compute something else.
            ValueError: A head that is not there, or all of them.
        """
        check_heads(heads, self.num_heads, allow_empty)
        kept = self._others(heads)
        self.module.__class__ = self._class_with(kept)
        return self._keep(kept)

    def structure_in(self, state_dict: Mapping[str, Tensor], prefix: str) -> Optional[int]:
        """The number of heads in a state dict; None where that does not explain the entries, or there are none."""
        counts = set()
        for name, (dim, maps, width) in self.layout.entries.items():
            loaded, own = state_dict.get(prefix + name), _tensor(self.module, name)
            if not isinstance(own, nn.Parameter):
                continue
            if loaded is None or loaded.ndim != own.ndim:  # without all entries some would be lost
                return None
            shapes = [list(tensor.shape) for tensor in (loaded, own)]
            heads, rest = divmod(shapes[0].pop(dim), maps * width)
            shapes[1].pop(dim)
            if rest or shapes[0] != shapes[1]:
                return None
            counts.add(heads)
        if len(counts) != 1 or max(counts) > self.layout.num_heads:
            return None
        return counts.pop()

    @torch.no_grad()
    def take_structure(self, num_heads: int) -> None:
        """Gives the module a number of heads, with values that are yet to be loaded.

        The parameters stay the same objects.

        Raises:
            TypeError: The module cannot have fewer heads.
        """
        own = self._class_with(range(num_heads)) if num_heads < self.num_heads else type(self.module)
        logger.info('An attention module takes %d heads in place of %d.', num_heads, self.num_heads)
        self.module.head_layout = self.layout
        for name, (dim, maps, width) in self.layout.entries.items():
            if isinstance(_tensor(self.module, name), nn.Parameter):
                resize_parameter(self.module, name, dim, num_heads * maps * width)
            else:
                self.module.register_buffer(name, _tensor(self.module, name).new_zeros(num_heads * width), False)
        self._set_numbers(num_heads)
        self.module.__class__ = own

    def _others(self, heads: Sequence[int]) -> List[int]:
        return [head for head in range(self.num_heads) if head not in heads]

    def _keep(self, kept: Sequence[int]) -> Dict[nn.Parameter, Successor]:
        """Removes all other heads."""
        entries = self.head_entries(kept)
        buffers = {name for name in entries if not isinstance(_tensor(self.module, name), nn.Parameter)}
        self.module.head_layout = self.layout
        for name in buffers:
            self.module.register_buffer(name, _tensor(self.module, name).index_select(*entries[name]), False)
        replaced = keep_entries(self.module, {name: own for name, own in entries.items() if name not in buffers})
        self._set_numbers(len(kept))
        return replaced

    def _set_numbers(self, num_heads: int) -> None:
        """Says in the attributes of the module how many heads there are, and how wide they are together."""
        width = self.layout.entries['proj.weight'][2]
        old = self.num_heads
        rel_pos: Any = getattr(self.module, 'rel_pos', None)
        if rel_pos is not None:
            rel_pos.bias_shape = (*rel_pos.bias_shape[:-1], num_heads)
        for owner in (self.module, rel_pos):
            for names, before, after in ((NUMBERS, old, num_heads), (WIDTHS, old * width, num_heads * width)):
                for name in names:
                    if getattr(owner, name, None) == before:
                        setattr(owner, name, after)

    def _class_with(self, kept: Sequence[int]) -> Type[nn.Module]:
        """The class whose forward pass computes the same without heads as with their outputs at zero.

        Raises:
            TypeError: There is none.
        """
        key = self.num_heads, *kept
        if key in self._tried:  # by check_heads
            return self._tried[key]
        own: Any = type(self.module)
        classes = [own]
        if not issubclass(own, NarrowAttention):
            classes += [mixed(NarrowAttention, own), mixed(NarrowClassAttention, own)]
        reasons = []
        for cls in classes:
            try:
                if self._is_equal_in(cls, kept):
                    self._tried[key] = cls
                    return cls
                reasons.append('it computes something else')
            except Exception as error:  # of any module
                reasons.append(f'{type(error).__name__}: {error}')
        raise TypeError(
            f'heads cannot be removed from a {own.__name__}. What was looked for is the attention of a vision '
            'transformer with num_heads, linear maps (qkv, or one each for queries, keys and values) and proj, whose '
            f'heads share nothing. Without heads {list(self._others(kept))}: {reasons[0]}'
        )

    @torch.no_grad()
    def _is_equal_in(self, cls: Type[nn.Module], kept: Sequence[int]) -> bool:
        """Whether a copy with random weights, of a class, computes the same without heads as with them at zero."""
        modules = self.module.modules()
        hooks = [getattr(module, name) for module in modules for name in ('_forward_pre_hooks', '_forward_hooks')]
        whole = copy.deepcopy(self.module, {id(own): OrderedDict() for own in hooks})  # hooks see no trials
        whole.eval()
        device = self.output.weight.device
        on_meta = device.type == 'meta'  # then the shapes are compared
        whole.to(device='meta' if on_meta else 'cpu', dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)
        if not on_meta:
            for parameter in whole.parameters():
                parameter.normal_(std=0.5, generator=generator)
        narrow = copy.deepcopy(whole)
        narrow.__class__ = cls
        TransformerHeads(narrow, self.layout)._keep(kept)
        x = torch.randn(2, _num_tokens(whole), self._num_channels, generator=generator, dtype=torch.float64)
        x = x.to(whole.proj.weight.device)
        gone = torch.ones_like(whole.proj.weight[0])
        gone[self.output_entries(self._others(kept)).to(gone.device)] = 0
        whole.proj.register_forward_pre_hook(lambda _, args: args[0] * gone)
        expected, output = whole(x), narrow(x)
        return output.shape == expected.shape and (on_meta or torch.allclose(output, expected, rtol=1e-9, atol=1e-9))

    @property
    def _num_channels(self) -> int:
        """Channels of a token."""
        name = next(name for name in self.layout.entries if name.endswith('.weight'))
        return int(self.module.get_parameter(name).shape[1])


def transformer_heads(module: nn.Module) -> Optional[TransformerHeads]:
    """The heads of an attention module of another library; None for any other module.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', depth=1)
        >>> transformer_heads(model.blocks[0].attn).num_heads, transformer_heads(model.blocks[0].mlp)
        (3, None)
    """
    layout = getattr(module, 'head_layout', None) or _layout_of(module)
    return None if layout is None else TransformerHeads(module, layout)


def _layout_of(module: Any) -> Optional[Layout]:
    num_heads, proj = getattr(module, 'num_heads', None), getattr(module, 'proj', None)
    if isinstance(module, AttentionLayer) or not isinstance(num_heads, int) or not isinstance(proj, nn.Linear):
        return None
    maps = next(
        (maps for maps in MAPS.values() if all(isinstance(getattr(module, name, None), nn.Linear) for name, _ in maps)),
        None,
    )
    if maps is None or num_heads < 1 or proj.in_features % num_heads:
        return None
    width = proj.in_features // num_heads
    gate = [('gate', 1)] if isinstance(getattr(module, 'gate', None), nn.Linear) else []
    if any(getattr(module, name).out_features != number * proj.in_features for name, number in [*maps, *gate]):
        return None  # heads that share keys and values, or of other widths
    entries = {}
    for name, number in [*maps, *gate]:
        entries[f'{name}.weight'] = 0, number, width
        if getattr(module, name).bias is not None:
            entries[f'{name}.bias'] = 0, number, width
    entries['proj.weight'] = 1, 1, width
    named = dict([*module.named_parameters(), *module.named_buffers()])
    entries.update({name: (0, 1, width) for name in BIASES if name in named})
    entries.update({name: (1, 1, 1) for name in TABLES if name in named})
    entries.update({name: (0, 1, 1) for name in (f'{POSITION_MLP}.weight', f'{POSITION_MLP}.bias') if name in named})
    return Layout(num_heads, entries)


def _tensor(module: nn.Module, name: str) -> Tensor:
    """A parameter or a buffer."""
    path, _, leaf = name.rpartition('.')
    return getattr(module.get_submodule(path), leaf)


def _num_tokens(module: Any) -> int:
    """The number of tokens that a module takes: that of its window, or any."""
    owner: Any
    for owner in (module, getattr(module, 'rel_pos', None)):
        index = getattr(owner, 'relative_position_index', None)
        if isinstance(index, Tensor):
            beside = owner.prefix_tokens if hasattr(owner, 'mlp') else 0  # whose biases an MLP does not give
            return math.isqrt(index.numel()) + beside
    return 3


def follow_heads(module: nn.Module, state_dict: Mapping[str, Tensor], prefix: str) -> bool:
    """Gives attention of another library as many heads as a state dict has for it.

    Args:
        module (nn.Module): Any module.
        state_dict (Mapping[str, Tensor]): With the names of a model.
        prefix (str): Name of the module with a dot, or empty.

    Returns:
        bool: Whether it had another number.

    Raises:
        StructureError: The module cannot have as few heads.
    """
    heads = transformer_heads(module)
    number = None if heads is None else heads.structure_in(state_dict, prefix)
    if heads is None or number is None or number == heads.num_heads:
        return False
    try:
        heads.take_structure(number)
    except TypeError as error:
        raise StructureError(f'{prefix.rstrip(".")} has {number} heads in the state dict: {error}') from error
    return True
