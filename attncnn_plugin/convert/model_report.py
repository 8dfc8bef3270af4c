"""What the conversion of a model's layers did, as a table."""

from dataclasses import dataclass, field
from typing import List, Optional, Sequence, Tuple

from .succession import Replaced


@dataclass(frozen=True)
class LayerRun:
    """A layer on an example input, before and after its conversion.

    Attributes:
        size (tuple[int, ...]): Pixels of its input along each axis; the largest, where the layer runs several times.
        queries (tuple[int, ...]): Pixels of its output, the queries of attention.
        multiply_adds_before, multiply_adds_after (int): By PyTorch's counter, which counts matrix products and
            convolutions.
        memory_before, memory_after (int): Bytes that a training step keeps for the gradients of this layer, its
            parameters left out.
        attention_memory (int): Bytes of the probabilities of the attention.
        drift (float | None): ‖Y − Y'‖/‖Y‖ of the outputs Y and Y' before and after, for the same input; None where the
            attention was not run, since it takes more than ``memory_limit``.
    """

    size: Tuple[int, ...]
    queries: Tuple[int, ...]
    multiply_adds_before: int
    multiply_adds_after: int
    memory_before: int
    memory_after: int
    attention_memory: int
    drift: Optional[float]


@dataclass(frozen=True)
class LayerConversion:
    """A layer that was converted.

    Attributes:
        name (str): Its name in the model.
        kernel_size, stride (tuple[int, ...]): Of the convolution.
        num_heads (int): Number of heads of the attention.
        parameters_before, parameters_after (int): Number of parameters.
        error (float): Of attention, the relative error of its kernel, see
            :class:`~attncnn_plugin.convert.ConversionReport`; of a convolution, the bound of its fit, see
            :class:`~attncnn_plugin.convert.ConvFit`.
        run (LayerRun | None): The layer on the example input; None without one, or where the model does not use it.
    """

    name: str
    kernel_size: Tuple[int, ...]
    stride: Tuple[int, ...]
    num_heads: int
    parameters_before: int
    parameters_after: int
    error: float
    run: Optional[LayerRun] = None


@dataclass(frozen=True, eq=False)
class ModelConversionReport:
    """What the conversion of a model's layers did; as a string, a table.

    Attributes:
        layers (tuple[LayerConversion, ...]): The layers, in the order of the model.
        parameters_before, parameters_after (int): Number of parameters of the whole model.
        drift (float | None): ‖Y − Y'‖/‖Y‖ of the model's outputs for the example input; None where it was not run,
            or the outputs cannot be compared, for instance where their sizes depend on values.
        replaced (dict[Parameter, Succession]): What took the place of each old parameter, for
            :func:`~attncnn_plugin.pruning.replace_parameters`. Empty where nothing was changed.
    """

    layers: Tuple[LayerConversion, ...]
    parameters_before: int
    parameters_after: int
    drift: Optional[float] = None
    replaced: Replaced = field(default_factory=dict)

    def __str__(self) -> str:
        has_runs = any(layer.run is not None for layer in self.layers)
        head = ['layer', 'kernel', 'stride', 'heads', 'parameters', 'error']
        rows = [head + ['grid', 'multiply-adds', 'memory', 'attention', 'drift'] if has_runs else head]
        for layer in self.layers:
            rows.append(
                [
                    layer.name,
                    _size(layer.kernel_size),
                    _size(layer.stride),
                    str(layer.num_heads),
                    _change(layer.parameters_before, layer.parameters_after),
                    f'{layer.error:.2g}',
                ]
            )
            if has_runs:
                rows[-1] += _run_cells(layer.run)
        if has_runs:
            rows.append(self._totals())
        rows.append(['model', '', '', '', _change(self.parameters_before, self.parameters_after)])
        if has_runs:
            was_run = all(layer.run is None or layer.run.drift is not None for layer in self.layers)
            rows[-1] += ['', '', '', '', '', _drift(self.drift, 'not known' if was_run else 'not run')]
        return _table(rows)

    def _totals(self) -> List[str]:
        """The cells of all these layers together."""
        runs = [layer.run for layer in self.layers if layer.run is not None]
        return [
            'together',
            '',
            '',
            '',
            _change(sum(x.parameters_before for x in self.layers), sum(x.parameters_after for x in self.layers)),
            '',
            '',
            _change(sum(run.multiply_adds_before for run in runs), sum(run.multiply_adds_after for run in runs)),
            _change(sum(run.memory_before for run in runs), sum(run.memory_after for run in runs), 'B'),
            short(sum(run.attention_memory for run in runs)) + 'B',
        ]


def _run_cells(run: Optional[LayerRun]) -> List[str]:
    if run is None:
        return ['not run', '', '', '', '']
    grid = _size(run.size) if run.size == run.queries else f'{_size(run.size)} → {_size(run.queries)}'
    return [
        grid,
        _change(run.multiply_adds_before, run.multiply_adds_after),
        _change(run.memory_before, run.memory_after, 'B'),
        short(run.attention_memory) + 'B',
        _drift(run.drift),
    ]


def short(number: int) -> str:
    """A number of three digits and its power of a thousand.

    Examples:
        >>> short(999), short(2359296), short(11_200_000_000)
        ('999', '2.36M', '11.2G')
    """
    value, unit = float(number), 0
    while value >= 999.5:
        value, unit = value / 1000, unit + 1
    return f'{value:.3g}{["", "k", "M", "G", "T", "P", "E"][unit]}'


def _size(values: Sequence[int]) -> str:
    return '×'.join(map(str, values))


def _change(before: int, after: int, unit: str = '') -> str:
    return f'{short(before)}{unit} → {short(after)}{unit}'


def _drift(drift: Optional[float], otherwise: str = 'not run') -> str:
    return otherwise if drift is None else f'{drift:.2g}'


def _table(rows: List[List[str]]) -> str:
    rows = [row + [''] * (len(rows[0]) - len(row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return '\n'.join('  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
