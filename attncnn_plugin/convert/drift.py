"""Compares the outputs of a model before and after a conversion; the model stays as it was."""

import contextlib
import copy
import warnings
from functools import partial
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

import torch
from torch import Tensor, nn

from ..attention.precision import widest_float
from ..change import held_by


def tensors_in(output: Any) -> List[Tensor]:
    """Returns the tensors of floating numbers of an output: itself, or those that it holds."""
    return [own for _, _, own, _ in held_by(output) if isinstance(own, Tensor) and own.is_floating_point()]


def relative_change(before: List[Tensor], after: List[Tensor]) -> Optional[float]:
    """Returns ‖Y − Y'‖/‖Y‖ of outputs; None where their shapes, which can depend on values, are not the same."""
    if [tensor.shape for tensor in before] != [tensor.shape for tensor in after]:
        return None
    return _relative([_squares(old, new) for old, new in zip(before, after)])


def _squares(old: Tensor, new: Tensor) -> Tuple[float, float]:
    """Returns ‖Y − Y'‖² and ‖Y‖²."""
    old, new = old.to(widest_float(old)), new.to(widest_float(new))
    return (old - new).square().sum().item(), old.square().sum().item()


def _relative(squares: List[Tuple[float, float]]) -> float:
    error, norm = (sum(column) for column in zip(*squares))
    return (error / norm) ** 0.5 if norm else float(error > 0)


@contextlib.contextmanager
def evaluated_copy(model: nn.Module) -> Iterator[Any]:
    """Yields a copy of a model, with its parameters, in evaluation mode, without gradients; random numbers stay."""
    known: Dict[int, Tensor] = {id(parameter): parameter for parameter in model.parameters()}
    kept = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    known.update({id(value): value.detach().clone() for value in kept if not value.is_leaf})  # deepcopy refuses them
    trial = copy.deepcopy(model, known)
    for module in trial.modules():  # eval() can do more than it says, merge layers for instance
        module.training = False
    tensors = (*model.parameters(), *model.buffers())
    devices = sorted({tensor.device.index for tensor in tensors if tensor.device.type == 'cuda'})
    with torch.random.fork_rng(devices), torch.no_grad():
        yield trial


def drifts(
    model: nn.Module, layers: Mapping[str, nn.Module], replacements: Mapping[str, nn.Module], inputs: Any
) -> Tuple[Dict[str, float], Optional[float]]:
    """Runs a copy of a model in evaluation mode, first as it is, then with some layers, by name, replaced.

    Returns:
        tuple[dict[str, float], float | None]: ‖Y − Y'‖/‖Y‖ of the outputs of each layer that was called, and of the
        model's, None, with a warning, where these have no floating numbers or other shapes than before.

    Raises:
        ValueError: A layer is still called after it was replaced, or something of it is read that is not there.
    """
    squares: Dict[str, List[Tuple[float, float]]] = {}

    def compare(name: str, module: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any], output: Tensor) -> None:
        (x,) = (*args, *kwargs.values())  # conv(x) or conv(input=x)
        squares.setdefault(name, []).append(_squares(output, replacements[name](x)))

    def refuse(name: str, module: nn.Module, inputs: Any) -> None:
        raise ValueError(
            f'{name} is still called after attention has replaced it: the model holds it in another way than as a '
            'submodule, in a plain list for instance, so it cannot be converted'
        )

    with evaluated_copy(model) as trial:
        convs = {name: trial.get_submodule(name) for name in layers}
        hooks = [conv.register_forward_hook(partial(compare, name), with_kwargs=True) for name, conv in convs.items()]
        before = tensors_in(trial(inputs))
        for hook in hooks:
            hook.remove()
        for name, conv in convs.items():
            conv.register_forward_pre_hook(partial(refuse, name))
        for name, layer in replacements.items():
            trial.set_submodule(name, layer)
        try:
            after = tensors_in(trial(inputs))
        except AttributeError as error:
            names = [name for name, layer in replacements.items() if layer is getattr(error, 'obj', None)]
            raise ValueError(
                f'the model reads what {names[0] if names else "a convolution"} has and attention does not: {error}; '
                'leave that layer out'
            ) from error
    drift = relative_change(before, after) if before else None
    if drift is None:
        warnings.warn(
            'the drift of the model is not known: its outputs have no floating numbers, or other shapes than before, '
            "as a detector's boxes can have; only the drifts of the layers say something",
            stacklevel=3,
        )
    return {name: _relative(own) for name, own in squares.items()}, drift
