"""How far the outputs of a model move when attention replaces its convolutions; the model stays as it was."""

import contextlib
import warnings
from dataclasses import fields, is_dataclass
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

import torch
from torch import Tensor, nn

from ..attention.precision import widest_float
from .model_layers import replace_layers


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yields the tensors of floating numbers of an output: itself, or those in mappings, sequences and dataclasses."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        yield from tensors_in(list(output.values()))
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from tensors_in(item)
    elif is_dataclass(output) and not isinstance(output, type):
        yield from tensors_in([getattr(output, field.name) for field in fields(output)])


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


def drifts(
    model: nn.Module, layers: Mapping[str, nn.Module], replacements: Mapping[str, nn.Module], inputs: Any
) -> Tuple[Dict[str, float], Optional[float]]:
    """Runs a model in evaluation mode, first as it is, then with some layers replaced.

    Training modes, buffers and random numbers are as before at the end, in an error too.

    Args:
        model (nn.Module): Any model.
        layers (Mapping[str, nn.Module]): Some of its layers by name.
        replacements (Mapping[str, nn.Module]): What replaces each of them.
        inputs (Any): What the model is called with.

    Returns:
        tuple[dict[str, float], float | None]: ‖Y − Y'‖/‖Y‖ of the outputs of each layer that was called, for the same
        inputs of that layer; and of the model's outputs, None, with a warning, where these have no floating numbers or
        other shapes than before.

    Raises:
        ValueError: A layer is still called after it was replaced, or something of it is read that its replacement
            does not have.
    """
    squares: Dict[str, List[Tuple[float, float]]] = {}

    def compare(name: str) -> Any:
        def hook(module: nn.Module, args: Tuple[Tensor, ...], kwargs: Dict[str, Tensor], output: Tensor) -> None:
            (x,) = (*args, *kwargs.values())  # conv(x) or conv(input=x)
            squares.setdefault(name, []).append(_squares(output, replacements[name](x)))

        return hook

    with untouched(nn.ModuleList([model, *replacements.values()])):
        hooks = [layer.register_forward_hook(compare(name), with_kwargs=True) for name, layer in layers.items()]
        try:
            before = list(tensors_in(model(inputs)))
        finally:
            _remove(hooks)
        after = list(tensors_in(_run_replaced(model, layers, replacements, inputs)))
    drift = relative_change(before, after) if before else None
    if drift is None:
        reason = (
            'its outputs before and after have other shapes: where their sizes depend on values, as the number of a '
            "detector's boxes does, the drifts of the layers alone say something"
            if before
            else 'no floating numbers were found in its output'
        )
        warnings.warn(f'the drift of the model is not known: {reason}', stacklevel=3)
    return {name: _relative(own) for name, own in squares.items()}, drift


def _run_replaced(
    model: nn.Module, layers: Mapping[str, nn.Module], replacements: Mapping[str, nn.Module], inputs: Any
) -> Any:
    """Returns the output of a model with some layers replaced, and puts them back."""

    def refuse(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            raise ValueError(
                f'{name} is still called after attention has replaced it: the model holds it in another way than as a '
                'submodule, in a plain list for instance, so it cannot be converted'
            )

        return hook

    hooks = [layer.register_forward_pre_hook(refuse(name)) for name, layer in layers.items()]
    replace_layers(model, replacements)
    try:
        return model(inputs)
    except AttributeError as error:
        names = [name for name, layer in replacements.items() if layer is getattr(error, 'obj', None)]
        raise ValueError(
            f'the model reads what {names[0] if names else "a convolution"} has and attention does not: {error}; leave '
            'that layer out'
        ) from error
    finally:
        replace_layers(model, layers)
        _remove(hooks)


def _remove(hooks: List[Any]) -> None:
    for hook in hooks:
        hook.remove()


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode without gradients, at the end of which modes, buffers and random numbers are as before.

    ``model.eval()`` can do more than it says, merge layers for instance: the modes are set one by one.
    """
    modules = list(model.modules())
    modes = [module.training for module in modules]
    buffers = [(dict(module._buffers), set(module._non_persistent_buffers_set)) for module in modules]
    values = [(buffer, buffer.clone(), buffer._version) for buffer in model.buffers()]
    with torch.random.fork_rng(_cuda_devices(model)), torch.no_grad():
        try:
            for module in modules:
                module.training = False
            yield
        finally:
            for module, mode, (own, not_saved) in zip(modules, modes, buffers):
                module.training = mode
                module._buffers.clear()  # of those that a forward pass has registered
                module._buffers.update(own)
                module._non_persistent_buffers_set = not_saved
            for buffer, value, version in values:
                if buffer._version != version:
                    buffer.copy_(value)


@contextlib.contextmanager
def random_numbers_on_failure(model: nn.Module, generator: Optional[torch.Generator]) -> Iterator[None]:
    """Restores PyTorch's random numbers and those of a generator after an error."""
    devices = _cuda_devices(model)
    states = torch.random.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
    own = None if generator is None else generator.get_state()
    try:
        yield
    except BaseException:
        torch.random.set_rng_state(states[0])
        for device, state in zip(devices, states[1]):
            torch.cuda.set_rng_state(state, device)
        if generator is not None and own is not None:
            generator.set_state(own)
        raise


def _cuda_devices(model: nn.Module) -> List[int]:
    tensors = (*model.parameters(), *model.buffers())
    return sorted({tensor.device.index for tensor in tensors if tensor.device.type == 'cuda'})
