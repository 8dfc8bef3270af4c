"""Brings any model to the structure of a state dict, by one verb."""

import contextlib
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Union

import torch
from safetensors.torch import load_file
from torch import nn

from .attention.images import ImageAttention
from .attention.state_dicts import Restructurable, StructureError, read_extra_state, try_loading
from .attention.window import CONVOLUTIONS, shown
from .change import Change, undone
from .checkpoint_files import load_from_local
from .convert.convolutions import computed
from .convert.models import apply, in_words
from .convert.pixels import check_settings, new_attention
from .heads.sizes import RECORD, FewerHeads, note_in_configs

# Of a state dict, in a checkpoint.
HOLDERS = 'state_dict', 'model', 'model_state_dict', 'module', 'net', 'state_dict_ema', 'model_ema', 'ema', 'teacher'
WRAPPERS = 'module.', '_orig_mod.', 'model.', 'net.'  # before the names of a model
COUNTS = {'n_averaged', 'steps'}  # beside them, of averages of PyTorch and mmengine


def follow_state_dict(model: nn.Module, state_dict: Union[Mapping[str, Any], str, Path], strict: bool = True) -> Change:
    """Brings a model to the structure of a state dict that you are about to load; the values are not loaded.

    A convolution becomes attention where the state dict has that (:func:`attncnn_plugin.convert.convs_to_attention`).
    The attention of other libraries' vision transformers gets as many heads as the state dict has. Modules of
    this package take the structure that they would take by themselves while they load it. All other modules and
    parameters stay the same objects. Call it before you build the optimizer, and first of all where a network of this
    package is part of another library's model: PyTorch loads what fits before it refuses the rest, and the part then
    keeps the structure of what it has loaded.

    Args:
        model (nn.Module): Any model, not wrapped for distributed training.
        state_dict (Mapping[str, Tensor] | str | Path): With the model's names; a checkpoint that holds such a dict, as
            of timm, Lightning, mmengine or ``nn.DataParallel``; or a file of one, of torch or safetensors, or a folder
            of files.
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
    state_dict = weights_in(state_dict, model)
    structures = plan(model, state_dict)
    if strict:
        with undone([model, *(own for own in structures.values() if isinstance(own, nn.Module))]):
            apply(model, structures)
            try_loading(model, state_dict, strict)
    change = apply(model, structures)
    note_in_configs(model)
    return change


@torch.inference_mode(False)
@torch.no_grad()
def plan(model: nn.Module, state_dict: Mapping[str, Any], prefix: str = '') -> Dict[str, Any]:
    """Returns the structures that modules of a model, by name, need for a state dict; nothing changes yet.

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
        structure = attention_in(module, state_dict, inside) if name and f'{inside}value.weight' in state_dict else None
        if structure is None and isinstance(module, Restructurable):
            with contextlib.suppress(StructureError):  # the loading refuses it, and says why
                structure = module.structure_in(state_dict, inside)
        if structure is None and (f'{inside}{RECORD}' in state_dict or RECORD in module._buffers):
            structure = FewerHeads.of(module, state_dict, inside)
        if structure is not None:
            structures[name] = structure
    return structures


def weights_in(source: Any, model: nn.Module) -> Mapping[str, Any]:
    """Returns the state dict in a checkpoint, or its averages, which have the same structure, by the model's names.

    Raises:
        FileNotFoundError: There are no weights in a folder.
        StructureError: There is no state dict in it.
    """
    if isinstance(source, (str, Path)):
        path = Path(source)
        files = [path] if not path.is_dir() else [*path.glob('*.safetensors')] or [*path.glob('pytorch_model*.bin')]
        if not files:
            raise FileNotFoundError(f'{path} has no *.safetensors and no pytorch_model*.bin')
        parts = [load_file(own) if own.suffix == '.safetensors' else load_from_local(str(own)) for own in files]
        source = parts[0] if len(parts) == 1 else {name: own for part in parts for name, own in part.items()}
    if not isinstance(source, Mapping):
        raise StructureError(f'state_dict={shown(source)} is no checkpoint: give a state dict, or what holds one')
    for name in HOLDERS:
        if isinstance(source.get(name), Mapping):
            return weights_in(source[name], model)
    names = [name for name in source if name not in COUNTS]
    for prefix in WRAPPERS:
        if names and all(str(name).startswith(prefix) for name in names) and not hasattr(model, prefix[:-1]):
            return weights_in({name[len(prefix) :]: source[name] for name in names}, model)
    return source


def attention_in(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> Optional[ImageAttention]:
    """Returns the attention that a state dict has in the place of a convolution, or None.

    Raises:
        StructureError: The convolution cannot be converted.
    """
    settings = read_extra_state(state_dict, prefix) if isinstance(module, CONVOLUTIONS) else None
    if settings is None:
        return None
    built = settings.pop('num_heads', None)
    try:
        plain = computed(module)
        attention = new_attention(module, plain, check_settings(plain, **settings))
        if built != attention.num_heads:
            raise ValueError(f'num_heads={built} must be {attention.num_heads}, the positions of the kernel')
    except (TypeError, ValueError) as error:
        what = f'{prefix[:-1]} ({in_words(module)})'
        raise StructureError(f'attention of the state dict cannot replace {what}: {error}') from error
    with contextlib.suppress(StructureError):  # when it loads its entries, it raises this again
        heads = attention.structure_in(state_dict, prefix)
        if heads is not None:  # some are gone
            attention.take_structure(heads)
    return attention
