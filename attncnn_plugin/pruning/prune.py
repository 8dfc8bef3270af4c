"""Heads removed from any model, with a proof: what is left computes what the model did with their outputs at zero."""

from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Union

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..attention.evaluation_mode import evaluating
from ..attention.precision import full_precision
from ..change import (
    Change,
    LayerChange,
    Successor,
    all_or_nothing,
    check_not_distributed,
    is_plain,
    number_of_parameters,
)
from ..heads.found import (
    Call,
    Heads,
    Run,
    called,
    find_entries,
    floats_in,
    layer_names,
    masking,
    own_heads,
    same_numbers,
    seen_heads,
)
from ..heads.seen import AnyAttention, watching_outputs
from ..heads.sizes import (
    WAYS,
    mark,
    note_in_configs,
    number_of_heads,
    record_of,
    set_sizes,
    shapes_of,
    spare,
    write_record,
)
from ..transformers.start import random_images
from ..transformers.vision_transformer import find_transformer

Computed = Dict[str, List[Tensor]]
HALVES = torch.float16, torch.bfloat16


def prunable_heads(model: nn.Module, inputs: Any = None, call: Call = None) -> Dict[str, Heads]:
    """Returns the attention of a model, by the names of the modules in which it runs.

    Args:
        model (nn.Module): Any model.
        inputs (Any, optional): As of :func:`attncnn_plugin.attention_maps`. Defaults to None: layers of this package,
            or, where there are none, the attention of the vision transformer in the model.
        call (Callable, optional): As there.

    Returns:
        dict[str, Heads]: With their ``num_heads``.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', depth=2)
        >>> {name: layer.num_heads for name, layer in prunable_heads(model).items()}
        {'blocks.0.attn': 3, 'blocks.1.attn': 3}
    """
    own = own_heads(model)
    return own if own and inputs is None else {**own, **seen_heads(model, example_run(model, inputs, call))}


def example_run(model: nn.Module, inputs: Any = None, call: Call = None) -> Run:
    """Returns a function that runs a model on inputs, or the vision transformer in it on an image."""
    if inputs is not None:
        return lambda: called(model, inputs, call)
    try:
        network = find_transformer(model)
    except ValueError as error:
        raise ValueError(f'what a {type(model).__name__} takes is unknown: give inputs, such as some images') from error
    images = random_images(network)[:1]
    return lambda: network.module(images)


@torch.inference_mode(False)
def prune_heads(
    model: nn.Module,
    heads: Mapping[Union[str, int], Sequence[int]],
    inputs: Any = None,
    call: Call = None,
) -> Change:
    """Removes heads from a model, in place: it then computes what it did with their outputs at zero.

    The model is any with softmax attention that runs as it was written, whatever its class. Which entries of which
    parameter belong to a head is found by gradients. They are cut out, the model runs, and its outputs, those of the
    layers and of the heads that are left are compared with those of the whole model with a mask. Where they differ,
    nothing has changed. Linear maps to and from the heads shrink, tables of relative positions lose their columns, and
    the fused kernels stay. A state dict carries the structure: networks of this package take it as they load it, all
    others by :func:`attncnn_plugin.follow_state_dict`.

    Args:
        model (nn.Module): The model.
        heads (Mapping[str | int, Sequence[int]]): By the name of the attention, or the number of its block, the heads
            to remove, counted among those there are now.
        inputs (Any, optional): What the model takes, as of :func:`attncnn_plugin.attention_maps`. Defaults to None: an
            image of random numbers, of the size that a vision transformer of timm, mmpretrain, Hugging Face
            transformers or torchvision says. Layers of this package need none, and are then not compared.
        call (Callable, optional): As there.

    Returns:
        Change: The layers with their heads before and after, what took the place of each parameter, for
        :func:`replace_parameters`, and the largest difference, relative to the largest output.

    Raises:
        TypeError: A model that is wrapped for distributed training; attention whose heads share something, or cannot
            be without one; or weights that something computes, or that are quantized.
        ValueError: A layer or a head that is not there, all heads of a layer; something that layers share; or a hook or
            an attribute of a parameter that may not fit the new one. Nothing is removed after an error.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', depth=2)
        >>> change = prune_heads(model, {'blocks.0.attn': [0, 2]})
        >>> print(change.layers[0].before, change.layers[0].after, change.difference < 1e-5)
        3 heads 1 head True
        >>> model.blocks[0].attn.qkv
        Linear(in_features=192, out_features=192, bias=True)
        >>> fresh = timm.create_model('vit_tiny_patch16_224', depth=2)
        >>> import attncnn_plugin
        >>> bool(attncnn_plugin.follow_state_dict(fresh, model.state_dict()))
        True
        >>> fresh.load_state_dict(model.state_dict())
        <All keys matched successfully>
        >>> fresh.blocks[0].attn.num_heads
        1
    """
    check_not_distributed(model)
    with in_float32(model) as is_half:
        try:
            return _pruned(model, heads, as_float32(inputs) if is_half else inputs, call)
        except RuntimeError as error:
            if not is_half:
                raise
            raise RuntimeError(f'in float32, in which heads are removed, the model cannot run: {error}') from error


