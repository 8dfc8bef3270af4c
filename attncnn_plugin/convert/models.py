"""A model's convolutions as attention, and back (C20, Theorem 1; d'Ascoli et al. 2021, arXiv 2106.05795)."""

import dataclasses
import warnings
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Tuple, Union

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from ..attention.evaluation_mode import evaluating
from ..attention.images import ImageAttention
from ..attention.precision import widest_float
from ..attention.window import CONVOLUTIONS, shown
from ..change import (
    PARAMETER_HOOKS,
    Change,
    LayerChange,
    Successor,
    all_or_nothing,
    check_not_distributed,
    number_of_parameters,
    succession,
    undone,
    within,
)
from ..heads.found import floats_in, same_numbers
from ..heads.sizes import FewerHeads, number_of_heads
from .back import ConvFit, nearest_kernel
from .convolutions import computed, convolution_with
from .pixels import OwnConvolution, check_settings, conv_to_mhsa

Named = Mapping[str, Any]  # layers of a model, or what belongs to them, by name
Layers = Union[str, Iterable[str]]


@torch.inference_mode(False)
def convs_to_attention(model: nn.Module, layers: Layers, inputs: Any = None, **settings: Any) -> Change:
    """Turns convolutions of a model into attention that computes the same, in place.

    Either all chosen layers are converted, or, after an error, none is, and nothing has changed. All other parameters
    stay the same objects; the new ones have no gradients yet. A state dict of the result carries its attention: a model
    of the CNN takes it by :func:`attncnn_plugin.follow_state_dict`, and the result takes a state dict of the CNN by
    converting its kernels.

    Args:
        model (nn.Module): Any model of timm, torchvision, mmpretrain or another library.
        layers (str | Iterable[str]): The layers to convert: the name of a convolution, a glob such as
            ``'layer4.*.conv*'``, whose ``*`` stands for dots too and which chooses only convolutions, or several.
        inputs (Any, optional): An example batch, which the model is called with as its only argument, before and after,
            in evaluation mode: the result then says how far the outputs move. Defaults to None, no run.
        **settings (Any): For each layer as of :func:`~attncnn_plugin.convert.conv_to_mhsa`, such as ``alpha=6``.

    Returns:
        Change: The layers before and after, each with its :class:`ConversionReport`; ``print`` shows a table.

    Raises:
        TypeError: A layer cannot be converted, such as a transposed convolution; or the model is wrapped for
            distributed training.
        ValueError: ``layers`` chooses no convolution; a layer is used under two names, shares its weight, or has hooks
            or parametrizations; an argument does not go with a layer; or, with ``inputs``, the model calls a layer by
            another way than as a submodule.
        AttributeError: With ``inputs``, the model reads of a layer what attention does not have.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        >>> report = convs_to_attention(model, '*', inputs=torch.randn(1, 3, 16, 16))
        >>> [layer.name for layer in report.layers], report.drift < 1e-5
        (['0', '3'], True)
    """
    chosen = find_convolutions(model, layers)
    check_replaceable(model, chosen)

    attention, reports = _convert_each(chosen, lambda conv: conv_to_mhsa(conv, **settings))
    return apply(model, attention, reports, None if inputs is None else drift(model, chosen, attention, inputs))


@torch.inference_mode(False)
def attention_to_convs(model: nn.Module, tolerance: float = 1e-6) -> Change:
    """Turns all attention of :func:`~attncnn_plugin.convert.convs_to_attention` back into convolutions, in place.

    Either all such layers of a model are convolutions, up to the tolerance, and are converted; or, after an error, none
    is, and nothing has changed. Attention that was not trained since gives back the same kernels.

    Args:
        model (nn.Module): The model.
        tolerance (float): The largest error of an output of a layer, for inputs of norm 1, see
            :class:`~attncnn_plugin.convert.ConvFit`. Defaults to 1e-6.

    Returns:
        Change: The layers before and after, each with its :class:`ConvFit`.

    Raises:
        ValueError: There is no such layer inside; one is no convolution up to the tolerance, or is used under two
            names, shares a parameter, or has hooks or parametrizations.
        RuntimeError: A linear map of a layer is more than its weight and bias, for instance an adapter.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> kernel, report = model[0].weight, convs_to_attention(model, '0')
        >>> report = attention_to_convs(model)
        >>> bool((model[0].weight == kernel).all())
        True
    """
    modules = model.named_modules(remove_duplicate=False)
    layers = {name: module for name, module in modules if name and isinstance(module, ImageAttention)}
    if not layers:
        raise ValueError(
            f'model is a {type(model).__name__} without attention inside that was a convolution: there is nothing to '
            'convert (mhsa_to_conv converts a bare one)'
        )
    check_replaceable(model, layers)
    convs, fits = _convert_each(layers, _back)
    too_far = {name: fit.bound for name, fit in fits.items() if not fit.bound <= tolerance}
    if too_far:
        worst = max(too_far, key=lambda name: too_far[name])
        raise ValueError(
            f'{len(too_far)} of {len(layers)} layers are no convolution any more, of the class that they had, for '
            f'tolerance={tolerance:g}: {", ".join(too_far)}; the bound of {worst}, a {type(convs[worst]).__name__}, '
            f'is {too_far[worst]:.3g}; mhsa_to_conv turns a layer into the nearest plain convolution'
        )
    return apply(model, convs, fits)


