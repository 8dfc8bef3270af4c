"""The one way in which a model takes the structure of a state dict."""

import copy
from collections import OrderedDict
from typing import Any, Mapping

import torch
from torch import Tensor, nn

from .attention.structure import Restructurable, StructureError, remember_structure, structure_kept_on_error
from .convert.structures import attention_in
from .transformers.heads import follow_heads


@torch.no_grad()
def follow_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor], strict: bool = True) -> bool:
    """Brings a model to the structure of a state dict that you are about to load; the values are not loaded.

    A convolution becomes attention where the state dict has that (:func:`attncnn_plugin.convert.convs_to_attention`).
    The attention of timm's and mmpretrain's vision transformers gets as many heads as the state dict has
    (:func:`attncnn_plugin.pruning.prune_heads`). Modules of this package take the structure that they would take by
    themselves while they load it. All other modules and parameters stay the same objects. Call it before you build the
    optimizer, which would not have the parameters of the attention.

    Args:
        model (nn.Module): Any model, not wrapped for distributed training.
        state_dict (Mapping[str, Tensor]): With the model's names.
        strict (bool): Whether to refuse a state dict that ``load_state_dict`` would refuse once the model has its
            structure. Otherwise entries that are missing, too many or of another shape are left to the loading, and
            modules of this package whose entries no structure explains. Defaults to True.

    Returns:
        bool: Whether a module has changed.

    Raises:
        StructureError: The state dict does not fit: attention cannot be in the place that it has there, or, with
            ``strict``, ``load_state_dict`` would refuse it. Nothing has changed then.

    Examples:
        >>> from attncnn_plugin.convert import convs_to_attention
        >>> trained, fresh = (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()) for _ in range(2))
        >>> print(convs_to_attention(trained, '*').layers[0].name)
        0
        >>> follow_state_dict(fresh, trained.state_dict())
        True
        >>> fresh.load_state_dict(trained.state_dict())
        <All keys matched successfully>
    """
    with structure_kept_on_error(model):
        changed = take_structures(model, state_dict, strict=strict)
        if strict:
            _check_loading(model, state_dict)
    return changed


def take_structures(module: nn.Module, state_dict: Mapping[str, Any], prefix: str = '', strict: bool = False) -> bool:
    """Gives a module and all that is in it the structures of a state dict.

    Args:
        module (nn.Module): Any module; it stays itself, what it consists of can be replaced.
        state_dict (Mapping[str, Tensor]): With the module's names, each after ``prefix``.
        prefix (str): Name of the module with a dot. Defaults to empty.
        strict (bool): Whether to refuse entries that no structure of a module of this package explains, which the
            loading refuses anyway. Defaults to False.

    Returns:
        bool: Whether a module has changed.

    Raises:
        StructureError: A module cannot have its structure. Others have changed by then.
    """
    changed = False
    if isinstance(module, Restructurable):
        try:
            changed = module.follow(state_dict, prefix)  # type: ignore[arg-type]
        except StructureError:
            if strict:
                raise
    else:
        changed = follow_heads(module, state_dict, prefix)
    for name, child in module.named_children():
        path = f'{prefix}{name}.'
        attention = attention_in(child, state_dict, path)
        if attention is not None:
            setattr(module, name, attention)
            changed = True
        elif take_structures(child, state_dict, path, strict):
            changed = True
    return changed


def _check_loading(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Loads a state dict without copying any value, and gives the model back what it had.

    Raises:
        StructureError: ``load_state_dict`` refuses it.
    """
    entries: Any = OrderedDict(
        (name, value.detach() if isinstance(value, Tensor) else value) for name, value in state_dict.items()
    )
    if hasattr(state_dict, '_metadata'):
        entries._metadata = copy.deepcopy(state_dict._metadata)  # PyTorch writes in it that tensors are assigned
    give_back = remember_structure(model)
    try:
        model.load_state_dict(entries, assign=True)
    except RuntimeError as error:
        raise StructureError(str(error)) from error
    finally:
        give_back()
