"""Compares the outputs of a model before and after a conversion; the model stays as it was."""

import warnings
from contextlib import suppress
from functools import partial
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
from torch import Tensor, nn

from ..attention.evaluation_mode import evaluating
from ..attention.precision import widest_float
from ..change import Undo, all_or_nothing, held_by
from ..heads.found import same_numbers


def tensors_in(output: Any) -> List[Tensor]:
    """Returns the tensors of floating numbers of an output: itself, or those that it holds."""
    return [own for _, _, own, _ in held_by(output) if isinstance(own, Tensor) and own.is_floating_point()]


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
    """Runs a model in evaluation mode, first as it is, then with some layers, by name, replaced, and puts it back.

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

    kept = all_or_nothing([model, *replacements.values()], values=model.buffers())
    with suppress(Undo), kept, evaluating(model), same_numbers(), torch.no_grad():
        for name, conv in layers.items():
            conv.register_forward_hook(partial(compare, name), with_kwargs=True)
        before = tensors_in(model(inputs))
        for name, conv in layers.items():
            conv._forward_hooks.clear()
            conv.register_forward_pre_hook(partial(refuse, name))
            model.set_submodule(name, replacements[name])
        try:
            after = tensors_in(model(inputs))
        except AttributeError as error:
            names = [name for name, layer in replacements.items() if layer is getattr(error, 'obj', None)]
            raise ValueError(
                f'the model reads what {names[0] if names else "a convolution"} has and attention does not: {error}; '
                'leave that layer out'
            ) from error
        raise Undo
    same = before and [own.shape for own in before] == [own.shape for own in after]
    drift = _relative([_squares(*own) for own in zip(before, after)]) if same else None
    if drift is None:
        warnings.warn(
            'the drift of the model is not known: its outputs have no floating numbers, or other shapes than before, '
            "as a detector's boxes can have; only the drifts of the layers say something",
            stacklevel=3,
        )
    return {name: _relative(own) for name, own in squares.items()}, drift
