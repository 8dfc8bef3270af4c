"""The result of everything that changes a model: its layers before and after, and what its parameters became."""

import dis
import functools
import gc
import types
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

PARAMETER_HOOKS = '_backward_hooks', '_post_accumulate_grad_hooks'  # of a parameter
FUNCTIONS = types.FunctionType, types.MethodType, functools.partial, types.CellType
CLOSED = (nn.Module, type, types.ModuleType, str, bytes, int, float, type(None))  # not looked into


def table(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows of cells as a table, a line each."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return '\n'.join('  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


@dataclass(frozen=True, eq=False)
class Successor:
    """The parameters that took the place of another.

    Attributes:
        parameters (dict[str, Parameter]): The new parameters by their names in the model; empty where the old one is
            just gone.
        heir (Parameter | None): The one of them that has entries of the old one.
        inherit (callable | None): Brings a tensor of the old one's shape, such as its momentum, to the heir's shape.
    """

    parameters: Dict[str, nn.Parameter] = field(default_factory=dict)
    heir: Optional[nn.Parameter] = None
    inherit: Optional[Callable[[Tensor], Tensor]] = None


def within(name: str, replaced: Mapping[nn.Parameter, Successor]) -> Dict[nn.Parameter, Successor]:
    """Returns what replaced the parameters of a layer, with names in its model; ``name`` is empty for the model."""
    prefix = f'{name}.' if name else ''
    return {
        old: replace(own, parameters={prefix + key: new for key, new in own.parameters.items()})
        for old, own in replaced.items()
    }


def succession(
    old: nn.Parameter,
    parameters: Mapping[str, nn.Parameter],
    heir: Optional[nn.Parameter] = None,
    inherit: Optional[Callable[[Tensor], Tensor]] = None,
) -> Successor:
    """Returns the :class:`Successor` of a parameter, and gives the new parameters its attributes and hooks.

    Attributes such as ``no_weight_decay``, which they do not all have, go to all of them. A tensor among these of the
    parameter's shape, and hooks, go to an heir; handles of hooks stay valid.

    Raises:
        ValueError: An attribute or a hook holds tensors of other shapes, or there is no single heir for it.
    """
    what = f'a parameter of shape {tuple(old.shape)} in the place of {" and ".join(parameters) or "nothing"}'
    for name, value in vars(old).items():
        if parameters and all(name in vars(new) for new in parameters.values()):
            continue  # they have their own
        if isinstance(value, Tensor) and value.shape == old.shape and heir is not None and inherit is not None:
            setattr(heir, name, inherit(value))
            continue
        if holds_tensors(value):
            raise ValueError(f'{what} has tensors in its attribute {name}, which do not fit: remove it first')
        for parameter in parameters.values():
            setattr(parameter, name, value)
    for name in PARAMETER_HOOKS:
        hooks = getattr(old, name)
        if hooks and (heir is None or len(parameters) > 1 or holds_tensors(hooks)):
            raise ValueError(f'{what} has hooks ({name}), which may not fit what takes its place: remove them first')
        if hooks:
            setattr(heir, name, hooks)
    return Successor(dict(parameters), heir, inherit)


def holds_tensors(own: Any) -> bool:
    """Returns True if an object, or what a function in it reads, holds a tensor of several entries at any depth."""
    return any(isinstance(value, Tensor) and value.numel() > 1 for _, _, value, _ in held_by(own))


def is_plain(own: Tensor) -> bool:
    """Returns True for a tensor or a parameter of PyTorch's own class whose entries lie in one place."""
    kind = type(own)
    fake = kind.__module__ == 'torch._subclasses.fake_tensor'  # without values, as on a device that is not there
    return (kind in (Tensor, nn.Parameter) or fake) and own.layout == torch.strided


def held_by(own: Any, closed: Callable[[Any], bool] = lambda own: False) -> Iterator[Tuple[str, Any, Any, bool]]:
    """Yields what an object holds at any depth: in containers, attributes, and what its functions close over.

    It looks into no module, nor into objects that hold one without being an optimizer, such as a trainer.

    Args:
        own (Any): The object.
        closed (callable): Says of an object whether not to look into it. Defaults to none.

    Yields:
        tuple[str, Any, Any, bool]: The way to an object, such as ``.state``; what holds it there; the object; and
        whether the way leads through no function. Each is there once, a tensor once for each place.
    """
    seen: Dict[int, Any] = {}
    left: Deque[Tuple[str, Any, Any, bool]] = deque([('', None, own, True)])
    while left:
        way, holder, own, is_data = left.pop()
        if id(own) in seen and not isinstance(own, Tensor):
            continue
        seen[id(own)] = own
        yield way, holder, own, is_data
        if isinstance(own, (Tensor, *CLOSED)) or closed(own):
            continue
        for name, value in reversed(_parts(own)):
            if isinstance(own, FUNCTIONS):
                left.appendleft((way, own, value, False))  # last, so that data come as such
            else:
                left.append((way + name, own, value, is_data))


def _parts(own: Any) -> List[Tuple[str, Any]]:
    if isinstance(own, Mapping):
        return [(f'[{key!r}]' if isinstance(key, (str, int)) else '[…]', value) for key, value in own.items()]
    if isinstance(own, (list, tuple, set, frozenset, deque)):
        return [(f'[{number}]', value) for number, value in enumerate(own)]
    if isinstance(own, types.FunctionType):
        names = {read.argval for read in dis.get_instructions(own) if read.opname == 'LOAD_GLOBAL'}
        read = [own.__globals__.get(name) for name in names]
        values = [value for value in read if not callable(value)]
        return [('', value) for value in (*values, own.__closure__, own.__defaults__, own.__kwdefaults__)]
    if isinstance(own, FUNCTIONS) or not hasattr(own, '__dict__'):
        return [('', value) for value in gc.get_referents(own)]
    of_others = any(isinstance(value, nn.Module) for value in vars(own).values()) and not hasattr(own, 'param_groups')
    return [] if of_others else [(f'.{name}', value) for name, value in vars(own).items()]


@contextmanager
def all_or_nothing(models: Iterable[nn.Module], optimizers: Any = (), values: Iterable[Tensor] = ()) -> Iterator[None]:
    """Puts models and optimizers back as they were if the code inside fails.

    Args:
        models (Iterable[nn.Module]): Those that may get other parameters, modules and attributes.
        optimizers (Any): What holds optimizers. Defaults to none.
        values (Iterable[Tensor]): Those whose entries may change. Defaults to none.
    """
    held: List[Any] = [own for _, _, own, _ in held_by(optimizers)]
    held += [vars(own) for own in held if hasattr(own, 'param_groups')]
    modules = {module for model in models for module in model.modules()}
    held += [own for module in modules for own in (vars(module), *vars(module).values())]
    of_modules = [(*module._parameters.values(), *module._buffers.values()) for module in modules]
    tensors: List[Any] = [own for some in of_modules for own in some if own is not None]
    data = [(own, type(own), own.data, own.grad) for own in tensors if is_lazy(own) or is_plain(own)]
    of_kinds = [own for own in held if isinstance(own, (dict, list, set))]
    before = [(own, dict(own) if isinstance(own, dict) else list(own)) for own in of_kinds]
    entries = [(own, own.detach().clone()) for own in values]
    try:
        yield
    except BaseException:
        for own, kept in before:
            own.clear()
            own.extend(kept) if isinstance(own, list) else own.update(kept)
        for own, kind, value, grad in data:
            if own.size() != value.size():
                own.__class__, own.data, own.grad = kind, value, grad
        for own, value in entries:
            own.data.copy_(value)
        raise


class _Undo(Exception):
    """Puts back what was changed."""


@contextmanager
def undone(models: Iterable[nn.Module], values: Iterable[Tensor] = ()) -> Iterator[None]:
    """Puts models back as they were in any case, for what is only tried out; see :func:`all_or_nothing`."""
    with suppress(_Undo), all_or_nothing(models, values=values):
        yield
        raise _Undo


@torch.inference_mode(False)
def resize(module: nn.Module, name: str, shape: Sequence[int]) -> None:
    """Gives a parameter or buffer another shape, all 0; it stays the same object, which an optimizer may hold."""
    path, _, leaf = name.rpartition('.')
    own: Any = getattr(module.get_submodule(path), leaf)
    with torch.inference_mode(own.is_inference()):  # of a model that was built in inference mode
        own.data, own.grad = own.data.new_zeros(shape), None


def check_not_distributed(model: nn.Module, *wrappers: type) -> None:
    """Raises ``TypeError`` for a model with a part in DistributedDataParallel or FSDP, or in ``wrappers`` itself."""
    for name, module in model.named_modules():
        sharded = any(cls.__module__.startswith('torch.distributed.fsdp') for cls in type(module).__mro__)
        if sharded or isinstance(module, DistributedDataParallel) or not name and isinstance(module, wrappers):
            advice = 'use its .module instead, and build a new wrapper afterwards'
            raise TypeError(
                f'{name or "model"} is a {type(module).__name__}, which knows only the parameters that it was built '
                f'with: {"change the model before it is sharded" if sharded else advice}'
            )


def number_of_parameters(module: nn.Module) -> int:
    """Returns the number of entries of all parameters of a module; lazy ones have none yet."""
    return sum([parameter.numel() for parameter in module.parameters() if not is_lazy(parameter)])


@dataclass(frozen=True, eq=False)
class LayerChange:
    """A layer that changed.

    Attributes:
        name (str): Its name in the model.
        before, after (str): What it was and is, in a few words.
        parameters_before, parameters_after (int): Number of its parameters.
        report (Any): Figures of this kind of change, such as the error of a conversion; None without.
    """

    name: str
    before: str
    after: str
    parameters_before: int
    parameters_after: int
    report: Any = None


@dataclass(frozen=True, eq=False)
class Change:
    """The layers of a model that changed. It is true if there are any; as a string it is their table.

    Attributes:
        layers (tuple[LayerChange, ...]): The layers that changed, in the order of the model.
        parameters_before, parameters_after (int): Number of parameters of the whole model.
        replaced (dict[Parameter, Successor]): What took the place of each old parameter, for
            :func:`~attncnn_plugin.pruning.replace_parameters`.
        drift (float | None): ‖Y − Y'‖/‖Y‖ of the model's outputs before and after for an example input; None where it
            was not run, or the outputs cannot be compared.
        order (Sequence[Parameter]): Where others took places, all parameters of the model in its order, as a new
            optimizer would have them; empty otherwise.
        difference (float | None): Of a removal of heads, the largest difference from the model with these heads at
            zero, relative to the largest entry; None for other changes.
    """

    layers: Tuple[LayerChange, ...]
    parameters_before: int
    parameters_after: int
    replaced: Dict[nn.Parameter, Successor] = field(default_factory=dict)
    drift: Optional[float] = None
    order: Sequence[nn.Parameter] = ()
    difference: Optional[float] = None

    def __bool__(self) -> bool:
        return bool(self.layers)

    def __str__(self) -> str:
        rows = [['layer', 'before', 'after', 'parameters', '']]
        for layer in self.layers:
            counts = f'{layer.parameters_before:,} → {layer.parameters_after:,}'
            report = '' if layer.report is None else str(layer.report)
            rows.append([layer.name, layer.before, layer.after, counts, report])
        known = {'drift': self.drift, 'difference from heads at zero': self.difference}
        figures = ', '.join(f'{name} {value:.2g}' for name, value in known.items() if value is not None)
        rows.append(['model', '', '', f'{self.parameters_before:,} → {self.parameters_after:,}', figures])
        return table(rows)
