"""Position encodings: scores of heads as functions of the shift δ = k − q (Cordonnier et al. 2020 (C20), eq. 8 to 19).

A constant added to all scores of a query changes nothing after softmax; the scores here are up to such constants. A
*separable* encoding has scores f(q1, k1) + g(q2, k2), and ``axis_scores`` that return both terms. Encodings take
``device`` and ``dtype`` of their parameters too, as ``nn.Linear``.
"""

from functools import partial
from typing import Any, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor, nn

from .precision import at_least_float32, widest_float
from .shifts import at_shifts, resize_loaded, windows
from .softmax import softmax, without_subnormals
from .window import shown


class GaussianHeads(NamedTuple):
    """Centres and shapes of Gaussian heads, whose score is −½(δ − Δ)ᵀΣ⁻¹(δ − Δ) (C20, eq. 9 and 19).

    Attributes:
        center (Tensor): Δ in tokens, an entry for each axis, ``(N_h, ndim)``.
        factor (Tensor): M in 1/tokens with Σ⁻¹ = MMᵀ, ``(N_h, ndim, ndim)``.
    """

    center: Tensor
    factor: Tensor


class QuadraticEncoding(nn.Module):
    """Quadratic encoding, −α‖δ − Δ‖² (C20, eq. 9). Separable.

    The scale is kept as ``sqrt_precision`` = 1/σ, with α = 1/(2σ²), so that α ≥ 0 whatever the optimizer does.

    Args:
        num_heads (int): Number of heads N_h.
        ndim (int): Number of axes of the grid. Defaults to 2.

    Attributes:
        center (Parameter): Δ in tokens, (row, column), ``(N_h, ndim)``. Starts at N(0, 2²), as in the released code.
        sqrt_precision (Parameter): 1/σ in 1/tokens, ``(N_h,)``. Starts at N(1, 0.01²), α near 1/2.
    """

    def __init__(self, num_heads: int, ndim: int = 2, **dd: Any) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.empty(num_heads, ndim, **dd))
        self.sqrt_precision = nn.Parameter(torch.empty(num_heads, **dd))
        nn.init.normal_(self.center, std=2.0)
        nn.init.normal_(self.sqrt_precision, mean=1.0, std=0.01)

    def gaussian_heads(self) -> GaussianHeads:
        """Returns Δ and M = I/σ, at least float32."""
        center = at_least_float32(self.center)
        factor = torch.diag_embed(at_least_float32(self.sqrt_precision)[:, None].expand(center.shape))
        return GaussianHeads(center, factor)

    def axis_scores(self, size: Sequence[int]) -> Tuple[Tensor, ...]:
        """Returns the terms on a grid of ``size``, ``(N_h, n, n)`` for an axis of n tokens, at least float32."""
        positions = (torch.arange(n, device=self.center.device) for n in size)
        return tuple(self.scores_along(axis, own - own[:, None]) for axis, own in enumerate(positions))

    def scores_along(self, axis: int, shift: Tensor) -> Tensor:
        """Returns scores along one axis, ``(N_h, Q, K)``, of shifts ``(Q, K)`` to keys that are consecutive pixels.

        They are at most 0, at least float32.
        """
        alpha = at_least_float32(self.sqrt_precision).square()[:, None, None] / 2
        center = at_least_float32(self.center[:, axis, None, None])
        shift = shift.to(center.dtype)
        # δ0, the shift to the key nearest to q + Δ inside the grid. With it as the origin of the scores,
        #   (δ − Δ)² − (δ0 − Δ)² = (δ − δ0)(δ + δ0 − 2Δ),
        # no two large numbers are ever subtracted, however far the centre lies and however large α is.
        nearest = center.detach().round().clamp(shift[:, :1], shift[:, -1:])
        return -alpha * (shift - nearest) * (shift + nearest - 2 * center)