@contextmanager
def in_float32(model: nn.Module) -> Iterator[bool]:
    """Has the weights of a model of half precision in float32 inside; yields whether it is one.

    Rounding errors of half precision would hide what is wrong, such as another scale of the scores.
    """
    halves = {name: own for name, own in _tensors(model).items() if own.dtype in HALVES}
    dtypes = {name: own.dtype for name, own in halves.items()}
    for own in halves.values():
        _cast(own, torch.float32)
    try:
        yield bool(halves)
    finally:
        new = _tensors(model)
        for name, dtype in dtypes.items():
            for own in {halves[name], new[name]}:
                _cast(own, dtype)


def _tensors(model: nn.Module) -> Dict[str, Tensor]:
    """Returns the parameters and buffers of a model, by name."""
    return {name: own for name, own in (*model.named_parameters(), *model.named_buffers()) if is_plain(own)}


@torch.no_grad()
def _cast(own: Tensor, dtype: torch.dtype) -> None:
    """Casts the values and the gradient of a tensor, which stays the same object."""
    gradient, own.grad = own.grad, None
    own.data = own.data.to(dtype)
    own.grad = None if gradient is None else gradient.to(dtype)


def as_float32(inputs: Any) -> Any:
    """Casts the tensors of half precision among inputs to float32."""
    if isinstance(inputs, Tensor):
        return inputs.float() if inputs.dtype in HALVES else inputs
    if isinstance(inputs, Mapping):
        return {name: as_float32(own) for name, own in inputs.items()}
    return [as_float32(own) for own in inputs] if isinstance(inputs, (list, tuple)) else inputs


def _pruned(model: nn.Module, heads: Mapping[Union[str, int], Sequence[int]], inputs: Any, call: Call) -> Change:
    layers, run = own_heads(model), None
    with suppress(ValueError) if layers and inputs is None else nullcontext():  # what the model takes may be unknown
        run = example_run(model, inputs, call)
    if run is not None:
        layers.update(seen_heads(model, run))
    chosen = layer_names(layers, heads)
    named = {name: chosen[name] for name in layers if chosen.get(name)}
    for name, gone in named.items():
        if len(gone) == layers[name].num_heads:
            raise ValueError(f'heads={gone} are all heads of {name or "the layer"}: keep one')
    if run is not None:
        find_entries(model, [layers[name] for name in named], run)
    for name in named:
        check_prunable(model, name, layers[name])
    before = number_of_parameters(model)
    homes = {name: model.get_submodule(layers[name].home) for name in named}
    sizes = {name: number_of_parameters(home) for name, home in homes.items()}
    replaced: Dict[nn.Parameter, Successor] = {}
    left, difference = dict(named), None
    compute = partial(computed, model, run, layers, named)
    expected = {} if run is None else compute(named)

    def check() -> None:
        nonlocal difference
        difference = None if run is None else compare(expected, compute(left))

    kinds = {name: type(model.get_submodule(name)) for name in named}
    with all_or_nothing([model]):
        for kind in dict.fromkeys(kinds.values()):
            of_kind = {name: left.pop(name) for name in named if kinds[name] is kind}
            replaced.update(_cut_and_compare(model, layers, of_kind, check))
    note_in_configs(model)
    changes = []
    for name, gone in named.items():
        number = layers[name].num_heads
        words = number_of_heads(number), number_of_heads(number - len(gone))
        changes.append(LayerChange(name, *words, sizes[name], number_of_parameters(homes[name])))
    return Change(tuple(changes), before, number_of_parameters(model), replaced, difference=difference)


