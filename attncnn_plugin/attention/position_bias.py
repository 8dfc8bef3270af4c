"""Relative position biases of attention over patches, and a null key (Li et al. 2021 (L21), sections 3 and 4)."""

from typing import Sequence, Tuple

import torch
from torch import Tensor, nn

from .precision import Device, Dtype, at_least_float32
from .resizable_tables import ResizableTables
from .shifts import axis_shifts, resize_shift_table
from .state_dicts import StateDict

# In place of −∞, whose gradient is not a number: e^−10000 is 0 beside any score, and float16 has it.
MASK_VALUE = -1e4


class WindowBias(nn.Module):
    """Relative position bias b_δ for the shifts of a window; keys at other shifts are not seen.

    A shift of the window whose key lies outside the grid counts all the same: its key is the *null key*, one more
    key with the value 0, whose bias for a query is log Σ exp(b_δ) over those shifts. So the probabilities of the keys
    inside do not depend on where the border is, and what lies beyond it is zero padding, exactly. L21's Theorem 1
    leaves it out: without it a head that finds no key at its shift spreads over the whole image. Attention that does
    not begin as a convolution does without: with biases of 0 most of a grid's shifts lead out of it, and the null key
    takes 73% of the attention of a 14×14 grid.

    Args:
        num_heads (int): Number of heads N_h.
        first (tuple[int, int]): The first shift δ of the window, (row, column), in tokens.
        window_size (tuple[int, int]): Number of shifts, (rows, columns).
        null_key (bool): Whether there is a null key. Defaults to True.

    Attributes:
        table (Parameter): b, ``(N_h, rows, columns)``. Starts at 0.
        no_null_key (Tensor): True, in state dicts too, where there is no null key. There is no such buffer otherwise.
    """

    def __init__(
        self,
        num_heads: int,
        first: Tuple[int, int],
        window_size: Tuple[int, int],
        null_key: bool = True,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self.first = first[0], first[1]
        self._set_null_key(null_key, device)
        self.table = nn.Parameter(torch.empty(num_heads, *window_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.table)

    @property
    def null_key(self) -> bool:
        """Whether there is a null key."""
        return 'no_null_key' not in self._buffers

    def _set_null_key(self, null_key: bool, device: Device) -> None:
        self._buffers.pop('no_null_key', None)
        if not null_key:
            self.register_buffer('no_null_key', torch.tensor(True, device=device))

    def table_of(self, size: Sequence[int]) -> Tuple[Tensor, Tuple[int, int]]:
        """The biases to use for a grid, at least float32, and their first shift."""
        return at_least_float32(self.table), self.first

    def forward(self, size: Sequence[int]) -> Tensor:
        """The biases of every query and key of a grid, ``(N_h, height·width, height·width)``.

        With a null key there is one more column, its own, the last.
        """
        height, width = size
        table, first = self.table_of(size)
        num_heads, *window_size = table.shape
        # Entry of the table, from 0, for every query and key of an axis.
        rows, columns = ((axis_shifts(n, table) - start).long() for n, start in zip(size, first))
        seen = [(index >= 0) & (index < n) for index, n in zip((rows, columns), window_size)]
        rows, columns = (index.clamp(0, n - 1) for index, n in zip((rows, columns), window_size))
        keys = table[:, rows[:, None, :, None], columns[None, :, None, :]]  # (N_h, q1, q2, k1, k2)
        keys = keys.masked_fill(~(seen[0][:, None, :, None] & seen[1][None, :, None, :]), MASK_VALUE)
        keys = keys.flatten(3).flatten(1, 2)
        if not self.null_key:
            return keys
        return torch.cat([keys, self._null(table, first, height, width).flatten(1)[..., None]], dim=-1)

    @staticmethod
    def _null(table: Tensor, first: Tuple[int, int], height: int, width: int) -> Tensor:
        """log Σ exp(b_δ) over the shifts that lead out of the grid, ``(N_h, height, width)``."""
        num_heads, row_shifts, column_shifts = table.shape

        def outside(size: int, start: int, shifts: int) -> Tensor:  # (q, δ)
            position = torch.arange(size, device=table.device)
            target = position[:, None] + torch.arange(start, start + shifts, device=table.device)
            return (target < 0) | (target >= size)

        # A shift leads out by its column, whatever its row is …
        by_column = table[:, :, None, :].masked_fill(~outside(width, first[1], column_shifts), MASK_VALUE).logsumexp(-1)
        # … or by its row, whatever its column is.
        all_columns = table.logsumexp(-1)
        by_row = torch.where(
            outside(height, first[0], row_shifts)[:, :, None], all_columns[:, None, :, None], by_column[:, None]
        )
        return by_row.logsumexp(2)  # over δ1 of (N_h, q1, δ1, q2)


class GridBias(ResizableTables, WindowBias):
    """Relative position bias b_δ for all shifts of a grid, and the null key of :class:`WindowBias`.

    A state dict says whether there is a null key: the one of another kind changes the layer as it is loaded.

    On a smaller grid the shifts in the middle of the table are used; for a larger one, and for a checkpoint of another
    size, near shifts keep their biases and far ones are spread, see
    :func:`~attncnn_plugin.attention.shifts.resize_shifts`.

    Args:
        num_heads (int): Number of heads N_h.
        grid_size (tuple[int, int]): Height and width of the grid, in tokens.
        null_key (bool): Whether there is a null key. Defaults to True.
    """

    def __init__(
        self,
        num_heads: int,
        grid_size: Tuple[int, int],
        null_key: bool = True,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        height, width = grid_size
        super().__init__(num_heads, (1 - height, 1 - width), (2 * height - 1, 2 * width - 1), null_key, device, dtype)

    def table_of(self, size: Sequence[int]) -> Tuple[Tensor, Tuple[int, int]]:
        height, width = size
        table = resize_shift_table(at_least_float32(self.table), (2 * height - 1, 2 * width - 1))
        return table, (1 - height, 1 - width)

    def follow(self, state_dict: StateDict, prefix: str) -> bool:
        """Takes or loses the null key."""
        null_key = f'{prefix}no_null_key' not in state_dict
        if f'{prefix}table' not in state_dict or null_key == self.null_key:
            return False
        self._set_null_key(null_key, self.table.device)
        return True

    def resizes(self, table: Tensor) -> bool:
        """Whether a loaded table is one of the shifts of a grid."""
        return table.ndim == 3 and table.shape[1] % 2 == 1 and table.shape[2] % 2 == 1

    def resize(self, table: Tensor, shape: Sequence[int]) -> Tensor:
        """The table for another grid."""
        return resize_shift_table(table, shape[1:])
