"""Position encodings: the score of a head as a function of the shift δ = k − q from query to key pixel.

Every encoding gives scores up to a constant per query, which softmax does not see. A *separable* encoding has
scores f(q1, k1) + g(q2, k2) and hands out its two terms as ``axis_scores``; any other hands out ``scores``.
"""

from typing import Sequence, Tuple

import torch
from torch import Tensor, nn

from .attention_layer import GaussianHeads
from .position_tables import RelativeTables
from .precision import Device, Dtype, at_least_float32, widest_float
from .shifts import at_grid_shifts, axis_shifts, over_keys
from .softmax import softmax

# Of the released code of C20: gaussian_init_mu_std and gaussian_init_sigma_std.
CENTER_STD, SPREAD_STD = 2.0, 0.01


class QuadraticEncoding(nn.Module):
    """Quadratic encoding, −α‖δ − Δ‖² (C20, eq. 9). Separable.

    The scale is kept as ``sqrt_precision`` = 1/σ, with α = 1/(2σ²), so that α ≥ 0 whatever the optimizer does.

    Args:
        num_heads (int): Number of heads N_h.
        ndim (int): Number of axes of the grid. Defaults to 2.
        center_std (float): Standard deviation of the initial centres, in tokens. Defaults to 2, that of the released
            code of C20; the paper's N(0, 2·I) reads as √2.
        spread_std (float): Standard deviation of the noise in the initial 1/σ. Defaults to 0.01, that of the released
            code; the paper's 0.01 reads as a variance, 0.1².

    Attributes:
        center (Parameter): Δ in tokens, (row, column), ``(N_h, ndim)``. Starts at 0 plus noise.
        sqrt_precision (Parameter): 1/σ in 1/tokens, ``(N_h,)``. Starts at 1 plus noise, α near 1/2.
    """

    def __init__(
        self,
        num_heads: int,
        ndim: int = 2,
        center_std: float = CENTER_STD,
        spread_std: float = SPREAD_STD,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self.center_std, self.spread_std = check_stds(center_std, spread_std)
        self.center = nn.Parameter(torch.empty(num_heads, ndim, device=device, dtype=dtype))
        self.sqrt_precision = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.center, std=self.center_std)
        nn.init.normal_(self.sqrt_precision, mean=1.0, std=self.spread_std)

    def gaussian_heads(self) -> GaussianHeads:
        """Δ and M = I/σ, at least float32."""
        center = at_least_float32(self.center)
        factor = torch.diag_embed(at_least_float32(self.sqrt_precision)[:, None].expand(center.shape))
        return GaussianHeads(center, factor)

    @property
    def alpha(self) -> Tensor:
        """Width α = 1/(2σ²) of each head, ``(N_h,)``, at least float32."""
        return at_least_float32(self.sqrt_precision).square() / 2

    def axis_scores(self, size: Sequence[int]) -> Tuple[Tensor, ...]:
        """Scores along each axis of a grid of ``size``, ``(N_h, n, n)`` for an axis of n pixels, at most 0."""
        return tuple(self.scores_along(axis, axis_shifts(n, self.center)) for axis, n in enumerate(size))

    def scores_along(self, axis: int, shift: Tensor) -> Tensor:
        """Scores along one axis, at most 0.

        Args:
            axis (int): The axis.
            shift (Tensor): δ of every query and key, ``(Q, K)``, the keys being consecutive pixels.

        Returns:
            Tensor: ``(N_h, Q, K)``, at least float32.
        """
        center = at_least_float32(self.center)[:, axis, None, None]
        shift = shift.to(center.dtype)
        # δ0, the shift to the key nearest to q + Δ inside the grid. With it as the origin of the scores,
        #   (δ − Δ)² − (δ0 − Δ)² = (δ − δ0)(δ + δ0 − 2Δ),
        # no two large numbers are ever subtracted, however far the centre lies and however large α is.
        nearest = center.detach().round().clamp(shift[:, :1], shift[:, -1:])
        return -self.alpha[:, None, None] * (shift - nearest) * (shift + nearest - 2 * center)