def check_prunable(model: nn.Module, name: str, layer: Heads) -> None:
    """Refuses attention whose heads have no entries of their own, or share parameters with another layer.

    Raises:
        TypeError: No entries of single heads are found, or they are in something else than a plain parameter.
        ValueError: A parameter that another layer has too.
    """
    named, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    near = model.get_submodule(name.rpartition('.')[0])
    others = [key for key, own in near.named_parameters() if not is_plain(own) or not own.is_floating_point()]
    if not layer.owners or others and not any(dim for dim, _ in layer.owners.values()):
        kinds = f' {others[0]} is quantized or sharded: prune before that.' if others else ''
        raise TypeError(
            f'heads of {name} cannot be removed: no parameters near it have entries of single heads, so that heads '
            f'share all of them, or their gradients cannot be computed.{kinds}'
        )
    for key, (dim, owners) in layer.owners.items():
        reason = None if key in buffers else not_alone(named.get(key), dim, len(owners))
        if reason is not None:
            raise TypeError(f'heads of {name or "the layer"} cannot be removed: {key} {reason}')
    module = model.get_submodule(name)
    names: Dict[nn.Parameter, List[str]] = {}
    places = sum(other is module for _, other in model.named_modules(remove_duplicate=False))
    for own, parameter in named.items():
        names.setdefault(parameter, []).append(own)
    for found in names.values():
        if len(found) > places and set(found) & layer.owners.keys():
            raise ValueError(
                f'heads of {name} cannot be removed: {" and ".join(found)} are one parameter; give each its own'
            )


def not_alone(own: Optional[Tensor], dim: int, entries: int) -> Optional[str]:
    """Says in words why entries cannot be removed from a parameter, of so many in a dimension; None if they can."""
    if own is None:
        return (
            'is no parameter of its own: remove the parametrization or the mask first, merge an adapter '
            "(merge_and_unload() of peft's), or prune before you quantize"
        )
    if not is_plain(own) or not own.is_floating_point():
        kind = f'{type(own).__name__} of {own.dtype}'
        return f'is a {kind}, not a plain floating-point parameter: prune before you quantize or shard'
    if own.ndim <= dim or own.shape[dim] != entries:
        return f'has shape {tuple(own.shape)}, but {entries} entries are expected in dimension {dim}'
    return None


def _cut_and_compare(
    model: nn.Module, layers: Mapping[str, Heads], gone: Mapping[str, Sequence[int]], check: Callable[[], None]
) -> Dict[nn.Parameter, Successor]:
    """Cuts heads of layers of one kind out, and finds the way in which ``check`` finds nothing wrong with the model."""
    replaced: Dict[nn.Parameter, Successor] = {}
    shapes: Dict[str, Dict[str, Any]] = {}
    homes = {name: model.get_submodule(layers[name].home) for name in gone}
    for name, heads in gone.items():
        before = shapes_of(homes[name])
        replaced.update(layers[name].cut(heads))
        after = shapes_of(homes[name])
        shapes[name] = {key: (size, after[key]) for key, size in before.items() if size != after[key]}
    failed: List[str] = []
    records = {name: record_of(home) or (layers[name].num_heads, 0, 0) for name, home in homes.items()}
    others = {name: home for name, home in homes.items() if layers[name].layer is None}
    spared = {own for record in records.values() for own in record[3:]}
    for way in [way for way in WAYS if all(way & record[2] == record[2] for record in records.values())]:
        try:
            with all_or_nothing(homes.values()):
                left, taken = {name: layers[name].num_heads - len(gone[name]) for name in others}, []
                for name, home in others.items():
                    numbers = records[name][0], layers[name].num_heads, left[name]
                    taken += set_sizes(home, shapes[name], *numbers, way, spared)
                check()
                marks = {*spared, *spare(taken, others.values(), check)}
                for name, home in others.items():
                    left_out = map(mark, shapes[name].keys() - home.state_dict().keys())
                    write_record(home, records[name][0], left[name], way, marks.union(left_out))
            return replaced
        except Exception as error:  # whatever a forward pass raises for sizes that do not fit
            failed.append(f'{type(error).__name__}: {error}')
    module = model.get_submodule(next(iter(gone)))
    why = {_hint(layers[name], heads, homes[name]) or '; '.join(dict.fromkeys(failed)) for name, heads in gone.items()}
    raise TypeError(
        f'heads of {", ".join(gone)} cannot be removed: a {type(module).__name__} cannot run with fewer, or computes '
        f'something else ({"; ".join(why)}). Heads that a map mixes, such as talking heads, can only be hidden: use '
        'masked_heads'
    )


