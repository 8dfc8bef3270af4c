"""How near the attention of a start is to that of a convolution, as a table."""

from dataclasses import dataclass
from typing import Optional, Tuple


@dataclass(frozen=True)
class HeadStart:
    """A head at the start.

    Attributes:
        shift (tuple[float, float] | None): Δ, (row, column) in patches; None where no shift is wanted.
        total_variation (float | None): ½ Σ_k |P[q, k] − P*[q, k]| between the head's attention P and the wanted P*,
            among patches, mean over images and queries; from 0 to 1. None where none is wanted.
    """

    shift: Optional[Tuple[float, float]] = None
    total_variation: Optional[float] = None


@dataclass(frozen=True)
class LayerStart:
    """A layer at the start.

    Attributes:
        name (str): Name of its attention in the model.
        encoding (str): ``'absolute'``, ``'relative'`` or ``'rotary'``.
        grid (tuple[int, int]): Height and width of the patches among which it attends: those of a window, or all.
        heads (tuple[HeadStart, ...]): Its heads.
        prefix_share (float): What patches give to class and register tokens, mean over images, heads and patches.
        value_error (float | None): ‖W − W'‖/‖W‖ of a given convolution's matrices W and those of the values; None
            without one.
    """

    name: str
    encoding: str
    grid: Tuple[int, int]
    heads: Tuple[HeadStart, ...]
    prefix_share: float = 0.0
    value_error: Optional[float] = None


@dataclass(frozen=True)
class ConvolutionalStart:
    """What :func:`init_as_convolution` did; as a string, a table with a row for each head.

    Attributes:
        method (str): ``'gaussian'``, ``'impulse'`` or ``'mimetic'``.
        alpha (float | None): α of Gaussian heads.
        layers (tuple[LayerStart, ...]): The layers, in the order of the model.
    """

    method: str
    alpha: Optional[float]
    layers: Tuple[LayerStart, ...]

    def __str__(self) -> str:
        with_errors = any(layer.value_error is not None for layer in self.layers)
        rows = [['layer', 'encoding', 'grid', 'head', 'shift', 'total variation', 'to other tokens']]
        rows[0] += ['values'] * with_errors
        for layer in self.layers:
            of_layer = [layer.name, layer.encoding, '×'.join(map(str, layer.grid))]
            after = [f'{layer.prefix_share:.2g}']
            if layer.value_error is not None:
                after.append(f'{layer.value_error:.2g}')
            for number, head in enumerate(layer.heads):
                shift = 'none' if head.shift is None else '({:g}, {:g})'.format(*head.shift)
                variation = 'none' if head.total_variation is None else f'{head.total_variation:.2g}'
                rows.append([*of_layer, str(number), shift, variation, *after])
                of_layer, after = ['', '', ''], []
        rows = [row + [''] * (len(rows[0]) - len(row)) for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return '\n'.join('  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
