"""Heads of any model: those of this package's attention, and those of timm's and mmpretrain's vision transformers."""

import re
from typing import Any, Dict, List, Mapping, Sequence, Union

from torch import nn

from ..attention.heads import PrunableHeads
from ..change import Successor, within
from ..transformers.transformer_heads import SHARED_BIASES, TransformerHeads, transformer_heads

Heads = Union[PrunableHeads, TransformerHeads]

# Parts of a vision transformer that hold something for the heads of all its layers: biases, and rotations.
SHARED = (*SHARED_BIASES, 'rope')


def prunable_heads(model: nn.Module) -> Dict[str, Heads]:
    """The attention of a model whose heads can be removed, by the names of ``model.named_modules()``.

    Args:
        model (nn.Module): Any model.

    Returns:
        dict[str, PrunableHeads | TransformerHeads]: With ``num_heads`` and ``prune_heads(heads)``. Attention in which
        heads share something is among it; ``prune_heads`` refuses it.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', depth=2)
        >>> {name: layer.num_heads for name, layer in prunable_heads(model).items()}
        {'blocks.0.attn': 3, 'blocks.1.attn': 3}
    """
    found: Dict[str, Heads] = {}
    for name, module in model.named_modules():
        heads = module if isinstance(module, PrunableHeads) else transformer_heads(module)
        if heads is not None:
            found[name] = heads
    return found


def prune_heads(
    model: nn.Module, heads: Mapping[Union[str, int], Sequence[int]], allow_empty: bool = False
) -> Dict[nn.Parameter, Successor]:
    """Removes heads of a model, in place; it computes what it did with their outputs at zero.

    The model is one with attention of this package, or a vision transformer of timm or mmpretrain: ViT, DeiT, BEiT,
    EVA, DINOv3, ``vit_relpos_*`` and Swin. Linear maps to and from the heads shrink, tables of relative positions lose
    their columns, and the fused kernels stay. A state dict carries the number of heads. Networks of this package take
    it as they load it; models of other libraries take it by :func:`attncnn_plugin.follow_state_dict`.

    Args:
        model (nn.Module): The model.
        heads (Mapping[str | int, Sequence[int]]): By the name of the attention, or the number of its block, the heads
            to remove, counted among those there are now.
        allow_empty (bool): Whether all heads of a layer may go, which leaves it the bias of its output. Defaults to
            False.

    Returns:
        dict[Parameter, Successor]: What took the place of each old parameter, for
        :func:`~attncnn_plugin.pruning.replace_parameters`.

    Raises:
        TypeError: A layer that would compute something else without heads.
        ValueError: A layer or a head that is not there, all heads of a layer, or a bias or an encoding of positions
            that all layers share. Nothing is removed then.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', depth=2)
        >>> replaced = prune_heads(model, {'blocks.0.attn': [0, 2]})
        >>> model.blocks[0].attn.qkv
        Linear(in_features=192, out_features=192, bias=True)
        >>> fresh = timm.create_model('vit_tiny_patch16_224', depth=2)
        >>> import attncnn_plugin
        >>> attncnn_plugin.follow_state_dict(fresh, model.state_dict())
        True
        >>> fresh.load_state_dict(model.state_dict())
        <All keys matched successfully>
        >>> fresh.blocks[0].attn.num_heads
        1
    """
    layers = prunable_heads(model)
    named = {layer_name(layers, key): list(indices) for key, indices in heads.items()}
    if len(named) < len(heads):
        raise ValueError(f'heads={dict(heads)} names a layer twice')
    for name, indices in named.items():
        check_prunable(model, name, layers[name])
        layers[name].check_heads(indices, allow_empty)
    replaced = {}
    for name, indices in named.items():
        replaced.update(within(name, layers[name].prune_heads(indices, allow_empty)))
    return replaced


def layer_name(layers: Mapping[str, Heads], key: Union[str, int]) -> str:
    """The name of a layer, where its name or the number of its block is given.

    Raises:
        ValueError: There is none, or several.
    """
    pattern = re.compile(rf'(?:^|\.)(?:blocks|layers)\.{key}\.')
    found = [name for name in layers if name == key or isinstance(key, int) and pattern.search(name)]
    if len(found) != 1:
        raise ValueError(
            f'heads of {key!r} are to be removed, but there are {len(found)} attention layers of that name or block '
            f'with heads that can be removed: name one of {", ".join(layers) or "none at all"}'
        )
    return found[0]


def check_prunable(model: nn.Module, name: str, layer: Heads) -> None:
    """Refuses attention with a bias or an encoding that all layers share.

    Raises:
        ValueError: It has one.
    """
    if isinstance(layer, PrunableHeads):
        return
    for path in _parents(name):
        parent: Any = model.get_submodule(path)
        for part in SHARED:
            shared = getattr(parent, part, None)
            if isinstance(shared, nn.Module) and any(True for _ in shared.parameters()):
                raise ValueError(
                    f'heads of {name} cannot be removed: {type(parent).__name__} has {part}, which all layers share '
                    'and which has parameters for each of the heads; a model where each layer has its own can be pruned'
                )


def _parents(name: str) -> List[str]:
    """The names of all modules that a module is in."""
    parts = name.split('.')
    return ['.'.join(parts[:number]) for number in range(len(parts))]
