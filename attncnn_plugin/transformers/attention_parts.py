"""The queries, keys, values and outputs of other libraries' attention, found by the names of its parts.

A start proves what it sets, by the attention that the model then computes.
"""

import inspect
from typing import Any, List, Mapping, Optional, Sequence

import torch
from torch import Tensor, nn

from .vision_transformer import Transformer

# Attributes of attention as libraries name them; of each kind it has one. Maps are modules, or the beginning of the
# names of parameters, in_proj for in_proj_weight. Those of one lie map by map, and head by head.
NUMBERS = 'num_heads', 'num_attention_heads', 'heads'
MAPS = ('qkv',), ('in_proj',), ('q_proj', 'k_proj', 'v_proj'), ('query', 'key', 'value'), ('to_q', 'to_k', 'to_v')
BIASES = 'q_bias', 'k_bias', 'v_bias'  # beside a map of all three
OUTPUTS = 'proj', 'o_proj', 'out_proj', 'to_out'
KNOWN = (
    f'attention that can start has {" or ".join(NUMBERS)}, the linear maps '
    f'{" or ".join(", ".join(names) for names in MAPS)}, and the linear map {" or ".join(OUTPUTS)}'
)


def _of_map(module: nn.Module, name: str, own: str) -> Any:
    """Returns the ``'weight'`` or the ``'bias'`` of a linear map, or None if it has none."""
    part = getattr(module, name, None)
    return getattr(part, own, None) if isinstance(part, nn.Module) else getattr(module, f'{name}_{own}', None)


class Attention:
    """An attention module of another library.

    Args:
        module (nn.Module): The module.
        name (str): Its name in the model.
        block (nn.Module): The module that it is a child of.

    Attributes:
        num_heads (int): Number of heads N_h; 0 where the module does not say.
        maps (tuple[str, ...]): The map to queries, keys and values, or three.
        output (nn.Module): The linear map that takes the outputs of all heads, which lie one after the other.
        is_known (bool): Whether all parts are there; otherwise it has none of the next three.
        head_dim (int): Channels d of a head.
        width (int): Channels D of a token.
        has_own_maps (bool): Whether each head has queries, keys and values of its own, as the output takes.
        shifts (Tensor): Δ of each head at which a start lets it look, ``(N_h, 2)``; none to begin with.
    """

    def __init__(self, module: Any, name: str, block: Any) -> None:
        self.module, self.name, self.block = module, name, block
        numbers = (getattr(module, name, None) for name in NUMBERS)
        self.num_heads: int = next((own for own in numbers if isinstance(own, int)), 0)
        found = (names for names in MAPS if all(_of_map(module, name, 'weight') is not None for name in names))
        self.maps: Sequence[str] = next(found, ())
        outputs: Any = [*filter(None, (getattr(module, name, None) for name in OUTPUTS)), None]
        self.output = next(own for own in outputs if own is None or hasattr(own, 'in_features'))
        self.shifts = torch.empty(0, 2, device='cpu')
        self.is_known = bool(self.num_heads and self.maps and self.output is not None)
        if self.is_known:
            weights = [_of_map(module, name, 'weight') for name in self.maps]
            self.head_dim = int(self.output.in_features // self.num_heads)
            self.width = int(weights[0].shape[1])
            self.has_own_maps = {*map(len, weights)} == {self.num_heads * self.head_dim * 3 // len(weights)}

    def weight(self, which: str) -> Tensor:
        """Returns the map to queries ``'q'``, keys ``'k'`` or values ``'v'``, a view, ``(N_h, d, D)``."""
        return self._of_heads([_of_map(self.module, name, 'weight') for name in self.maps], which)

    def bias(self, which: str) -> Optional[Tensor]:
        """Returns the bias of this map, a view, ``(N_h, d)``, or None if none is trained."""
        found = [_of_map(self.module, name, 'bias') for name in self.maps]
        if found == [None]:
            found = [getattr(self.module, name, None) for name in BIASES]  # that of the keys can be a buffer of zeros
        if len(found) == 3 and not isinstance(found['qkv'.index(which)], nn.Parameter):
            return None
        return self._of_heads(found, which)

    def _of_heads(self, found: Sequence[Any], which: str) -> Tensor:
        number = 'qkv'.index(which)
        rows: Tensor = found[0].data.chunk(3)[number] if len(found) == 1 else found[number].data
        return rows.unflatten(0, (self.num_heads, self.head_dim))

    def set_maps(self, which: str, *weights: Tensor) -> None:
        """Sets the weights of the maps ``'qk'`` or ``'v'``, ``(N_h, d, D)`` each; their biases become 0."""
        for name, weight in zip(which, weights):
            self.weight(name).copy_(weight)
            bias = self.bias(name)
            if bias is not None:
                bias.zero_()

    def tokens(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Returns the tokens of a call, ``(B, N, D)``: its first argument."""
        first = list(inspect.signature(type(self.module).forward).parameters)[1]
        x = args[0] if args else kwargs[first]
        return x.transpose(0, 1) if getattr(self.module, 'batch_first', True) is False else x


def find_attention(network: Transformer) -> List[Attention]:
    """Returns the attention layers in the blocks of a vision transformer, in order.

    Raises:
        ValueError: There is none, some has other parts than those that are known, or its heads cannot get a shift.
    """
    before, root = f'{network.name}.' if network.name else '', network.module
    every = {
        name: Attention(module, before + name, root.get_submodule(name.rpartition('.')[0]))
        for name, module in root.named_modules()
        if any(f'{name}.'.startswith(f'{blocks}.') for blocks in network.layout.blocks)
    }
    known = [name for name, own in every.items() if own.is_known]
    for name, own in every.items():
        apart = not any(f'{name}.'.startswith(f'{other}.') or other.startswith(f'{name}.') for other in known)
        if apart and own.num_heads:
            kind = type(own.module)
            raise ValueError(f'{name} of a {network.kind} is a {kind.__name__} of {kind.__module__}: {KNOWN}')
    if not known:
        raise ValueError(
            f'model is a {network.kind}, whose blocks have no attention with num_heads (those of a CMHSA in the '
            f'convolution phase get it with its transition): {KNOWN}'
        )
    for name in known:
        module, reason = every[name].module, ''
        if not isinstance(getattr(module, 'q_norm', None), (nn.Identity, type(None))):
            reason = 'it normalizes queries and keys, so that they have no scale: build the model with qk_norm=False'
        elif not every[name].has_own_maps:
            reason = 'its heads share queries, keys or values, or have no weights of their own there'
        if reason:
            what = f'{every[name].name} is a {type(module).__name__}'
            raise ValueError(f'{what} that cannot start as a convolution: {reason}')
    return [every[name] for name in known]
