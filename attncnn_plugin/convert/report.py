"""How near attention comes to the convolution that it was made from.

Attention over pixels is that of Cordonnier et al. 2020 (C20), Theorem 1, attention over patches that of Li et al. 2021
(L21), Theorem 1.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Optional, Tuple

from .kernels import Convolution, spectral_norms


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
        drift (float | None): ‖Y − Y'‖/‖Y‖ of the outputs Y and Y' before and after for the example input, of all calls
            of the layer together; None without an example, or where the model does not use the layer.
    """

    num_heads: int
    relative_error: float
    bound: float
    guarantee: float
    alpha: Optional[float] = None
    deviation: float = 0.0
    conv: Optional[Convolution] = field(default=None, repr=False, compare=False)
    drift: Optional[float] = None

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
        text = f'error {self.relative_error:.3g}'
        if self.alpha is None:
            text += f', at least {self.bound:.3g} with as many heads'
        return text if self.drift is None else f'{text}, drift {self.drift:.3g}'


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
