"""Layers of a model by name: which ones are meant, whether they can be replaced, and their replacement."""

from fnmatch import fnmatchcase
from typing import Any, Callable, Dict, Iterable, List, Mapping, Union, cast

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from ..attention.window import shown
from .kernels import Convolution

Layers = Union[str, Iterable[str], Callable[[str, nn.Module], bool]]

HOOKS = ('_forward_pre_hooks', '_forward_hooks', '_backward_pre_hooks', '_backward_hooks')


def find_convolutions(model: nn.Module, layers: Layers) -> Dict[str, Convolution]:
    """Returns the convolutions of a model, transposed ones included, that names, globs or a predicate choose.

    Args:
        model (nn.Module): Any model.
        layers (str | Iterable[str] | callable): See :func:`~attncnn_plugin.convert.convs_to_attention`.

    Returns:
        dict[str, Convolution]: By name, in the order of the model.

    Raises:
        TypeError: ``layers`` is none of these, or ``model`` itself is a convolution.
        ValueError: A name is not that of a convolution, or a glob or the predicate chooses none.
    """
    if isinstance(model, _ConvNd):
        raise TypeError(
            f'model is a bare convolution, {type(model).__name__}: conv_to_mhsa(model) returns its attention'
        )
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    convolutions = [name for name, module in modules.items() if isinstance(module, _ConvNd)]
    if not convolutions:
        raise ValueError(f'model is a {type(model).__name__} without convolutions: there is nothing to convert')
    if callable(layers) and not isinstance(layers, (str, nn.Module)):
        chosen = {name for name, module in modules.items() if layers(name, module)}.intersection(convolutions)
        if not chosen:
            raise ValueError(f'layers={layers!r} chooses none of the convolutions of the model, {_some(convolutions)}')
    else:
        chosen = set().union(*(_matching(pattern, modules, convolutions) for pattern in _patterns(layers)))
    return {name: cast(Convolution, modules[name]) for name in convolutions if name in chosen}


def _patterns(layers: Any) -> List[str]:
    patterns = [layers] if isinstance(layers, str) else list(layers) if isinstance(layers, Iterable) else [layers]
    if not patterns:
        raise ValueError(f'layers={layers!r} names no layer: give at least one name or glob')
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f'layers={shown(layers)} must be names or globs such as "layer4.*.conv*", or a function of a name and a '
            'module that says whether to convert it'
        )
    return patterns


def _matching(pattern: str, modules: Mapping[str, nn.Module], convolutions: List[str]) -> List[str]:
    if pattern in modules:
        if pattern not in convolutions:
            raise ValueError(
                f'layers={pattern!r} is a {type(modules[pattern]).__name__} and no convolution'
                + (f': {pattern}.* are all those inside' if any(modules[pattern].children()) else '')
            )
        return [pattern]
    found = [name for name in convolutions if fnmatchcase(name, pattern)]
    if not found:
        others = [name for name in modules if fnmatchcase(name, pattern)]
        what = f'{_some(others)}, but no convolution' if others else 'nothing in the model'
        raise ValueError(f'layers={pattern!r} matches {what}; its convolutions are {_some(convolutions)}')
    return found


def _some(names: List[str]) -> str:
    return ', '.join(names) if len(names) <= 6 else f'{", ".join(names[:5])} … ({len(names)} of them)'


def check_replaceable(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Checks that layers of a model can be replaced, so that everything else stays as it is.

    Args:
        model (nn.Module): Any model.
        layers (Mapping[str, nn.Module]): Some of its layers by name.

    Raises:
        ValueError: A layer is used under two names, shares a parameter with another module, or has hooks or
            parametrizations; or the model is wrapped for distributed training.
    """
    places: Dict[nn.Module, List[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(name)
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                f'{name or "model"} is a {type(module).__name__}, which knows the parameters that it was built with '
                'alone: convert its .module, and wrap that again'
            )
    owners: Dict[nn.Parameter, List[str]] = {}
    for module, names in places.items():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append(f'{names[0]}.{key}'.lstrip('.'))
    for name, layer in layers.items():
        names = places[layer]
        if len(names) > 1:
            raise ValueError(
                f'{name} is the same module as {names[names[0] == name]}: give each place a layer of its own, '
                'copy.deepcopy for instance, or convert neither'
            )
        for part in layer.modules():
            _check_plain(name, part)
        for parameter in layer.parameters():
            if len(owners[parameter]) > 1:
                raise ValueError(
                    f'{name} shares a parameter, {" and ".join(owners[parameter])} are one: give each its own, or '
                    'leave the layer out'
                )


def _check_plain(name: str, layer: nn.Module) -> None:
    """Refuses what would be lost with a layer, or changes what it computes."""
    if any(map(is_lazy, layer.parameters(recurse=False))):
        raise ValueError(
            f'{name} is a {type(layer).__name__} without weights yet: run the model once on an input first'
        )
    if is_parametrized(layer):
        raise ValueError(
            f'{name} has parametrizations, weight norm for instance: '
            'torch.nn.utils.parametrize.remove_parametrizations makes it plain'
        )
    if any(getattr(layer, hooks) for hooks in HOOKS) or 'forward' in vars(layer):
        raise ValueError(
            f'{name} has hooks or a forward of its own, as weight norm of the older kind has: remove them first'
        )
    for key, parameter in layer.named_parameters(recurse=False):
        if parameter._backward_hooks or getattr(parameter, '_post_accumulate_grad_hooks', None):
            raise ValueError(f'{name}.{key} has hooks: remove them first')


def replace_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Puts layers in the places of those of the same names."""
    for name, layer in layers.items():
        parent, _, leaf = name.rpartition('.')
        setattr(model.get_submodule(parent), leaf, layer)


def number_of_parameters(module: nn.Module) -> int:
    """Returns the number of entries of all parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())
