"""Tables of vectors for positions: of the shifts of a grid (C20, 4.3) and of its pixels (C20, eq. 3)."""

from typing import Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .precision import Device, Dtype, at_least_float32
from .resizable_tables import ResizableTables
from .shifts import at_shifts, resize_shifts
from .state_dicts import StateDict, StructureError
from .window import shown


class RelativeTables(ResizableTables):
    """A vector for every row shift and every column shift, one after the other: r_δ = [R[δ1]; C[δ2]] (C20, 4.3).

    ``learned`` tables hold the shifts of a grid of ``max_size`` and refuse a larger one; a checkpoint of another
    size is resized while it loads, see :func:`resize_shifts`. ``sinusoidal`` tables have no parameters and no limit.

    Args:
        dim (int): Length D_p of r_δ, half of it for rows and half for columns; even, for ``sinusoidal`` a multiple of
            4.
        max_size (tuple[int, int]): Height and width, in tokens, of the largest grid of ``learned`` tables.
        kind (str): ``'learned'`` or ``'sinusoidal'``. Defaults to ``'learned'``.

    Raises:
        ValueError: ``dim`` cannot be cut in half, or not into sines and cosines; an unknown ``kind``; a ``max_size``
            that is none.

    Attributes:
        row_table (Parameter | None): R, ``(2·max_height − 1, D_p/2)``, starts at N(0, 1).
        column_table (Parameter | None): C, ``(2·max_width − 1, D_p/2)``, starts at N(0, 1).
    """

    def __init__(
        self, dim: int, max_size: Tuple[int, int], kind: str = 'learned', device: Device = None, dtype: Dtype = None
    ) -> None:
        super().__init__()
        check_kind(kind, dim, 'position_dim')
        if dim < 2 or dim % 2:
            raise ValueError(
                f'position_dim={dim} must be even, at least 2: r_δ = [R[δ1]; C[δ2]] has half of its entries for rows '
                'and half for columns'
            )
        check_max_size(max_size)
        self.dim = dim
        self.kind = kind
        if kind == 'learned':
            height, width = max_size
            self.row_table = nn.Parameter(torch.empty(2 * height - 1, dim // 2, device=device, dtype=dtype))
            self.column_table = nn.Parameter(torch.empty(2 * width - 1, dim // 2, device=device, dtype=dtype))
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

    def forward(self, size: Sequence[int], like: Tensor) -> Tuple[Tensor, Tensor]:
        """R of the shifts 1 − height … height − 1 and C of 1 − width … width − 1, at least float32.

        Args:
            size (Sequence[int]): Height and width of the grid.
            like (Tensor): Gives the device and the dtype of sinusoidal tables.

        Returns:
            tuple[Tensor, Tensor]: ``(2·height − 1, D_p/2)`` and ``(2·width − 1, D_p/2)``.

        Raises:
            ValueError: The grid is larger than the learned tables.
        """
        if self.kind == 'sinusoidal':
            like = at_least_float32(like)
            row, column = (sinusoid(2 * n - 1, self.dim // 2, like, first=1 - n) for n in size)
            return row, column
        max_height, max_width = self.max_size
        check_grid(size, self.max_size)
        height, width = size
        row = self.row_table[max_height - height : max_height + height - 1]
        column = self.column_table[max_width - width : max_width + width - 1]
        return at_least_float32(row), at_least_float32(column)

    def shift_scores(self, weight: Tensor, size: Sequence[int]) -> Tuple[Tensor, Tensor]:
        """vᵀr_δ for the rows v of ``weight``, ``(N_h, D_p)``, as its two terms.

        Returns:
            tuple[Tensor, Tensor]: ``(N_h, 2·height − 1)`` and ``(N_h, 2·width − 1)``, at least float32.
        """
        row, column = self(size, like=weight)
        row_weight, column_weight = at_least_float32(weight)[:, None].chunk(2, dim=-1)
        # Not matmul: autocast would round it.
        return (row_weight * row).sum(-1), (column_weight * column).sum(-1)

    def axis_scores(self, weight: Tensor, size: Sequence[int]) -> Tuple[Tensor, Tensor]:
        """:meth:`shift_scores` of every query and key, ``(N_h, height, height)`` and ``(N_h, width, width)``."""
        rows, columns = self.shift_scores(weight, size)
        height, width = size
        return at_shifts(rows, height), at_shifts(columns, width)

    def convert_state_dict(self, state_dict: StateDict, prefix: str) -> None:
        for name, own in self.named_parameters(recurse=False):
            loaded = state_dict.get(prefix + name)
            if loaded is not None and loaded.ndim == 2 and loaded.shape[1] != own.shape[1]:
                raise StructureError(
                    f'{prefix}{name} of the state dict has vectors of {loaded.shape[1]} channels, the model, with '
                    f'position_dim={self.dim}, of {own.shape[1]}: build it as the one that was saved, with '
                    f'position_dim={2 * loaded.shape[1]}. If it is of a version of this package that added the two, '
                    'r_δ = the sum R[δ1] + C[δ2], it is another function: train it again'
                )
        super().convert_state_dict(state_dict, prefix)

    def resizes(self, table: Tensor) -> bool:
        """Whether a loaded table has vectors of the same length, for an odd number of shifts."""
        return table.ndim == 2 and table.shape[1] == self.dim // 2 and len(table) % 2 == 1

    def resize(self, table: Tensor, shape: Sequence[int]) -> Tensor:
        """The table for another number of shifts."""
        return resize_shifts(table, shape[0])


class AbsoluteEncoding(ResizableTables):
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

    def __init__(
        self, dim: int, max_size: Tuple[int, int], kind: str = 'learned', device: Device = None, dtype: Dtype = None
    ) -> None:
        super().__init__()
        check_kind(kind, dim)
        check_max_size(max_size)
        self.dim = dim
        self.kind = kind
        if kind == 'learned':
            self.table = nn.Parameter(torch.empty(*max_size, dim, device=device, dtype=dtype))
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
            check_grid((height, width), self.table.shape[:2])
            table = self.table[:height, :width]
        return x + table.to(x.dtype)

    def resizes(self, table: Tensor) -> bool:
        """Whether a loaded table has vectors of the same length."""
        return table.ndim == 3 and table.shape[2] == self.dim

    def resize(self, table: Tensor, shape: Sequence[int]) -> Tensor:
        """The table for another grid, interpolated."""
        image = table.float().permute(2, 0, 1)[None]
        resized = F.interpolate(image, shape[:2], mode='bicubic', align_corners=False)
        return resized[0].permute(1, 2, 0).to(table.dtype)


def sinusoid(length: int, dim: int, like: Tensor, first: int = 0) -> Tensor:
    """Sines, then cosines, of positions first … first + length − 1, ``(length, dim)`` (Vaswani et al. 2017, 3.5)."""
    position = torch.arange(first, first + length, device=like.device, dtype=like.dtype)
    frequency = 10000 ** (-torch.arange(0, dim, 2, device=like.device, dtype=like.dtype) / dim)
    angle = position[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def check_kind(kind: str, dim: int, name: str = 'dim') -> None:
    """Refuses an unknown kind of tables, and a length that sines and cosines of two axes cannot have."""
    if kind not in ('learned', 'sinusoidal'):
        raise ValueError(f"kind={shown(kind)} of a position encoding is unknown: choose 'learned' or 'sinusoidal'")
    if kind == 'sinusoidal' and dim % 4:
        raise ValueError(
            f'{name}={dim} must be a multiple of 4 for a sinusoidal position encoding, which has sines and cosines of '
            'rows and of columns'
        )


def check_max_size(max_size: Tuple[int, int]) -> None:
    """Refuses what is no size of a grid."""
    if not isinstance(max_size, (tuple, list)) or len(max_size) != 2 or min(max_size) < 1:
        raise ValueError(f'max_size={shown(max_size)} must be the height and the width of a grid, at least 1 each')


def check_grid(size: Sequence[int], max_size: Sequence[int]) -> None:
    """Refuses a grid that is larger than learned tables."""
    if size[0] > max_size[0] or size[1] > max_size[1]:
        raise ValueError(
            f'the grid of {size[0]}x{size[1]} tokens is larger than the {max_size[0]}x{max_size[1]} that the learned '
            'position tables were built for: build the model for the larger size and load the checkpoint into it, '
            'which resizes the tables'
        )
