"""How near attention comes to the convolution that it was made from.

Attention over pixels is that of Cordonnier et al. 2020 (C20), Theorem 1, attention over patches that of Li et al. 2021
(L21), Theorem 1.
"""

from dataclasses import dataclass
from typing import Tuple


@dataclass(frozen=True)
class ConversionReport:
    """How near attention over pixels comes to its convolution.

    All errors are ‖M − M'‖/‖M‖ in the Frobenius norm, and 0 for a kernel of zeros. M is the kernel of the convolution,
    a row for each of its K positions, and M' that of the attention.

    Attributes:
        num_heads (int): Number of heads N.
        relative_error (float): The error of the layer, as its parameters are stored.
        bound (float): The error of the best matrix of rank N (Eckart-Young): no layer with N heads that look at
            positions alone has less.
        guarantee (float): The error of the best matrix of rank N − 1: the layer never has more, but for rounding.
    """

    num_heads: int
    relative_error: float
    bound: float
    guarantee: float

    def __str__(self) -> str:
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
        relative_error (float): ‖M − M'‖/‖M‖ in the Frobenius norm, of the matrices between patches: 0 unless heads are
            narrower than the convolution needs.
        parameters_before (int): Parameters of the convolution.
        parameters_after (int): Parameters of the attention.
    """

    num_heads: int
    shifts: Tuple[Tuple[int, int], ...]
    head_dims: Tuple[int, ...]
    relative_error: float
    parameters_before: int
    parameters_after: int

    def __str__(self) -> str:
        least, most = min(self.head_dims), max(self.head_dims)
        widths = f'{least}' if least == most else f'{least} to {most}'
        exactness = 'exact' if self.relative_error == 0 else f'relative error {self.relative_error:.3g}'
        return (
            f'num_heads={self.num_heads} of {widths} channels: {exactness}, a head for each shift from '
            f'{self.shifts[0]} to {self.shifts[-1]}; '
            f'{self.parameters_before:,} parameters became {self.parameters_after:,}'
        )