class GeneralizedQuadraticEncoding(nn.Module):
    """Generalized quadratic encoding, −½(δ − Δ)ᵀΣ⁻¹(δ − Δ) (C20, eq. 19). Not separable: Σ⁻¹ has a cross term.

    Args:
        num_heads (int): Number of heads N_h.

    Attributes:
        center (Parameter): Δ as of :class:`QuadraticEncoding`, ``(N_h, 2)``.
        sqrt_precision (Parameter): A factor M of Σ⁻¹ = MMᵀ, in 1/tokens, ``(N_h, 2, 2)``. Starts at I + N(0, 0.01²).
    """

    def __init__(self, num_heads: int, **dd: Any) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.empty(num_heads, 2, **dd))
        self.sqrt_precision = nn.Parameter(torch.empty(num_heads, 2, 2, **dd))
        nn.init.normal_(self.center, std=2.0)
        nn.init.normal_(self.sqrt_precision, std=0.01)
        self.sqrt_precision.data.diagonal(dim1=1, dim2=2).add_(1)

    def gaussian_heads(self) -> GaussianHeads:
        """Returns Δ and M, at least float32."""
        return GaussianHeads(at_least_float32(self.center), at_least_float32(self.sqrt_precision))

    def shift_scores(self, size: Sequence[int]) -> Tensor:
        """Returns the scores of all shifts of a grid, ``(N_h, 2·H − 1, 2·W − 1)``, those of a shift near Δ at 0.

        The shifts of each axis go from the last to the first. The scores are in float64 where the device has it: for a
        head that is far away, or thin and oblique, Mᵀ(δ − Δ) is a small difference of large numbers.
        """
        axes = []
        for n, center in zip(size, self.center.to(widest_float(self.center)).T[..., None]):
            shift = torch.arange(n - 1, -n, -1, device=center.device, dtype=center.dtype)
            # As in one dimension, with the shift δ0 near Δ as the origin of the scores,
            #   ‖Mᵀ(δ − Δ)‖² − ‖Mᵀ(δ0 − Δ)‖² = Mᵀ(δ − δ0) · Mᵀ(δ + δ0 − 2Δ).
            nearest = center.detach().round().clamp(1 - n, n - 1)
            axes.append((shift - nearest, shift + nearest - 2 * center))  # (N_h, 2·n − 1)
        of_rows, of_columns = self.sqrt_precision.to(axes[0][0])[..., None, None].unbind(1)
        difference, total = (
            of_rows * row[:, None, :, None] + of_columns * column[:, None, None] for row, column in zip(*axes)
        )
        return -(difference * total).sum(1) / 2

    def chain_probs(self, size: Sequence[int]) -> Tuple[Tensor, Tensor]:
        """Returns P(k1 | q1, δ2) and P(k2 | q), whose product is P(k | q), at least float32.

        A key's row depends on the query's column only by δ2. So there are fewer entries than pairs,
        ``(N_h, H, H, 2·W − 1)`` at (q1, k1, δ2) and ``(H, W, N_h, W)`` at (q1, q2, k2), and float64 costs little. Keys
        and shifts go from the last to the first, so that the rows of all pairs are a view, which takes little memory.
        """
        height, width = size
        dtype = torch.promote_types(self.center.dtype, torch.float32)
        scores = windows(self.shift_scores(size).mT, height).movedim(1, -1)  # (N_h, q1, k1, δ2)
        largest = scores.detach().amax(2, keepdim=True)
        rows = (scores - largest).to(dtype).exp()
        total = rows.sum(2, keepdim=True)
        columns = windows((largest + total.log()).squeeze(2).transpose(0, 1), width).transpose(1, 2)
        return without_subnormals(rows / total), softmax((columns - columns.detach().amax(-1, keepdim=True)).to(dtype))