def _hint(layer: Heads, gone: Sequence[int], home: nn.Module) -> str:
    """Says in words what is known to stand in the way of a layer without some heads."""
    for name, (_, owners) in layer.owners.items():
        for group in owners[owners.sum(1) > 1].unique(dim=0):
            shared = group.nonzero().flatten().tolist()
            if len(shared) < layer.num_heads and 0 < len({*shared} & {*gone}) < len(shared):
                return f'heads {shared} share entries of {name}: remove all of them or none'
    computed = [name for name, own in home.named_modules() if own._forward_pre_hooks or is_parametrized(own)]
    if not computed and not any(dim for dim, _ in layer.owners.values()):
        return 'a norm, or something else, mixes the outputs of heads before a map takes them'
    if not computed:
        return ''
    what = f'{computed[0] or "the layer"} has a parametrization or a hook, which may compute its weights as it runs'
    return f'{what}: remove that first'


def computed(
    model: nn.Module,
    run: Any,
    layers: Mapping[str, Heads],
    gone: Mapping[str, Sequence[int]],
    masked: Mapping[str, Sequence[int]],
) -> Computed:
    """Returns what a model computes with some heads masked: its output, those of layers, and of heads that stay.

    Args:
        gone (Mapping[str, Sequence[int]]): All heads that go.
        masked (Mapping[str, Sequence[int]]): Those that are not cut out yet.
    """
    found: Computed = {}

    def see(name: str, attention: AnyAttention, output: Tensor) -> None:
        heads = list(attention.of_heads(output))
        cut = len(heads) < layers[name].num_heads
        own = [head for number, head in enumerate(heads) if cut or number not in gone[name]]
        found.setdefault(f'heads of {attention.name}', []).extend(own)

    def note(key: str, output: Any) -> None:
        found.setdefault(key, []).extend(islice(floats_in(output), 1))

    device = next(model.parameters()).device.type
    with evaluating(model), same_numbers(), torch.no_grad(), full_precision(device), ExitStack() as stack:
        for name in gone:
            home = model.get_submodule(layers[name].home)
            hook = lambda module, args, output, name=name: note(f'the output of {name}', output)  # noqa: E731
            stack.enter_context(home.register_forward_hook(hook))
        stack.enter_context(masking(model, layers, masked))
        stack.enter_context(watching_outputs(model, see, lambda name: name.partition('#')[0] in gone))
        note('the output', run())
    return found


def compare(expected: Computed, found: Computed) -> float:
    """Returns the largest difference between what two models computed, relative to the largest entry of each.

    Raises:
        ValueError: It is larger than rounding errors.
    """
    largest = 0.0
    for key, tensors in expected.items():
        if [own.shape for own in tensors] != [own.shape for own in found.get(key, [])]:
            raise ValueError(f'{key} has other shapes')
        for own, other in zip(tensors, found.get(key, [])):
            if own.numel():
                scale = float(own[own.isfinite()].abs().amax()) if own.isfinite().any() else 1.0
                same = (own == other) | own.isnan() & other.isnan()
                difference = float((own - other).double().abs().masked_fill(same, 0).amax()) / (scale or 1.0)
                if not difference <= torch.finfo(own.dtype).eps ** 0.6:
                    raise ValueError(f'{key} differs by {difference:.2g} of its largest entry')
                largest = max(largest, difference)
    return largest
