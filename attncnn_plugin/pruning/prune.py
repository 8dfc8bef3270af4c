"""Heads removed from any model, with a proof: what is left computes what the model did with their outputs at zero."""

from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from itertools import islice
from typing import Any, Callable, Dict, List, Mapping, Sequence, Union

import torch
from torch import Tensor, nn

from ..attention.evaluation_mode import evaluating
from ..attention.heads import PrunableHeads, keep_entries, not_alone
from ..change import (
    Change,
    LayerChange,
    Successor,
    all_or_nothing,
    check_not_distributed,
    is_plain,
    number_of_parameters,
    within,
)
from ..heads.found import (
    Call,
    FoundHeads,
    Heads,
    Run,
    called,
    find_entries,
    floats_in,
    layer_names,
    masking,
    same_numbers,
    seen_heads,
)
from ..heads.seen import AnyAttention, watching_outputs
from ..heads.sizes import WAYS, Shapes, note_in_configs, number_of_heads, record_of, set_sizes, shapes_of, write_record
from ..transformers.start import random_images
from ..transformers.vision_transformer import find_transformer

Computed = Dict[str, List[Tensor]]


def prunable_heads(model: nn.Module, inputs: Any = None, call: Call = None) -> Dict[str, Heads]:
    """Returns the attention of a model, by the names of the modules in which it runs.

    Args:
        model (nn.Module): Any model.
        inputs (Any, optional): As of :func:`attncnn_plugin.attention_maps`. Defaults to None: layers of this package,
            or, where there are none, the attention of the vision transformer in the model.
        call (Callable, optional): As there.

    Returns:
        dict[str, PrunableHeads | FoundHeads]: With their ``num_heads``.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', depth=2)
        >>> {name: layer.num_heads for name, layer in prunable_heads(model).items()}
        {'blocks.0.attn': 3, 'blocks.1.attn': 3}
    """
    own: Dict[str, Heads] = dict(own_heads(model))
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
    allow_empty: bool = False,
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
        allow_empty (bool): Whether all heads of a layer of this package may go, which leaves it the bias of its output.
            Defaults to False.
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
    layers: Dict[str, Heads] = dict(own_heads(model))
    run = None
    with suppress(ValueError) if layers and inputs is None else nullcontext():  # what the model takes may be unknown
        run = example_run(model, inputs, call)
    if run is not None:
        layers.update(seen_heads(model, run))
    named = layer_names(layers, heads)
    named = {name: layers[name].check_heads(named[name], allow_empty) for name in layers if name in named}
    named = {name: own for name, own in named.items() if own}
    if run is not None:
        find_entries(model, [own for name, own in layers.items() if name in named and isinstance(own, FoundHeads)], run)
    for name in named:
        check_prunable(model, name, layers[name])
    numbers, before = {name: layers[name].num_heads for name in named}, number_of_parameters(model)
    modules = {name: model.get_submodule(getattr(layers[name], 'home', name)) for name in named}
    sizes = {name: number_of_parameters(module) for name, module in modules.items()}
    replaced: Dict[nn.Parameter, Successor] = {}
    difference = None
    compute = partial(computed, model, run, layers, numbers, named)
    expected = {} if run is None else compute(named)
    with all_or_nothing([model]):
        left = dict(named)
        for name, layer in layers.items():
            if name in named and isinstance(layer, PrunableHeads):
                replaced.update(within(name, layer.prune_heads(left.pop(name), allow_empty)))
        for kind in dict.fromkeys(type(model.get_submodule(name)) for name in left):
            chosen = [name for name in left if type(model.get_submodule(name)) is kind]
            of_kind = {name: left.pop(name) for name in chosen}
            replaced.update(_cut_and_compare(model, layers, of_kind, lambda: compare(expected, compute(left))))
        if run is not None:
            difference = compare(expected, compute({}))
    note_in_configs(model)
    changes = []
    for name, gone in named.items():
        words = number_of_heads(numbers[name]), number_of_heads(numbers[name] - len(gone))
        changes.append(LayerChange(name, *words, sizes[name], number_of_parameters(modules[name])))
    return Change(tuple(changes), before, number_of_parameters(model), replaced, difference=difference)