class RelativeTables(nn.Module):
    """A vector for every row shift and every column shift, one after the other: r_δ = [R[δ1]; C[δ2]] (C20, 4.3).

    The tables refuse a grid larger than ``max_size``; those of a checkpoint for another grid are resized while they
    load.

    Args:
        dim (int): Length D_p of r_δ, half of it for rows and half for columns; even.
        max_size (tuple[int, int]): Height and width, in tokens, of the largest grid.

    Raises:
        ValueError: A ``dim`` that cannot be cut in half; an invalid ``max_size``.

    Attributes:
        row_table (Parameter): R, ``(2·max_height − 1, D_p/2)``, starts at N(0, 1).
        column_table (Parameter): C, ``(2·max_width − 1, D_p/2)``, starts at N(0, 1).
    """

    def __init__(self, dim: int, max_size: Tuple[int, int], **dd: Any) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f'dim={dim} must be even: half of r_δ = [R[δ1]; C[δ2]] is for rows, half for columns')
        if not isinstance(max_size, (tuple, list)) or len(max_size) != 2 or min(max_size) < 1:
            raise ValueError(f'max_size={shown(max_size)} must be the height and the width of a grid, at least 1 each')
        self.max_size = max_size
        self.row_table, self.column_table = (nn.Parameter(torch.empty(2 * n - 1, dim // 2, **dd)) for n in max_size)
        for table in (self.row_table, self.column_table):
            nn.init.normal_(table)
        self.register_load_state_dict_pre_hook(partial(resize_loaded, (0,)))

    def forward(self, size: Sequence[int]) -> Tuple[Tensor, ...]:
        """Returns R and C of the shifts of a grid, ``(2·H − 1, D_p/2)`` and ``(2·W − 1, D_p/2)``, at least float32.

        Raises:
            ValueError: The grid is larger than the tables.
        """
        if size[0] > self.max_size[0] or size[1] > self.max_size[1]:
            raise ValueError(
                f'the grid of {size[0]}x{size[1]} tokens is larger than the {self.max_size[0]}x{self.max_size[1]} that '
                'the learned position tables were built for: build the model for the larger size and load the '
                'checkpoint into it, which resizes the tables'
            )
        axes = zip((self.row_table, self.column_table), self.max_size, size)
        return tuple(at_least_float32(table[largest - n : largest + n - 1]) for table, largest, n in axes)


class LearnedEncoding(nn.Module):
    """Learned encoding, vᵀr_δ with r_δ = [R[δ1]; C[δ2]] (C20, 4.3). Separable.

    Args:
        num_heads (int): Number of heads N_h.
        dim, max_size: As of :class:`RelativeTables`.

    Attributes:
        weight (Parameter): v of each head, for R then for C, ``(N_h, D_p)``. Each half starts as the weight of
            ``nn.Linear(D_p/2, N_h)`` (released code of C20).
        tables (RelativeTables): R and C.
    """

    def __init__(self, num_heads: int, dim: int, max_size: Tuple[int, int], **dd: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, dim, **dd))
        self.tables = RelativeTables(dim, max_size, **dd)
        limit = (dim / 2) ** -0.5
        nn.init.uniform_(self.weight, -limit, limit)

    def axis_scores(self, size: Sequence[int]) -> Tuple[Tensor, ...]:
        """Returns the terms on a grid of ``size``, as :meth:`QuadraticEncoding.axis_scores`."""
        halves = at_least_float32(self.weight)[:, None].chunk(2, dim=-1)
        # Not matmul: autocast would round it.
        terms = [(v * table).sum(-1) for v, table in zip(halves, self.tables(size))]
        return tuple(at_shifts(term, n) for term, n in zip(terms, size))


class WindowEncoding(nn.Module):
    """A score of its own for each shift within a window, −∞ outside: its softmax is any distribution over the window.

    Args:
        num_heads (int): Number of heads N_h.
        window_size (Sequence[int]): Size of the window along each axis.

    Attributes:
        weight (Parameter): The scores, ``(N_h, 1, *window_size)``, as a kernel. Starts at 0, uniform attention.
    """

    def __init__(self, num_heads: int, window_size: Sequence[int], **dd: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads, 1, *window_size, **dd))

    def forward(self) -> Tensor:
        """Returns the probabilities of the shifts, ``(N_h, *window_size)``, at least float32."""
        return softmax(at_least_float32(self.weight).flatten(1)).unflatten(1, self.weight.shape[2:])
