"""How near attention comes to the convolution that it was made from: of a layer, and of the layers of a model.

Attention over pixels is that of Cordonnier et al. 2020 (C20), Theorem 1, attention over patches that of Li et al. 2021
(L21), Theorem 1.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Optional, Sequence, Tuple

from .kernels import Convolution, spectral_norms
from .succession import Replaced


@dataclass(frozen=True)
class ConversionReport:
    """How near attention over pixels comes to its convolution.

    Relative errors are ‖M − M'‖/‖M‖ in the Frobenius norm, and 0 for a kernel of zeros. M is the kernel of the
    convolution, a row for each of its K positions. M' is that of the attention, with a row for each pixel that a head
    sees in an image without end.

    Attributes:
        num_heads (int): Number of heads N.
        relative_error (float): The error of the layer, as its parameters are stored.
        bound (float): The error of the best matrix of rank N (Eckart-Young): no layer with N heads that look at
            positions alone has less.
        guarantee (float): The error of the best matrix of rank N − 1: fewer heads than positions never have more, but
            for rounding. With a head for each position the error is that of ``alpha`` alone.
        alpha (float | None): Width α of heads that each see one position, as stored; None for heads that see several.
        deviation (float): With an ``alpha``, the largest share of a head that goes to other pixels than its own, which
            is the largest difference of a probability from that of the hard shift: at no pixel of any image is it
            exceeded.
        conv (nn.Module | None): The convolution as it was, where ``deviation`` is not 0: for :attr:`output_bound`.
    """

    num_heads: int
    relative_error: float
    bound: float
    guarantee: float
    alpha: Optional[float] = None
    deviation: float = 0.0
    conv: Optional[Convolution] = field(default=None, repr=False, compare=False)

    @cached_property
    def output_bound(self) -> float:
        """With an ``alpha``, the largest error of an output for an image of pixels of norm 1.

        At no pixel of any image it is exceeded, but for rounding. It takes as long as the rest of the conversion, so it
        is computed when it is first asked for.
        """
        if self.conv is None:
            return 0.0
        # ‖error_q‖ ≤ Σ_h ‖P_h[q, :] − e_h‖₁ ‖W^(h)‖₂, and what other pixels get the own one lacks: ‖·‖₁ ≤ 2·deviation.
        return 2 * self.deviation * spectral_norms(self.conv).sum().item()

    def __str__(self) -> str:
        if self.alpha is not None:
            return (
                f'num_heads={self.num_heads}, alpha={self.alpha:.6g}: relative error {self.relative_error:.3g}; a head '
                f'gives at most {self.deviation:.3g} to other pixels than its own'
            )
        return (
            f'num_heads={self.num_heads}: relative error {self.relative_error:.3g}, where at least '
            f'{self.bound:.3g} is necessary and at most {self.guarantee:.3g} guaranteed'
        )


@dataclass(frozen=True)
class PatchConversionReport:
    """The size of attention over patches that is its convolution (L21, Theorem 1).

    Attributes:
        num_heads (int): Number of heads, one for each shift.
        shifts (tuple[tuple[int, int], ...]): The shift δ from a patch to the one that each head reads, (row, column)
            in patches.
        head_dims (tuple[int, ...]): Channels D_h of each head's values.
        parameters_before (int): Parameters of the convolution.
        parameters_after (int): Parameters of the attention.
    """

    num_heads: int
    shifts: Tuple[Tuple[int, int], ...]
    head_dims: Tuple[int, ...]
    parameters_before: int
    parameters_after: int

    def __str__(self) -> str:
        least, most = min(self.head_dims), max(self.head_dims)
        widths = f'{least}' if least == most else f'{least} to {most}'
        return (
            f'num_heads={self.num_heads} of {widths} channels: exact, a head for each shift from '
            f'{self.shifts[0]} to {self.shifts[-1]}; '
            f'{self.parameters_before:,} parameters became {self.parameters_after:,}'
        )


@dataclass(frozen=True)
class LayerConversion:
    """A layer of a model that was converted.

    Attributes:
        name (str): Its name in the model.
        kernel_size, stride (tuple[int, ...]): Of the convolution.
        num_heads (int): Number of heads of the attention.
        parameters_before, parameters_after (int): Number of parameters.
        error (float): Of attention, the relative error of its kernel, see :class:`ConversionReport`; of a convolution,
            the bound of its fit, see :class:`~attncnn_plugin.convert.ConvFit`.
        drift (float | None): ‖Y − Y'‖/‖Y‖ of the outputs Y and Y' before and after for the example input, of all calls
            of the layer together; None without an example, or where the model does not use the layer.
    """

    name: str
    kernel_size: Tuple[int, ...]
    stride: Tuple[int, ...]
    num_heads: int
    parameters_before: int
    parameters_after: int
    error: float
    drift: Optional[float] = None


@dataclass(frozen=True, eq=False)
class ModelConversionReport:
    """What the conversion of a model's layers did; as a string, a table.

    Attributes:
        layers (tuple[LayerConversion, ...]): The layers, in the order of the model.
        parameters_before, parameters_after (int): Number of parameters of the whole model.
        drift (float | None): ‖Y − Y'‖/‖Y‖ of the model's outputs for the example input; None where it was not run,
            or the outputs cannot be compared, for instance where their sizes depend on values.
        replaced (dict[Parameter, Succession]): What took the place of each old parameter, for
            :func:`~attncnn_plugin.pruning.replace_parameters`.
    """

    layers: Tuple[LayerConversion, ...]
    parameters_before: int
    parameters_after: int
    drift: Optional[float] = None
    replaced: Replaced = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [['layer', 'kernel', 'stride', 'heads', 'parameters', 'error', 'drift']]
        for layer in self.layers:
            rows.append(
                [
                    layer.name,
                    _size(layer.kernel_size),
                    _size(layer.stride),
                    str(layer.num_heads),
                    _change(layer.parameters_before, layer.parameters_after),
                    f'{layer.error:.2g}',
                    'not run' if layer.drift is None else f'{layer.drift:.2g}',
                ]
            )
        drift = 'not known' if self.drift is None else f'{self.drift:.2g}'
        rows.append(['model', '', '', '', _change(self.parameters_before, self.parameters_after), '', drift])
        if self.drift is None and all(layer.drift is None for layer in self.layers):
            rows = [row[:-1] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return '\n'.join('  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _size(values: Sequence[int]) -> str:
    return '×'.join(map(str, values))


def _change(before: int, after: int) -> str:
    return f'{_short(before)} → {_short(after)}'


def _short(number: int) -> str:
    """Returns three digits and a power of a thousand, such as 999, 2.36M, 11.2G."""
    value, unit = float(number), 0
    while value >= 999.5:
        value, unit = value / 1000, unit + 1
    return f'{value:.3g}{["", "k", "M", "G", "T", "P", "E"][unit]}'
