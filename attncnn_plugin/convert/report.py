"""How near attention comes to the convolution that it was made from.

Attention over pixels is that of Cordonnier et al. 2020 (C20), Theorem 1, attention over patches that of Li et al. 2021
(L21), Theorem 1. Gated attention is that of ConViT (d'Ascoli et al. 2021).
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
class GatedHead:
    """A head of gated attention.

    Attributes:
        position_share (float): σ(λ), the share of its probabilities that is by position.
        center (tuple[float, float] | None): Δ, (row, column) in tokens; None for a head that is not Gaussian, α ≤ 0.
        alpha (float): α of −α‖δ − Δ‖², in 1/tokens².
    """

    position_share: float
    center: Optional[Tuple[float, float]]
    alpha: float


@dataclass(frozen=True)
class GatedReport:
    """What the heads of gated attention look at; as a string, a table.

    Attributes:
        heads (tuple[GatedHead, ...]): The heads.
    """

    heads: Tuple[GatedHead, ...]

    def __str__(self) -> str:
        lines = ['head  by position  alpha   centre']
        for number, head in enumerate(self.heads):
            center = 'not Gaussian' if head.center is None else f'({head.center[0]:.2f}, {head.center[1]:.2f})'
            lines.append(f'{number:<4}  {head.position_share:<11.3f}  {head.alpha:<6.3g}  {center}')
        return '\n'.join(lines)