def own_heads(model: nn.Module) -> Dict[str, PrunableHeads]:
    """Returns the layers of this package in a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PrunableHeads)}


def check_prunable(model: nn.Module, name: str, layer: Heads) -> None:
    """Refuses attention whose heads have no entries of their own, or share parameters with another layer.

    Raises:
        TypeError: No entries of single heads are found, or they are in something else than a plain parameter.
        ValueError: A parameter that another layer has too.
    """
    if isinstance(layer, PrunableHeads):
        entries = [f'{name}.{part}'.lstrip('.') for part in layer.head_parameters()]
    else:
        entries = list(layer.owners)
        near = model.get_submodule(name.rpartition('.')[0])
        others = [key for key, own in near.named_parameters() if not is_plain(own) or not own.is_floating_point()]
        if not entries or others and not any(dim for dim, _ in layer.owners.values()):
            kinds = f' {others[0]} is quantized or sharded: prune before that.' if others else ''
            raise TypeError(
                f'heads of {name} cannot be removed: no parameters near it have entries of single heads, so that heads '
                f'share all of them, or their gradients cannot be computed.{kinds}'
            )
        named = dict(model.named_parameters())
        layout = {key: (dim, len(own)) for key, (dim, own) in layer.owners.items() if key in named}
        reason = not_alone(model, layout)
        if reason is not None:
            raise TypeError(f'heads of {name} cannot be removed: {reason}')
    module = model.get_submodule(name)
    names: Dict[nn.Parameter, List[str]] = {}
    places = sum(other is module for _, other in model.named_modules(remove_duplicate=False))
    for own, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(own)
    for found in names.values():
        if len(found) > places and set(found) & set(entries):
            raise ValueError(
                f'heads of {name} cannot be removed: {" and ".join(found)} are one parameter; give each its own'
            )


def _cut_and_compare(
    model: nn.Module, layers: Mapping[str, Heads], gone: Mapping[str, Sequence[int]], check: Callable[[], Any]
) -> Dict[nn.Parameter, Successor]:
    """Cuts heads of layers of one kind out, and finds the way in which ``check`` finds nothing wrong with the model."""
    replaced: Dict[nn.Parameter, Successor] = {}
    shapes: Dict[str, Shapes] = {}
    homes: Dict[str, Any] = {}
    for name, heads in gone.items():
        layer: Any = layers[name]
        homes[name] = home = model.get_submodule(layer.home)
        before, kept = shapes_of(home), layer.kept(heads)
        buffers = {key: own for key, own in model.named_buffers() if key in kept}
        replaced.update(keep_entries(model, {key: own for key, own in kept.items() if key not in buffers}))
        for key, buffer in buffers.items():
            path, _, leaf = key.rpartition('.')
            setattr(model.get_submodule(path), leaf, buffer.index_select(*kept[key]))
        after = shapes_of(home)
        shapes[name] = {key: (size, after[key]) for key, size in before.items() if size != after[key]}
    failed: List[str] = []
    records = [record_of(home) or (layers[name].num_heads, 0, 0) for name, home in homes.items()]
    for way in [way for way in WAYS if all(way & before == before for _, _, before in records)]:
        try:
            with all_or_nothing(homes.values()):
                for (name, home), (built, *_) in zip(homes.items(), records):
                    number = layers[name].num_heads - len(gone[name])
                    set_sizes(home, shapes[name], built, layers[name].num_heads, number, way)
                    write_record(home, built, number, way)
                check()
            return replaced
        except Exception as error:  # whatever a forward pass raises for sizes that do not fit
            failed.append(f'{type(error).__name__}: {error}')
    names = ', '.join(gone)
    raise TypeError(
        f'heads of {names} cannot be removed: a {type(model.get_submodule(next(iter(gone)))).__name__} cannot run with '
        f'fewer, or computes something else ({"; ".join(dict.fromkeys(failed))})'
    )


def computed(
    model: nn.Module,
    run: Any,
    layers: Mapping[str, Heads],
    numbers: Mapping[str, int],
    gone: Mapping[str, Sequence[int]],
    masked: Mapping[str, Sequence[int]],
) -> Computed:
    """Returns what a model computes with some heads masked: its output, those of layers, and of heads that stay.

    Args:
        numbers (Mapping[str, int]): The numbers of heads, by layer, before any are cut out.
        gone (Mapping[str, Sequence[int]]): All heads that go.
        masked (Mapping[str, Sequence[int]]): Those that are not cut out yet.
    """
    found: Computed = {}

    def see(name: str, attention: AnyAttention, output: Tensor) -> None:
        heads = list(attention.of_heads(output))
        own = [head for number, head in enumerate(heads) if number not in gone[name] or len(heads) < numbers[name]]
        found.setdefault(f'heads of {attention.name}', []).extend(own)

    def note(key: str, output: Any) -> None:
        found.setdefault(key, []).extend(islice(floats_in(output), 1))

    with evaluating(model), same_numbers(), torch.no_grad(), ExitStack() as stack:
        for name in gone:
            home = model.get_submodule(getattr(layers[name], 'home', name))
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
