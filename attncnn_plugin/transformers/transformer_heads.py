"""The heads of attention of other libraries: their entries in the parameters, and the module without some.

A state dict carries the number of heads in its shapes, as that of
:class:`~attncnn_plugin.attention.heads.PrunableHeads` does; :func:`attncnn_plugin.follow_state_dict` takes it.
"""

import functools
from contextlib import contextmanager
from types import MethodType
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.heads import check_heads, heads_in, keep_entries, not_alone, resize_parameter
from ..attention.state_dicts import StateDict, StructureError
from ..change import Successor
from .adapters import Attention, adapter_of, by_name, join_windows, numbers_in_windows


class TransformerHeads(Attention):
    """The heads of attention of another library, as :class:`~attncnn_plugin.attention.heads.PrunableHeads` has its own.

    Libraries mostly take the channels of all heads to be those of a token. So a module that loses heads gets
    :func:`forward_of_heads` as its ``forward``, an attribute of the module itself; class, names and hooks stay.

    Attributes:
        layout (dict[str, tuple[int, int, int]]): Of each parameter with entries for single heads: the dimension, the
            number of maps in it, one after the other, and the entries of a head in each.
        built_heads (int): Number of heads that the module was built with, the most that it can load.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.built_heads = int(getattr(module, 'pruned_from', (self.num_heads, 0))[0])
        width = self.head_dim
        beside = [name for name in (self.adapter.gate, *self.adapter.biases) if self.part(name) is not None]
        places = {name: (0, 3 if len(self.map_names) == 1 else 1, width) for name in self.map_names}
        places.update(dict.fromkeys(beside, (0, 1, width)))
        layout = {self.name_of(name, own): place for name, place in places.items() for own in ('weight', 'bias')}
        layout.update(dict.fromkeys(beside, (0, 1, width)))
        layout[f'{self.adapter.output}.weight'] = 1, 1, width
        layout.update({name: (dim, 1, 1) for name, dim in self.adapter.tables.items()})
        # A parametrized weight is a tensor, and so is a bias that is always 0; a quantized one is a method.
        kinds = {name: nn.Parameter if name in self.adapter.biases else (Tensor, MethodType) for name in layout}
        self.layout = {name: place for name, place in layout.items() if isinstance(self.part(name), kinds[name])}

    def output_entries(self, heads: Sequence[int]) -> Tensor:
        """Returns the columns of the weight of :attr:`output` that take the outputs of some heads, ``(n,)``."""
        return self.head_entries(heads)[f'{self.adapter.output}.weight'][1]

    def head_entries(self, heads: Sequence[int]) -> Dict[str, Tuple[int, Tensor]]:
        """Returns the dimension of heads, and the entries of these, of every parameter that has some."""
        found = {}
        for name, (dim, maps, width) in self.layout.items():
            device = getattr(self.part(name), 'device', None)
            index = torch.arange(maps * self.num_heads * width, device=device)
            found[name] = dim, index.view(maps, self.num_heads, width)[:, list(heads)].flatten()
        return found

    def check_heads(self, heads: Sequence[int], allow_empty: bool = False) -> List[int]:
        """Returns heads as integers, and refuses those that cannot be removed.

        Raises:
            TypeError: The heads of the module share something, or something computes their weights.
            ValueError: A head that is not there, or all of them.
        """
        # A block that interpolates its table of biases needs one.
        heads = check_heads(heads, self.num_heads, allow_empty and not self.adapter.called)
        reason = self.shared()
        if reason is not None:
            raise TypeError(f'heads cannot be removed from a {type(self.module).__name__}: {reason}')
        return heads

    def shared(self) -> Optional[str]:
        """Returns why heads of the module are not apart; None where they are."""
        forward = vars(self.module).get('forward')
        if not self.adapter.maps:
            return 'its probabilities are no softmax of scores'
        if self.unknown_keys is not None:
            return self.unknown_keys
        if forward is not None and getattr(forward, 'func', None) is not forward_of_heads:
            return 'something else has replaced its forward pass'
        if not isinstance(self.part('norm'), (nn.Identity, type(None))):
            return 'it has a norm over all heads'
        if self.part('v_shortcut'):
            return 'it adds its values to its output'
        if self.part('num_kv_heads') not in (None, self.num_heads):
            return 'some of its heads share keys and values'
        entries = {name: (dim, maps * self.num_heads * width) for name, (dim, maps, width) in self.layout.items()}
        return not_alone(self.module, entries)

    @torch.inference_mode(False)
    @torch.no_grad()
    def prune_heads(self, heads: Sequence[int], allow_empty: bool = False) -> Dict[nn.Parameter, Successor]:
        """Removes heads, see :meth:`~attncnn_plugin.attention.heads.PrunableHeads.prune_heads`.

        Without any heads the module gives the bias of its output.
        """
        heads = self.check_heads(heads, allow_empty)
        self.module.pruned_from = (self.built_heads, self.head_dim)
        entries = self.head_entries([head for head in range(self.num_heads) if head not in heads])
        replaced = keep_entries(self.module, entries)
        self._set_number(self.num_heads - len(heads))
        return replaced

    def structure_in(self, state_dict: StateDict, prefix: str) -> Optional[int]:
        """Returns the number of heads in a state dict; None for that of the module, or where none explains the shapes.

        Raises:
            StructureError: The module cannot have as few heads.
        """
        places = {name: (dim, maps * width, self.part(name)) for name, (dim, maps, width) in self.layout.items()}
        try:
            number = heads_in(state_dict, prefix, places, self.built_heads)
        except StructureError:
            return None  # the loading refuses it, and says why
        if number in (None, self.num_heads):
            return None
        reason = self.shared()
        if reason is not None:
            name = prefix.rstrip('.')
            raise StructureError(
                f'{name} has {number} heads in the state dict, but the model {self.num_heads}: {reason}'
            )
        return number

    @torch.no_grad()
    def take_structure(self, structure: int) -> None:
        """Gives the module a number of heads, with values that are yet to be loaded.

        The parameters stay the same objects.
        """
        self.module.pruned_from = (self.built_heads, self.head_dim)
        for name, (dim, maps, width) in self.layout.items():
            resize_parameter(self.module, name, dim, structure * maps * width)
        self._set_number(structure)

    def _set_number(self, num_heads: int) -> None:
        """Lets the module compute with another number of heads."""
        for name, number in (('attn_dim', self.head_dim), ('kv_dim', self.head_dim), ('num_kv_heads', 1)):
            if hasattr(self.module, name):
                setattr(self.module, name, num_heads * number)
        for name, bias in [(name, self.part(name)) for name in self.adapter.biases]:
            if isinstance(bias, Tensor) and not isinstance(bias, nn.Parameter):  # of the keys, always 0
                self.module.register_buffer(name, bias.new_zeros(num_heads * self.head_dim), False)
        path, _, name = self.adapter.num_heads.rpartition('.')
        setattr(self.module.get_submodule(path), name, num_heads)
        biases: Any = self.part('rel_pos')  # timm's
        if biases is not None:
            biases.num_heads, biases.bias_shape = num_heads, (*biases.bias_shape[:-1], num_heads)
        if hasattr(self.module, '_qkv_same_embed_dim'):  # else nn.TransformerEncoderLayer does not call the module
            self.module._qkv_same_embed_dim = False
        if self.adapter.forward != 'sizes':
            self.module.forward = functools.partial(forward_of_heads, self.module)

    @contextmanager
    def output_called(self) -> Iterator[None]:
        """Has the forward pass call :attr:`output` as a module inside, so that its hooks see the heads."""
        replaces = self.adapter.forward == 'functions' and 'forward' not in vars(self.module)
        if replaces:
            self.module.forward = functools.partial(forward_of_heads, self.module)
        try:
            yield
        finally:
            if replaces:
                del self.module.forward


def transformer_heads(module: nn.Module) -> Optional[TransformerHeads]:
    """Returns the heads of an attention module of another library; None for any other module.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', depth=1)
        >>> transformer_heads(model.blocks[0].attn).num_heads, transformer_heads(model.blocks[0].mlp)
        (3, None)
    """
    return None if adapter_of(module) is None else TransformerHeads(module)


def forward_of_heads(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes the output of attention that has lost heads as its own forward pass does, ``(B, N, D)`` of tokens.

    Raises:
        ValueError: Something that is added to the scores is for another number of heads.
    """
    attention = Attention(module)
    given = by_name(attention.called, args, kwargs)
    tokens = given.pop(next(iter(given)))
    of_all = tokens, *(given.pop(name, tokens) for name in ('key', 'value'))  # other ones of nn.MultiheadAttention

    def each(change: Callable[[Tensor], Any]) -> List[Any]:
        changed = {id(own): change(own) for own in of_all}  # the same stay the same
        return [changed[id(own)] for own in of_all]

    if tokens.is_nested:  # nn.TransformerEncoder has cut padding off
        rows = zip(*each(lambda own: [row[None] for row in own.unbind()]))
        return torch.nested.as_nested_tensor([forward_of_heads(module, *row, **given)[0][0] for row in rows]), None
    if tokens.ndim == 2:  # no batch
        dim, mask = 0 if module.batch_first else 1, given.get('key_padding_mask')
        given['key_padding_mask'] = None if mask is None else mask[None]
        output, weights = forward_of_heads(module, *each(lambda own: own.unsqueeze(dim)), **given)
        return output.squeeze(dim), None if weights is None else weights[0]
    x, call = attention.tokens((tokens,), given)
    query, key, value = attention.queries_keys_values(x, call)
    if any(own is not tokens for own in of_all):
        maps = each(lambda own: attention.queries_keys_values(attention.tokens((own,), given)[0], call))
        query, key, value = (maps[number][number] for number in range(3))
    added = attention.added(query, call)
    number = attention.num_heads
    if added is not None and added.ndim > 2 and added.shape[-3] not in (1, number):
        raise ValueError('a position bias that all layers share is for all heads, but this layer has lost some')
    drop: Any = attention.part(attention.adapter.drop)
    rate = getattr(drop, 'p', drop or 0.0) if module.training else 0.0
    needs_weights = call.get('need_weights', attention.adapter.returns_pair)
    fused = number > 0 and getattr(module, 'fused_attn', not isinstance(drop, nn.Module))
    if needs_weights or not fused:
        scores = query @ key.mT
        weights = (scores if added is None else scores + added).softmax(-1)
    if fused:
        added = None if added is None else added.to(value.dtype)
        heads = F.scaled_dot_product_attention(query, key, value, attn_mask=added, dropout_p=rate, scale=1.0)
    else:
        heads = F.dropout(weights, rate).type_as(value) @ value
    output = heads.transpose(1, 2).flatten(2)  # head after head
    gate = attention.part(attention.adapter.gate)
    output = attention.output(output if gate is None else output * gate(x).sigmoid())
    for name in attention.adapter.after:
        output = attention.part(name)(output)
    if attention.adapter.cuts:
        output = join_windows(output, numbers_in_windows(*call['windows']), tokens.shape[1:3])
        return F.dropout(output, module.dropout, module.training)
    if needs_weights and call.get('average_attn_weights', True):
        weights = weights.mean(1)
    if getattr(module, 'batch_first', True) is False:
        output = output.transpose(0, 1)
    return (output, weights if needs_weights else None) if attention.adapter.returns_pair else output