def _back(layer: ImageAttention) -> Tuple[Any, ConvFit]:
    kernel, fit = nearest_kernel(layer, layer.window)
    own: Any = layer.from_conv or OwnConvolution(convolution_with(kernel))
    conv, lost = own.back(layer, kernel)
    return conv, dataclasses.replace(fit, bound=fit.bound + lost)


def _convert_each(layers: Named, convert: Callable[[Any], Tuple[Any, Any]]) -> Tuple[Named, Named]:
    """Converts layers, by name; returns the new ones and their reports. An error names the layer."""
    converted: Dict[str, Any] = {}
    reports: Dict[str, Any] = {}
    for name, layer in layers.items():
        try:
            converted[name], reports[name] = convert(layer)
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f'{name} cannot be converted: {error}') from error
    return converted, reports


@torch.inference_mode(False)
@torch.no_grad()
def apply(
    model: nn.Module, structures: Named, reports: Named = MappingProxyType({}), drift: Optional[float] = None
) -> Change:
    """Gives modules of a model, by name, other structures; after an error nothing has changed.

    Args:
        model (nn.Module): The model.
        structures (Mapping[str, Any]): By name, the module that takes a module's place, or what its ``take_structure``
            takes, see :func:`attncnn_plugin.structure.plan`.
        reports (Mapping[str, Any]): Of the new modules, by name. Defaults to none.
        drift (float, optional): Of the model. Defaults to None.
    """
    layers: List[LayerChange] = []
    replaced: Dict[nn.Parameter, Successor] = {}
    before = number_of_parameters(model)
    with all_or_nothing([model]):
        for name, structure in structures.items():
            module: Any = model.get_submodule(name)
            new = module
            fewer = structure if isinstance(structure, FewerHeads) else None
            what = in_words(module) if fewer is None else number_of_heads(fewer.before)
            size, change = number_of_parameters(module), None
            if isinstance(structure, nn.Module):
                new = structure
                replaced.update(within(name, successors(module, new)))
                model.set_submodule(name, new)
            elif fewer is not None:
                fewer.apply(module)
            else:
                change = module.take_structure(structure)
            if change is None:
                now = in_words(new) if fewer is None else number_of_heads(fewer.left)
                layers.append(LayerChange(name, what, now, size, number_of_parameters(new), reports.get(name)))
            else:
                layers += [dataclasses.replace(own, name=f'{name}.{own.name}'.lstrip('.')) for own in change.layers]
                replaced.update(within(name, change.replaced))
    return Change(tuple(layers), before, number_of_parameters(model), replaced, drift, [*model.parameters()])


def in_words(layer: Any) -> str:
    """Describes a layer: a convolution by its kernel, attention by its heads, any other by its class."""
    if isinstance(layer, CONVOLUTIONS):
        kernel, stride = (own if isinstance(own, tuple) else (own,) for own in (layer.kernel_size, layer.stride))
        name = f'{"×".join(map(str, kernel))} kernel'
        return name if set(stride) == {1} else f'{name}, stride {"×".join(map(str, stride))}'
    heads = getattr(layer, 'num_heads', None)
    return type(layer).__name__ if heads is None else number_of_heads(heads)


def successors(layer: nn.Module, new_layer: nn.Module) -> Dict[nn.Parameter, Successor]:
    """Returns what replaces the parameters of a convolution that became attention, or of such attention.

    The weight of the values is that of the convolution, as long as both have the same entries, and with it positions,
    queries and keys come and go.
    """
    old, new = dict(layer.named_parameters()), dict(new_layer.named_parameters())
    before, after = ('' if isinstance(own, CONVOLUTIONS) else 'value.' for own in (layer, new_layer))
    weight, shape = new[f'{after}weight'], new[f'{after}weight'].shape

    def reorder(x: Tensor) -> Tensor:
        entries = x.unflatten(1, (-1, shape[1])) if before else x.flatten(2)  # of heads or a kernel, (C_out, …, …)
        return entries.transpose(1, 2).reshape(shape)

    replaced: Dict[nn.Parameter, Successor] = {}
    if f'{after}bias' in new:
        bias, of_bias = new.pop(f'{after}bias'), old.pop(f'{before}bias')
        replaced[of_bias] = succession(of_bias, {f'{after}bias': bias}, bias, lambda x: x)
    source = old.pop(f'{before}weight')
    replaced.update((parameter, succession(parameter, {})) for parameter in old.values())
    # An heir has the entries of the old weight, so that their momentum is its own.
    same = before != after and source.numel() == weight.numel() and not weight.is_meta
    same = same and torch.equal(reorder(source.detach()), weight.detach())
    heirs = new if after else {'weight': weight}  # other parameters of a convolution have attributes of their own
    own = succession(source, heirs, *((weight, reorder) if same else ()))
    replaced[source] = dataclasses.replace(own, parameters=new)
    return replaced