class GeneralizedQuadraticEncoding(nn.Module):
    """Generalized quadratic encoding, −½(δ − Δ)ᵀΣ⁻¹(δ − Δ) (C20, eq. 19). Not separable: Σ⁻¹ has a cross term.

    With M = Σ^(−1/2) as the parameter, Σ⁻¹ = MMᵀ is positive semi-definite by construction.

    Args:
        num_heads (int): Number of heads N_h.
        center_std, spread_std (float): Standard deviations of the initial centres and of the noise in the initial M, as
            of :class:`QuadraticEncoding`. Default to 2 and 0.01.

    Attributes:
        center (Parameter): Δ in tokens, (row, column), ``(N_h, 2)``. Starts at 0 plus noise.
        sqrt_precision (Parameter): M = Σ^(−1/2) in 1/tokens, ``(N_h, 2, 2)``. Starts at I plus noise.
    """

    def __init__(
        self,
        num_heads: int,
        center_std: float = CENTER_STD,
        spread_std: float = SPREAD_STD,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self.center_std, self.spread_std = check_stds(center_std, spread_std)
        self.center = nn.Parameter(torch.empty(num_heads, 2, device=device, dtype=dtype))
        self.sqrt_precision = nn.Parameter(torch.empty(num_heads, 2, 2, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.center, std=self.center_std)
        nn.init.normal_(self.sqrt_precision, std=self.spread_std)
        self.sqrt_precision.diagonal(dim1=1, dim2=2).add_(1)

    def gaussian_heads(self) -> GaussianHeads:
        """Δ and M, at least float32."""
        return GaussianHeads(at_least_float32(self.center), at_least_float32(self.sqrt_precision))

    @property
    def inverse_covariance(self) -> Tensor:
        """Σ⁻¹ = MMᵀ of each head, ``(N_h, 2, 2)``, at least float32."""
        return self.gaussian_heads().inverse_covariance

    def shift_scores(self, size: Sequence[int]) -> Tensor:
        """Scores of the shifts of a grid, 1 − height … height − 1 and 1 − width … width − 1, the best of them at 0.

        Returns:
            Tensor: ``(N_h, 2·height − 1, 2·width − 1)``, in float64 where the device has it: for a head that is far
            away, or thin and oblique, Mᵀ(δ − Δ) is a small difference of large numbers.
        """
        height, width = size
        center = self.center.to(widest_float(self.center))
        row_center, column_center = center[:, 0, None, None], center[:, 1, None, None]
        row_shift, column_shift = (
            torch.arange(1 - size, size, device=center.device, dtype=center.dtype) for size in (height, width)
        )
        row_shift = row_shift[:, None]

        with torch.no_grad():
            first, second = self._project(row_shift - row_center, column_shift - column_center)
            best = (first.square() + second.square()).flatten(1).argmin(-1)[:, None, None]
            # δ0, the shift to the best key.
            row = torch.div(best, 2 * width - 1, rounding_mode='floor')
            row_best, column_best = row + (1 - height), best - row * (2 * width - 1) + (1 - width)

        # As in one dimension, with the best shift as the origin of the scores,
        #   ‖Mᵀ(δ − Δ)‖² − ‖Mᵀ(δ0 − Δ)‖² = Mᵀ(δ − δ0) · Mᵀ(δ + δ0 − 2Δ).
        difference = self._project(row_shift - row_best, column_shift - column_best)
        total = self._project(row_shift + row_best - 2 * row_center, column_shift + column_best - 2 * column_center)
        return -(difference[0] * total[0] + difference[1] * total[1]) / 2

    def scores(self, size: Sequence[int]) -> Tensor:
        """Scores of all queries and keys of a grid, ``(N_h, H*W, H*W)``, the best key of each query at 0."""
        scores = self.shift_scores(size)
        best = over_keys(scores.detach(), size, torch.amax).flatten(1)[..., None]
        dtype = torch.promote_types(self.center.dtype, torch.float32)
        return (at_grid_shifts(scores, size) - best).to(dtype)

    def _project(self, row: Tensor, column: Tensor) -> Tuple[Tensor, Tensor]:
        """The two entries of Mᵀ(row, column)ᵀ of every head."""
        factor = self.sqrt_precision.to(row.dtype)[:, :, :, None, None]
        return factor[:, 0, 0] * row + factor[:, 1, 0] * column, factor[:, 0, 1] * row + factor[:, 1, 1] * column


class LearnedEncoding(nn.Module):
    """Learned encoding, vᵀr_δ with r_δ = [R[δ1]; C[δ2]] (C20, 4.3). Separable.

    Args:
        num_heads (int): Number of heads N_h.
        dim (int): Length D_p of r_δ, half of it for rows and half for columns.
        max_size (tuple[int, int]): Height and width, in tokens, of the largest grid of learned tables.
        kind (str): ``'learned'`` or ``'sinusoidal'`` tables R and C. Defaults to ``'learned'``.

    Attributes:
        weight (Parameter): v of each head, for R then for C, ``(N_h, D_p)``. Each half starts as the weight of
            ``nn.Linear(D_p/2, N_h)`` (released code of C20).
        tables (RelativeTables): R and C.
    """

    def __init__(
        self,
        num_heads: int,
        dim: int,
        max_size: Tuple[int, int],
        kind: str = 'learned',
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, dim, device=device, dtype=dtype))
        self.tables = RelativeTables(dim, max_size, kind, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_position_weight(self.weight)

    def axis_scores(self, size: Sequence[int]) -> Tuple[Tensor, Tensor]:
        """Scores along rows ``(N_h, height, height)`` and along columns ``(N_h, width, width)``."""
        return self.tables.axis_scores(self.weight, size)


def check_stds(center_std: float, spread_std: float) -> Tuple[float, float]:
    """Refuses what is no standard deviation."""
    for name, std in (('center_std', center_std), ('spread_std', spread_std)):
        if not 0 <= std < float('inf'):
            raise ValueError(f'{name}={std} must be a standard deviation, at least 0')
    return center_std, spread_std


def init_position_weight(weight: Tensor) -> None:
    """Draws v, ``(N_h, D_p)``, as the weights of two ``nn.Linear(D_p/2, N_h)``, for R and for C (released code)."""
    limit = (weight.shape[1] / 2) ** -0.5
    nn.init.uniform_(weight, -limit, limit)


class WindowEncoding(nn.Module):
    """A score of its own for each shift within a window, −∞ outside: any distribution over the window.

    Args:
        num_heads (int): Number of heads N_h.
        window_size (Sequence[int]): Size of the window along each axis.

    Attributes:
        weight (Parameter): The scores, ``(N_h, *window_size)``. Starts at 0, uniform attention.
    """

    def __init__(self, num_heads: int, window_size: Sequence[int], device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, *window_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self) -> Tensor:
        """The probabilities of the shifts, ``(N_h, *window_size)``, at least float32."""
        return softmax(at_least_float32(self.weight).flatten(1)).reshape(self.weight.shape)
