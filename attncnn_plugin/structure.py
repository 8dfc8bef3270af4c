"""Brings any model to the structure of a state dict, by one verb."""

import math
from dataclasses import replace
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from .attention.images import ImageAttention, kind_of
from .attention.state_dicts import (
    Restructurable,
    StructureError,
    check_loading,
    copy_without_values,
    read_extra_state,
)
from .attention.window import CONVOLUTIONS
from .change import Change, LayerChange, Successor, number_of_parameters, within
from .convert.models import in_words, successors
from .convert.pixels import OwnConvolution, new_attention
from .transformers.transformer_heads import follow_heads


@torch.no_grad()
def follow_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor], strict: bool = True) -> Change:
    """Brings a model to the structure of a state dict that you are about to load; the values are not loaded.

    A convolution becomes attention where the state dict has that (:func:`attncnn_plugin.convert.convs_to_attention`).
    The attention of other libraries' vision transformers gets as many heads as the state dict has. Modules of
    this package take the structure that they would take by themselves while they load it. All other modules and
    parameters stay the same objects. Call it before you build the optimizer.

    Args:
        model (nn.Module): Any model, not wrapped for distributed training.
        state_dict (Mapping[str, Tensor]): With the model's names.
        strict (bool): Whether to refuse a state dict that ``load_state_dict`` would refuse once the model has its
            structure. Otherwise entries that are missing, too many or of another shape are left to the loading, and
            modules of this package whose entries no structure explains. Defaults to True.

    Returns:
        Change: The layers that have another structure now; it is true if there are any.

    Raises:
        StructureError: The state dict does not fit: attention cannot be in the place that it has there, or, with
            ``strict``, ``load_state_dict`` would refuse it. Nothing has changed then.

    Examples:
        >>> from attncnn_plugin.convert import convs_to_attention
        >>> trained, fresh = (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()) for _ in range(2))
        >>> change = convs_to_attention(trained, '*')
        >>> print(follow_state_dict(fresh, trained.state_dict()))
        layer  before      after    parameters
        0      3×3 kernel  9 heads  224 → 251
        model                       224 → 251
        >>> fresh.load_state_dict(trained.state_dict())
        <All keys matched successfully>
    """
    _check_names(model, state_dict)
    trial = copy_without_values(model)
    take_structures(trial, state_dict)
    if strict:
        check_loading(trial, state_dict, strict=True)
    before = number_of_parameters(model)
    layers, replaced = take_structures(model, state_dict)
    return Change(tuple(layers), before, number_of_parameters(model), replaced)


def _check_names(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Refuses what holds a state dict, and one of a wrapped model."""
    for name in ('state_dict', 'model'):
        if isinstance(state_dict.get(name), Mapping):
            raise StructureError(f'the state dict is in the entry {name!r} of what is given: give checkpoint[{name!r}]')
    prefix = next(iter(state_dict), '').partition('.')[0]
    if prefix in ('module', '_orig_mod') and not hasattr(model, prefix):
        raise StructureError(f'the names of the state dict begin with {prefix}., as those of a wrapper: leave it out')


def take_structures(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str = ''
) -> Tuple[List[LayerChange], Dict[nn.Parameter, Successor]]:
    """Gives a module and all that is in it the structures that a state dict has after ``prefix``.

    Raises:
        StructureError: A convolution, or attention of another library, cannot have its structure. Others have changed
            by then.
    """
    layers: List[LayerChange] = []
    replaced: Dict[nn.Parameter, Successor] = {}
    what, size = in_words(module), number_of_parameters(module)
    followed = _follow(module, state_dict, prefix)
    if isinstance(followed, Change):
        layers += [replace(layer, name=prefix + layer.name) for layer in followed.layers]
        replaced.update(within(prefix[:-1], followed.replaced))
    elif followed:
        layers.append(LayerChange(prefix[:-1], what, in_words(module), size, number_of_parameters(module)))
    for name, child in module.named_children():
        path = f'{prefix}{name}'
        attention = attention_in(child, state_dict, f'{path}.')
        if attention is None:
            changes = take_structures(child, state_dict, f'{path}.')
            layers += changes[0]
            replaced.update(changes[1])
        else:
            setattr(module, name, attention)
            _follow(attention, state_dict, f'{path}.')  # heads can be gone
            sizes = number_of_parameters(child), number_of_parameters(attention)
            layers.append(LayerChange(path, in_words(child), in_words(attention), *sizes))
            replaced.update(within(path, successors(child, attention)))
    return layers, replaced


def _follow(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> Union[bool, Change, None]:
    if not isinstance(module, Restructurable):
        return follow_heads(module, state_dict, prefix)
    try:
        return module.follow(state_dict, prefix)  # type: ignore[arg-type]
    except StructureError:
        return False  # the loading refuses it, and says why


def attention_in(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> Optional[ImageAttention]:
    """Returns the attention that a state dict has instead of a convolution, or of attention of another kind, or None.

    Raises:
        StructureError: The convolution cannot be converted.
    """
    if not isinstance(module, (ImageAttention, *CONVOLUTIONS)) or f'{prefix}value.weight' not in state_dict:
        return None
    settings = read_extra_state(state_dict, prefix)
    if settings is None:
        return None
    conv, like = module, module
    if isinstance(module, ImageAttention):
        if not isinstance(module.from_conv, OwnConvolution) or kind_of(settings) == kind_of(module.settings):
            return None
        like = module.value
        conv = module.from_conv.like(module)
    try:
        attention = new_attention(conv, **settings)
    except (TypeError, ValueError) as error:
        raise StructureError(f'attention of the state dict cannot replace {prefix[:-1]}: {error}') from error
    heads, positions = attention.num_heads, math.prod(attention.window.kernel_size)
    if heads > positions or heads < positions and settings['position'] == 'gaussian':
        raise StructureError(
            f'the state dict has attention of {heads} heads instead of a convolution whose kernel of '
            f'{attention.window.kernel_size} has {positions} positions'
        )
    return attention if conv is module else attention.to_empty(device=like.weight.device)
