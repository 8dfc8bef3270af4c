"""The result of everything that changes a model: its layers before and after, and what its parameters became."""

from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells as a table, a line each."""
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
    """Returns what became of the parameters of a layer, with their names in its model; empty for the model itself."""
    prefix = f'{name}.' if name else ''
    return {
        old: replace(own, parameters={prefix + key: new for key, new in own.parameters.items()})
        for old, own in replaced.items()
    }


def replace_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Puts layers in the places of those of the same names."""
    for name, layer in layers.items():
        parent, _, leaf = name.rpartition('.')
        setattr(model.get_submodule(parent), leaf, layer)


def check_not_distributed(model: nn.Module, *wrappers: type) -> None:
    """Raises ``TypeError`` for a model that has a part in DistributedDataParallel, or is in it or in ``wrappers``."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel) or not name and isinstance(module, wrappers):
            raise TypeError(
                f'{name or "model"} is a {type(module).__name__}, which knows only the parameters that it was built '
                'with: use its .module instead, and build a new wrapper afterwards'
            )


def number_of_parameters(module: nn.Module) -> int:
    """Returns the number of entries of all parameters of a module; lazy ones have none yet."""
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))


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
    """

    layers: Tuple[LayerChange, ...]
    parameters_before: int
    parameters_after: int
    replaced: Dict[nn.Parameter, Successor] = field(default_factory=dict)
    drift: Optional[float] = None

    def __bool__(self) -> bool:
        return bool(self.layers)

    def __str__(self) -> str:
        rows = [['layer', 'before', 'after', 'parameters', '']]
        for layer in self.layers:
            counts = f'{layer.parameters_before:,} → {layer.parameters_after:,}'
            rows.append(
                [layer.name, layer.before, layer.after, counts, '' if layer.report is None else str(layer.report)]
            )
        drift = '' if self.drift is None else f'drift {self.drift:.2g}'
        rows.append(['model', '', '', f'{self.parameters_before:,} → {self.parameters_after:,}', drift])
        return table(rows)
