"""Brings any model to the structure of a state dict, by one verb."""

import contextlib
from dataclasses import replace
from typing import Any, Dict, List, Mapping, Optional

import torch
from torch import Tensor, nn

from .attention.images import ImageAttention, kind_of
from .attention.state_dicts import Restructurable, StructureError, check_loading, copy_without_values, read_extra_state
from .attention.window import CONVOLUTIONS
from .change import Change, LayerChange, Successor, all_or_nothing, number_of_parameters, within
from .convert.convolutions import computed
from .convert.models import in_words, successors
from .convert.pixels import OwnConvolution, check_settings, new_attention
from .heads.sizes import RECORD, FewerHeads


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
    structures = plan(model, state_dict)
    if strict:
        trial = copy_without_values(model)
        new = {name: copy_without_values(own) for name, own in structures.items() if isinstance(own, nn.Module)}
        apply(trial, {**structures, **new})
        check_loading(trial, state_dict, strict)
    with all_or_nothing([model]):
        return apply(model, structures)


@torch.inference_mode(False)
@torch.no_grad()
def plan(model: nn.Module, state_dict: Mapping[str, Any], prefix: str = '') -> Dict[str, Any]:
    """Returns the structures that modules of a model, by name, have to take from a state dict; nothing changes yet.

    A structure is what the ``take_structure`` of the module takes, such as a number of heads, or the module that takes
    its place. Modules of this package whose entries no structure explains are left to the loading.

    Args:
        model (nn.Module): The model.
        state_dict (Mapping[str, Tensor]): A state dict.
        prefix (str): What the model's names begin with in the state dict. Defaults to nothing.

    Raises:
        StructureError: A convolution, or attention of another library, cannot have its structure.
    """
    structures: Dict[str, Any] = {}
    for name, module in model.named_modules():
        inside = f'{prefix}{name}.' if name else prefix
        structure = attention_in(module, state_dict, inside) if name else None
        if structure is None and isinstance(module, Restructurable):
            with contextlib.suppress(StructureError):  # the loading refuses it, and says why
                structure = module.structure_in(state_dict, inside)
        if structure is None and (f'{inside}{RECORD}' in state_dict or RECORD in module._buffers):
            structure = FewerHeads.of(module, state_dict, inside)
        if structure is not None:
            structures[name] = structure
    return structures


@torch.inference_mode(False)
@torch.no_grad()
def apply(model: nn.Module, structures: Mapping[str, Any]) -> Change:
    """Gives modules of a model, by name, the structures of :func:`plan`; their values are yet to be loaded."""
    layers: List[LayerChange] = []
    replaced: Dict[nn.Parameter, Successor] = {}
    before = number_of_parameters(model)
    for name, structure in structures.items():
        module = new = model.get_submodule(name)
        what, size, change = in_words(module), number_of_parameters(module), None
        if isinstance(structure, nn.Module):
            new = structure
            model.set_submodule(name, new)
            replaced.update(within(name, successors(module, new)))
        elif isinstance(structure, FewerHeads):
            structure.apply(module)
        else:
            change = module.take_structure(structure)
        if change is None:
            layers.append(LayerChange(name, what, in_words(new), size, number_of_parameters(new)))
        else:
            layers += [replace(layer, name=f'{name}.{layer.name}'.lstrip('.')) for layer in change.layers]
            replaced.update(within(name, change.replaced))
    return Change(tuple(layers), before, number_of_parameters(model), replaced)


def _check_names(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Refuses what holds a state dict, and one of a wrapped model."""
    for name in ('state_dict', 'model'):
        if isinstance(state_dict.get(name), Mapping):
            raise StructureError(f'the state dict is in the entry {name!r} of what is given: give checkpoint[{name!r}]')
    prefix = next(iter(state_dict), '').partition('.')[0]
    if prefix in ('module', '_orig_mod') and not hasattr(model, prefix):
        raise StructureError(f'the names of the state dict begin with {prefix}., as those of a wrapper: leave it out')


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
    conv: Any = module
    if isinstance(module, ImageAttention):
        if not isinstance(module.from_conv, OwnConvolution) or kind_of(settings) == kind_of(module.settings):
            return None
        conv = module.from_conv.like(module)
    try:
        plain = computed(conv)
        attention = new_attention(conv, plain, check_settings(plain, **settings))
    except (TypeError, ValueError) as error:
        what = f'{prefix[:-1]} ({in_words(module)})'
        raise StructureError(f'attention of the state dict cannot replace {what}: {error}') from error
    if conv is not module:
        attention.to_empty(device=module.value.weight.device)
    with contextlib.suppress(StructureError):  # when it loads its entries, it raises this again
        heads = attention.structure_in(state_dict, prefix)
        if heads is not None:  # some are gone
            attention.take_structure(heads)
    return attention
