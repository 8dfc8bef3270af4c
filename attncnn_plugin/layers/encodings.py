"""Position encodings: the score of a head as a function of the shift δ = k − q from query to key pixel.

Every encoding gives scores up to a constant per query, which softmax does not see. A *separable* encoding has
scores f(q1, k1) + g(q2, k2) and hands out its two terms as ``axis_scores``; any other hands out ``scores``.
"""
import logging
import math
from typing import Callable, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

logger = logging.getLogger(__name__)


def at_least_float32(tensor: Tensor) -> Tensor:
    """float16 and bfloat16 to float32, float32 and float64 as they are: the precision of all scores."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def widest_float(tensor: Tensor) -> torch.dtype:
    """float64 where the tensor's device has it."""
    return torch.float32 if tensor.device.type == 'mps' else torch.float64


def axis_shifts(size: int, like: Tensor) -> Tensor:
    """δ = k − q of every query (rows) and key (columns) of an axis with ``size`` pixels: ``(size, size)``."""
    position = torch.arange(size, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
    return position[None, :] - position[:, None]


class QuadraticEncoding(nn.Module):
    """Quadratic encoding, −α‖δ − Δ‖² (C20, eq. 9). Separable.

    The scale is kept as ``sqrt_precision`` = 1/σ, with α = 1/(2σ²), so that α ≥ 0 whatever the optimizer does.

    Args:
        num_heads (int): Number of heads N_h.
        ndim (int): Number of axes of the grid. Defaults to 2.

    Attributes:
        center (Parameter): Δ in tokens, (row, column), ``(N_h, ndim)``. Starts at N(0, 2·I).
        sqrt_precision (Parameter): 1/σ in 1/tokens, ``(N_h,)``. Starts at 1, that is α = 1/2.
    """

    def __init__(self, num_heads: int, ndim: int = 2, device=None, dtype=None) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.empty(num_heads, ndim, device=device, dtype=dtype))
        self.sqrt_precision = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.center, std=math.sqrt(2))
        nn.init.ones_(self.sqrt_precision)

    @property
    def alpha(self) -> Tensor:
        """Width α = 1/(2σ²) of each head, ``(N_h,)``, at least float32."""
        return at_least_float32(self.sqrt_precision).square() / 2

    def axis_scores(self, *size: int) -> Tuple[Tensor, ...]:
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

    Attributes:
        center (Parameter): Δ in tokens, (row, column), ``(N_h, 2)``. Starts at N(0, 2·I).
        sqrt_precision (Parameter): M = Σ^(−1/2) in 1/tokens, ``(N_h, 2, 2)``. Starts at I plus noise of std 0.01.
    """

    def __init__(self, num_heads: int, device=None, dtype=None) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.empty(num_heads, 2, device=device, dtype=dtype))
        self.sqrt_precision = nn.Parameter(torch.empty(num_heads, 2, 2, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.center, std=math.sqrt(2))
        nn.init.normal_(self.sqrt_precision, std=0.01)
        self.sqrt_precision.diagonal(dim1=1, dim2=2).add_(1)

    @property
    def inverse_covariance(self) -> Tensor:
        """Σ⁻¹ = MMᵀ of each head, ``(N_h, 2, 2)``, at least float32."""
        factor = at_least_float32(self.sqrt_precision)
        return (factor[:, :, None, :] * factor[:, None, :, :]).sum(-1)  # not matmul: autocast would round it

    def shift_scores(self, height: int, width: int) -> Tensor:
        """Scores of the shifts 1 − height … height − 1 and 1 − width … width − 1, the best of them at 0.

        Returns:
            Tensor: ``(N_h, 2·height − 1, 2·width − 1)``, in float64 where the device has it: for a head that is far
            away, or thin and oblique, Mᵀ(δ − Δ) is a small difference of large numbers.
        """
        center = self.center.to(widest_float(self.center))
        row_center, column_center = center[:, 0, None, None], center[:, 1, None, None]
        row_shift, column_shift = (
            torch.arange(1 - size, size, device=center.device, dtype=center.dtype) for size in (height, width))
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
        total = self._project(
            row_shift + row_best - 2 * row_center, column_shift + column_best - 2 * column_center)
        return -(difference[0] * total[0] + difference[1] * total[1]) / 2

    def scores(self, height: int, width: int) -> Tensor:
        """Scores of every query and key, ``(N_h, height*width, height*width)``, the best key of a query at 0."""
        scores = self.shift_scores(height, width)
        best = over_windows(scores.detach(), height, width, torch.amax).flatten(1)[..., None]
        dtype = torch.promote_types(self.center.dtype, torch.float32)
        return (at_grid_shifts(scores, height, width) - best).to(dtype)

    def _project(self, row: Tensor, column: Tensor) -> Tuple[Tensor, Tensor]:
        """The two entries of Mᵀ(row, column)ᵀ of every head."""
        factor = self.sqrt_precision.to(row.dtype)[:, :, :, None, None]
        return factor[:, 0, 0] * row + factor[:, 1, 0] * column, factor[:, 0, 1] * row + factor[:, 1, 1] * column


class RelativeTables(nn.Module):
    """A vector for every row shift and every column shift: r_δ = [R[δ1]; C[δ2]] or R[δ1] + C[δ2] (C20, 4.3).

    ``learned`` tables hold the shifts of a grid of ``max_size`` and refuse a larger one; a checkpoint of another
    size is resized while it loads, see :func:`resize_shifts`. ``sinusoidal`` tables have no parameters and no limit: R
    has sines and cosines in its first half and zeros in the second, C the other way round, so that a row shift never
    equals a column shift.

    Args:
        dim (int): Length D of a vector; a multiple of 4 for ``sinusoidal``.
        max_size (tuple[int, int]): Height and width, in tokens, of the largest grid of ``learned`` tables.
        kind (str): ``'learned'`` or ``'sinusoidal'``. Defaults to ``'learned'``.

    Attributes:
        row_table (Parameter | None): R, ``(2·max_height − 1, D)``, starts at N(0, 1).
        column_table (Parameter | None): C, ``(2·max_width − 1, D)``, starts at N(0, 1).
    """

    def __init__(self, dim: int, max_size: Tuple[int, int], kind: str = 'learned', device=None, dtype=None) -> None:
        super().__init__()
        check_kind(kind, dim)
        check_max_size(max_size)
        self.dim = dim
        self.kind = kind
        if kind == 'learned':
            height, width = max_size
            self.row_table = nn.Parameter(torch.empty(2 * height - 1, dim, device=device, dtype=dtype))
            self.column_table = nn.Parameter(torch.empty(2 * width - 1, dim, device=device, dtype=dtype))
            self._register_load_state_dict_pre_hook(self._resize_tables)
        else:
            self.register_parameter('row_table', None)
            self.register_parameter('column_table', None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in self.parameters(recurse=False):
            nn.init.normal_(table)

    @property
    def max_size(self) -> Tuple[int, int]:
        """Height and width of the largest grid of learned tables."""
        return (self.row_table.shape[0] + 1) // 2, (self.column_table.shape[0] + 1) // 2

    def forward(self, height: int, width: int, like: Tensor) -> Tuple[Tensor, Tensor]:
        """R of the shifts 1 − height … height − 1 and C of 1 − width … width − 1, at least float32.

        Args:
            like (Tensor): Gives the device and the dtype of sinusoidal tables.

        Returns:
            tuple[Tensor, Tensor]: ``(2·height − 1, D)`` and ``(2·width − 1, D)``.

        Raises:
            ValueError: The grid is larger than the learned tables.
        """
        if self.kind == 'sinusoidal':
            like = at_least_float32(like)
            row, column = (sinusoid(2 * size - 1, self.dim // 2, like, first=1 - size) for size in (height, width))
            return F.pad(row, (0, self.dim // 2)), F.pad(column, (self.dim // 2, 0))
        max_height, max_width = self.max_size
        check_grid(height, width, max_height, max_width)
        row = self.row_table[max_height - height:max_height + height - 1]
        column = self.column_table[max_width - width:max_width + width - 1]
        return at_least_float32(row), at_least_float32(column)

    def axis_scores(self, weight: Tensor, height: int, width: int) -> Tuple[Tensor, Tensor]:
        """vᵀ[R[δ1]; C[δ2]] for the rows v of ``weight``, ``(N_h, 2·D)``, as its two terms.

        Returns:
            tuple[Tensor, Tensor]: ``(N_h, height, height)`` and ``(N_h, width, width)``, at least float32.
        """
        row, column = self(height, width, like=weight)
        row_weight, column_weight = at_least_float32(weight)[:, None].chunk(2, dim=-1)
        # v·R[δ] of every shift first, then one per query and key. Not matmul: autocast would round it.
        return at_shifts((row_weight * row).sum(-1), height), at_shifts((column_weight * column).sum(-1), width)

    def _resize_tables(self, state_dict, prefix, *args) -> None:
        for name in ('row_table', 'column_table'):
            own, loaded = getattr(self, name), state_dict.get(prefix + name)
            if (loaded is not None and loaded.ndim == 2 and loaded.shape[1] == own.shape[1] and loaded.shape[0] % 2
                    and loaded.shape[0] != own.shape[0]):
                logger.info('Resize %s from %d to %d shifts.', prefix + name, loaded.shape[0], own.shape[0])
                state_dict[prefix + name] = resize_shifts(loaded, own.shape[0])


class LearnedEncoding(nn.Module):
    """Learned encoding, vᵀr_δ with r_δ = [R[δ1]; C[δ2]] (C20, 4.3). Separable.

    Args:
        num_heads (int): Number of heads N_h.
        dim (int): Length D of a row's or a column's vector.
        max_size (tuple[int, int]): Height and width, in tokens, of the largest grid of learned tables.
        kind (str): ``'learned'`` or ``'sinusoidal'`` tables R and C. Defaults to ``'learned'``.

    Attributes:
        weight (Parameter): v of each head, for R then for C, ``(N_h, 2·D)``, starts as that of ``nn.Linear(2·D, N_h)``.
        tables (RelativeTables): R and C.
    """

    def __init__(
            self,
            num_heads: int,
            dim: int,
            max_size: Tuple[int, int],
            kind: str = 'learned',
            device=None,
            dtype=None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, 2 * dim, device=device, dtype=dtype))
        self.tables = RelativeTables(dim, max_size, kind, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def axis_scores(self, height: int, width: int) -> Tuple[Tensor, Tensor]:
        """Scores along rows ``(N_h, height, height)`` and along columns ``(N_h, width, width)``."""
        return self.tables.axis_scores(self.weight, height, width)


class WindowEncoding(nn.Module):
    """A score of its own for each shift within a window, −∞ outside: any distribution over the window.

    Args:
        num_heads (int): Number of heads N_h.
        window_size (Sequence[int]): Size of the window along each axis.

    Attributes:
        weight (Parameter): The scores, ``(N_h, *window_size)``. Starts at 0, uniform attention.
    """

    def __init__(self, num_heads: int, window_size: Sequence[int], device=None, dtype=None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, *window_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self) -> Tensor:
        """The probabilities of the shifts, ``(N_h, *window_size)``, at least float32."""
        return at_least_float32(self.weight).flatten(1).softmax(dim=-1).reshape(self.weight.shape)


class AbsoluteEncoding(nn.Module):
    """A vector for every pixel, added to the input of queries and keys (C20, eq. 3).

    A ``learned`` encoding holds the pixels of a grid of ``max_size``: a smaller grid takes its upper left part, a
    larger one is refused, a checkpoint of another size is resized while it loads.

    Args:
        dim (int): Length D of a vector; a multiple of 4 for ``sinusoidal``.
        max_size (tuple[int, int]): Height and width, in tokens, of the largest grid of a ``learned`` encoding.
        kind (str): ``'learned'`` or ``'sinusoidal'``. Defaults to ``'learned'``.

    Attributes:
        table (Parameter | None): ``(max_height, max_width, D)``, starts at N(0, 0.02²).
    """

    def __init__(self, dim: int, max_size: Tuple[int, int], kind: str = 'learned', device=None, dtype=None) -> None:
        super().__init__()
        check_kind(kind, dim)
        check_max_size(max_size)
        self.dim = dim
        self.kind = kind
        if kind == 'learned':
            self.table = nn.Parameter(torch.empty(*max_size, dim, device=device, dtype=dtype))
            self._register_load_state_dict_pre_hook(self._resize_table)
        else:
            self.register_parameter('table', None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.table is not None:
            nn.init.normal_(self.table, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """``x + P`` for ``x`` of shape ``(B, H, W, D)``."""
        height, width = x.shape[1], x.shape[2]
        if self.kind == 'sinusoidal':
            row, column = (sinusoid(size, self.dim // 2, at_least_float32(x)) for size in (height, width))
            table = F.pad(row, (0, self.dim // 2))[:, None] + F.pad(column, (self.dim // 2, 0))
        else:
            check_grid(height, width, self.table.shape[0], self.table.shape[1])
            table = self.table[:height, :width]
        return x + table.to(x.dtype)

    def _resize_table(self, state_dict, prefix, *args) -> None:
        loaded = state_dict.get(prefix + 'table')
        if (loaded is not None and loaded.ndim == 3 and loaded.shape[2] == self.dim
                and loaded.shape != self.table.shape):
            logger.info('Resize %stable from %s to %s.', prefix, tuple(loaded.shape), tuple(self.table.shape))
            resized = F.interpolate(
                loaded.float().permute(2, 0, 1)[None], self.table.shape[:2], mode='bicubic', align_corners=False)
            state_dict[prefix + 'table'] = resized[0].permute(1, 2, 0).to(loaded.dtype)


def at_shifts(values: Tensor, size: int) -> Tensor:
    """``(…, 2·size − 1)`` values of the shifts 1 − size … size − 1 to ``(…, size, size)`` of queries and keys."""
    position = torch.arange(size, device=values.device)
    return values[..., position[None, :] - position[:, None] + size - 1]


def at_grid_shifts(table: Tensor, height: int, width: int) -> Tensor:
    """Values of the shifts of a grid, ``(N, 2·height − 1, 2·width − 1)``, to those of all queries and keys.

    Returns:
        Tensor: ``(N, height*width, height*width)``, ``table[δ]`` at δ = k − q.
    """
    if torch.compiler.is_compiling():  # unfold would make the size a constant of the graph
        rows = at_shifts(at_shifts(table, width).movedim(1, -1), height)  # (N, q2, k2, q1, k1)
        return rows.permute(0, 3, 1, 4, 2).reshape(-1, height * width, height * width)
    windows = table.unfold(1, height, 1).unfold(2, width, 1)  # of the last query, … of the first: (N, -q1, -q2, k1, k2)
    return windows.flip(1, 2).reshape(-1, height * width, height * width)


def over_windows(table: Tensor, height: int, width: int, reduce: Callable[..., Tensor]) -> Tensor:
    """The sum or the largest of ``table[δ]`` over the keys of each query, an axis at a time.

    Args:
        table (Tensor): ``(N, 2·height − 1, 2·width − 1)``.
        reduce (Callable): ``torch.sum`` or ``torch.amax``.

    Returns:
        Tensor: ``(N, height, width)``.
    """
    rows = reduce(at_shifts(table, width), dim=-1)  # (N, δ1, q2)
    return reduce(at_shifts(rows.mT, height), dim=-1).mT


def resize_shifts(table: Tensor, length: int) -> Tensor:
    """A table of the vectors of shifts for another number of shifts, ``(2·source + 1, D)`` to ``(length, D)``.

    Fewer shifts are the middle of the table. For more of them the old vectors are put at distances that grow
    geometrically, 1, 1 + r, 1 + r + r², … up to the largest new shift, so that near shifts keep their vectors and
    far ones are spread, as mmpretrain does it; in between they are interpolated.
    """
    source, target = table.shape[0] // 2, length // 2
    if target <= source:
        return table[source - target:source + target + 1]
    if source == 0:  # shift 0 alone
        return table.expand(length, -1)
    steps = torch.arange(source, dtype=torch.float64)
    low, high = 1., float(target)  # r is between: 1 + r + … + r^(source − 1) = target
    for _ in range(60):
        ratio = (low + high) / 2
        low, high = (ratio, high) if (ratio ** steps).sum() < target else (low, ratio)
    distance = (low ** steps).cumsum(0)
    position = torch.cat([-distance.flip(0), distance.new_zeros(1), distance])
    shift = torch.arange(-target, target + 1, dtype=torch.float64).clamp(position[0], position[-1])
    right = torch.searchsorted(position, shift).clamp(min=1)
    left = right - 1
    weight = ((shift - position[left]) / (position[right] - position[left]))[:, None].to(table.device)
    return torch.lerp(table[left].double(), table[right].double(), weight).to(table.dtype)


def sinusoid(length: int, dim: int, like: Tensor, first: int = 0) -> Tensor:
    """Sines, then cosines, of positions first … first + length − 1, ``(length, dim)`` (Vaswani et al. 2017, 3.5)."""
    position = torch.arange(first, first + length, device=like.device, dtype=like.dtype)
    frequency = 10000 ** (-torch.arange(0, dim, 2, device=like.device, dtype=like.dtype) / dim)
    angle = position[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def check_kind(kind: str, dim: int) -> None:
    if kind not in ('learned', 'sinusoidal'):
        raise ValueError(f"kind={kind!r} of a position encoding is unknown: choose 'learned' or 'sinusoidal'")
    if kind == 'sinusoidal' and dim % 4:
        raise ValueError(
            f'dim={dim} must be a multiple of 4 for a sinusoidal position encoding, which has sines and cosines of '
            'rows and of columns')


def check_max_size(max_size: Tuple[int, int]) -> None:
    if not isinstance(max_size, (tuple, list)) or len(max_size) != 2 or min(max_size) < 1:
        raise ValueError(f'max_size={max_size!r} must be the height and the width of a grid, at least 1 each')


def check_grid(height: int, width: int, max_height: int, max_width: int) -> None:
    if height > max_height or width > max_width:
        raise ValueError(
            f'the grid of {height}x{width} tokens is larger than the {max_height}x{max_width} that the learned '
            'position tables were built for: build the model for the larger size and load the checkpoint into it, '
            'which resizes the tables')