def find_convolutions(model: nn.Module, layers: Layers) -> Dict[str, _ConvNd]:
    """Returns the convolutions of a model, by name, that names or globs choose, also transposed ones.

    It raises ``ValueError`` for what chooses none.
    """
    modules = model.named_modules(remove_duplicate=False)
    convolutions = {name: module for name, module in modules if name and isinstance(module, _ConvNd)}
    patterns: List[Any] = [*layers] if isinstance(layers, Iterable) and not isinstance(layers, str) else [layers]
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f'layers={shown(layers)} must be names, globs such as "layer4.*.conv*", at least one')
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in convolutions):
            some = ', '.join([*convolutions][:6]) + (' …' if len(convolutions) > 6 else '')
            raise ValueError(
                f'layers={pattern!r} matches none of the convolutions in the model, a {type(model).__name__}: '
                f"{some or 'conv_to_mhsa converts a bare one'}; a glob such as 'layer4.*' stands for all that are "
                'inside'
            )
    return {name: own for name, own in convolutions.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}


def check_convertible(model: nn.Module, layers: Layers, settings: Mapping[str, Any]) -> List[str]:
    """Refuses what :func:`convs_to_attention` would refuse; returns the names of the layers."""
    chosen = find_convolutions(model, layers)
    check_replaceable(model, chosen)
    _convert_each(chosen, lambda conv: (check_settings(computed(conv), **settings), None))
    return list(chosen)


def check_replaceable(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Refuses layers of a model, by name, that cannot be replaced so that everything else stays as it is."""
    check_not_distributed(model)
    places: Dict[nn.Parameter, List[str]] = {}  # their names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(parameter, []).append(name)
    for name, layer in layers.items():
        if any(map(is_lazy, layer.parameters())):
            raise ValueError(f'{name} is a {type(layer).__name__} without weights yet: run the model on an input first')
        for part in layer.modules():  # what would be lost with the layer, or changes what it computes
            hooks = any(value for key, value in vars(part).items() if key.endswith('_hooks'))
            if hooks or is_parametrized(part) or {'forward', '_conv_forward', 'weight', 'bias'} & vars(part).keys():
                raise ValueError(
                    f'{name} has hooks, parametrizations, a forward of its own or a weight that is no parameter: '
                    'remove them first, by torch.nn.utils.parametrize.remove_parametrizations for instance'
                )
        for key, parameter in layer.named_parameters():
            if any(getattr(parameter, hooks) for hooks in PARAMETER_HOOKS):
                raise ValueError(f'{name}.{key} has hooks: remove them first')
            if len(places[parameter]) > 1:
                raise ValueError(
                    f'{name} shares a parameter, {" and ".join(places[parameter])} are one: give each place its own, '
                    'by copy.deepcopy for instance, or leave the layer out'
                )


def drift(
    model: nn.Module, layers: Mapping[str, nn.Module], replacements: Mapping[str, nn.Module], inputs: Any
) -> Optional[float]:
    """Runs a model in evaluation mode, first as it is, then with some layers, by name, replaced, and puts it back.

    Returns:
        float | None: ‖Y − Y'‖/‖Y‖ of the model's outputs before and after; None, with a warning, where these have no
        floating numbers or other shapes than before.

    Raises:
        AttributeError: The model reads of a layer what attention does not have.
        ValueError: A layer is still called after it was replaced.
    """

    def refuse(name: str, module: nn.Module, inputs: Any) -> None:
        raise ValueError(
            f'{name} is still called after attention has replaced it: the model holds it in another way than as a '
            'submodule, in a plain list for instance, so it cannot be converted'
        )

    kept = undone([model, *replacements.values()], model.buffers())
    with kept, evaluating(model), same_numbers(), torch.no_grad():
        before = list(floats_in(model(inputs)))
        for name, layer in layers.items():
            layer.register_forward_pre_hook(partial(refuse, name))
            model.set_submodule(name, replacements[name])
        after = list(floats_in(model(inputs)))
    if not before or [own.shape for own in before] != [own.shape for own in after]:
        warnings.warn(
            'the drift of the model is not known: its outputs have no floating numbers, or other shapes than before, '
            "as a detector's boxes can have",
            stacklevel=3,
        )
        return None
    old, new = (torch.cat([own.to('cpu', widest_float(own)).flatten() for own in each]) for each in (before, after))
    error, norm = (old - new).norm().item(), old.norm().item()
    return error / norm if norm else float(error > 0)
