"""A model on an example input, before and after some of its layers were replaced; it stays as it was."""

import contextlib
import warnings
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

import torch
from torch import Tensor, nn

from ..layers.image_attention import ImageAttention
from .attention_memory import advice_on_memory, attention_memory
from .kernels import Convolution
from .layer_costs import layer_costs
from .model_layers import replace_layers
from .model_report import LayerRun, short
from .outputs import Change, relative_change, tensors_in
from .untouched import untouched


@dataclass
class _Calls:
    """What the calls of a layer were, and how far its attention was from it."""

    inputs: List[Tuple[torch.Size, torch.Size, torch.dtype]] = field(default_factory=list)
    change: Change = field(default_factory=Change)
    was_run: bool = True


def compare_runs(
    model: nn.Module,
    layers: Mapping[str, Convolution],
    replacements: Mapping[str, ImageAttention],
    inputs: Any,
    memory_limit: Optional[int],
) -> Tuple[Dict[str, LayerRun], Optional[float]]:
    """Runs a model in evaluation mode with and without attention in the place of convolutions.

    Training modes, buffers and random numbers are as before at the end, in an error too.

    Args:
        model (nn.Module): Any model.
        layers (Mapping[str, nn.Module]): Some of its convolutions by name.
        replacements (Mapping[str, ImageAttention]): The attention of each.
        inputs (Any): What the model is called with.
        memory_limit (int, optional): Bytes of probabilities beyond which attention is not run, but warned of.

    Returns:
        tuple[dict[str, LayerRun], float | None]: Of the layers that were called; and the relative change of the
        model's outputs, None where attention was not run, or, with a warning, where the outputs have no floating
        numbers or other shapes than before.

    Raises:
        ValueError: A convolution is still called when there is attention in its place, or something of it is read that
            attention does not have.
    """
    calls: Dict[str, _Calls] = {}
    with untouched(nn.ModuleList([model, *replacements.values()])), contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            calls[name] = _Calls()
            compare = _compare(calls[name], name, replacements[name], memory_limit)
            stack.callback(layer.register_forward_hook(compare, with_kwargs=True).remove)
        before = list(tensors_in(model(inputs)))
        stack.close()
        drift = None
        if all(own.was_run for own in calls.values()):
            with _replaced(model, layers, replacements):
                after = list(tensors_in(_output(model, inputs, replacements)))
            drift = _drift_of_model(before, after)
    return {name: _layer_run(layers[name], replacements[name], own) for name, own in calls.items() if own.inputs}, drift


def _output(model: nn.Module, inputs: Any, replacements: Mapping[str, ImageAttention]) -> Any:
    try:
        return model(inputs)
    except AttributeError as error:
        layers = [name for name, layer in replacements.items() if layer is getattr(error, 'obj', None)]
        raise ValueError(
            f'the model reads what attention in the place of {layers[0] if layers else "a convolution"} does not have: '
            f'{error}; leave that layer out'
        ) from error


def _drift_of_model(before: List[Tensor], after: List[Tensor]) -> Optional[float]:
    drift = relative_change(before, after) if before else None
    if drift is None:
        reason = (
            'its outputs before and after have other shapes: where their sizes depend on values, as the number of a '
            "detector's boxes does, the drifts of the layers alone say something"
            if before
            else 'no floating numbers were found in its output'
        )
        warnings.warn(f'the drift of the model is not known: {reason}', stacklevel=2)
    return drift


def _compare(calls: _Calls, name: str, attention: ImageAttention, memory_limit: Optional[int]) -> Any:
    """A forward hook of a convolution that runs its attention on the same input."""

    def hook(module: nn.Module, args: Tuple[Tensor, ...], kwargs: Dict[str, Tensor], output: Tensor) -> None:
        (x,) = (*args, *kwargs.values())  # conv(x) or conv(input=x)
        calls.inputs.append((x.shape, output.shape, x.dtype))
        needed = attention_memory(attention, x)
        if memory_limit is not None and needed > memory_limit:
            if calls.was_run:
                warnings.warn(
                    f'the attention of {name} needs {short(needed)}B for the probabilities of an input of shape '
                    f'{tuple(x.shape)}, more than memory_limit={memory_limit}, and was not run: '
                    f'{advice_on_memory(attention)}',
                    stacklevel=2,
                )
            calls.was_run = False
            return
        calls.change.add(output, attention(x))

    return hook


@contextlib.contextmanager
def _replaced(
    model: nn.Module, layers: Mapping[str, nn.Module], replacements: Mapping[str, nn.Module]
) -> Iterator[None]:
    """The model with other layers for a while."""

    def refuse(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            raise ValueError(
                f'{name} is still called when there is attention in its place: the model holds it in another way than '
                'as a submodule, in a plain list for instance, so it cannot be converted'
            )

        return hook

    hooks = [layer.register_forward_pre_hook(refuse(name)) for name, layer in layers.items()]
    replace_layers(model, replacements)
    try:
        yield
    finally:
        replace_layers(model, layers)
        for hook in hooks:
            hook.remove()


def _layer_run(conv: nn.Module, attention: ImageAttention, calls: _Calls) -> LayerRun:
    before, after = [0, 0], [0, 0]
    probabilities = 0
    for shape, _, dtype in calls.inputs:
        for totals, layer in ((before, conv), (after, attention)):
            for i, cost in enumerate(layer_costs(layer, shape, dtype)):
                totals[i] += cost
        probabilities = max(probabilities, attention_memory(attention, torch.empty(shape, dtype=dtype, device='meta')))
    ndim = attention.window.ndim
    largest = max(calls.inputs, key=lambda call: call[0].numel())
    return LayerRun(
        tuple(largest[0][-ndim:]),
        tuple(largest[1][-ndim:]),
        before[0],
        after[0],
        before[1],
        after[1],
        probabilities,
        calls.change.relative if calls.was_run else None,
    )
