"""The outputs of a model before and after some of its layers were replaced."""

from dataclasses import fields, is_dataclass
from typing import Any, Iterator, List, Mapping, Optional

from torch import Tensor

from ..layers.precision import widest_float


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors of floating numbers in an output: one, or those in mappings, sequences and dataclasses."""
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


class Change:
    """How far outputs moved, over several calls.

    Attributes:
        error (float): ‖Y − Y'‖² of the outputs Y and Y' before and after.
        norm (float): ‖Y‖².
    """

    def __init__(self) -> None:
        self.error = self.norm = 0.0

    def add(self, before: Tensor, after: Tensor) -> None:
        """Counts a tensor in, of the same shape before and after."""
        old, new = before.to(widest_float(before)), after.to(widest_float(after))
        self.error += (old - new).square().sum().item()
        self.norm += old.square().sum().item()

    @property
    def relative(self) -> float:
        """‖Y − Y'‖/‖Y‖."""
        return (self.error / self.norm) ** 0.5 if self.norm else float(self.error > 0)


def relative_change(before: List[Tensor], after: List[Tensor]) -> Optional[float]:
    """‖Y − Y'‖/‖Y‖ of outputs; None where their shapes, which can depend on values, are not the same."""
    if [tensor.shape for tensor in before] != [tensor.shape for tensor in after]:
        return None
    change = Change()
    for old, new in zip(before, after):
        change.add(old, new)
    return change.relative
