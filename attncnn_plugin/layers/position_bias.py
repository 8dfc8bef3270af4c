"""Relative position biases of attention over patches, with a null key (L21, sections 3 and 4)."""

import logging
from typing import Tuple

import torch
from torch import Tensor, nn

from .precision import at_least_float32
from .shifts import axis_shifts, resize_grid_table

logger = logging.getLogger(__name__)

# In place of −∞, whose gradient is not a number: e^−10000 is 0 beside any score, and float16 has it.
NEVER = -1e4


class WindowBias(nn.Module):
    """Relative position bias b_δ for the shifts of a window; keys at other shifts are not seen.

    A shift of the window whose key lies outside the grid counts all the same: its key is the *null key*, one more
    key with the value 0, whose bias for a query is log Σ exp(b_δ) over those shifts. So the probabilities of the keys
    inside do not depend on where the border is, and what lies beyond it is zero padding, exactly. L21's Theorem 1
    leaves it out: without it a head that finds no key at its shift spreads over the whole image.

    Args:
        num_heads (int): Number of heads N_h.
        first (tuple[int, int]): The first shift δ of the window, (row, column), in tokens.
        window_size (tuple[int, int]): Number of shifts, (rows, columns).

    Attributes:
        table (Parameter): b, ``(N_h, rows, columns)``. Starts at 0.
    """

    def __init__(
        self,
        num_heads: int,
        first: Tuple[int, int],
        window_size: Tuple[int, int],
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        self.first = tuple(first)
        self.table = nn.Parameter(torch.empty(num_heads, *window_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.table)

    def table_of(self, height: int, width: int) -> Tuple[Tensor, Tuple[int, int]]:
        """The biases to use for a grid, at least float32, and their first shift."""
        return at_least_float32(self.table), self.first

    def forward(self, height: int, width: int) -> Tensor:
        """The biases of every query and key, the null key last: ``(N_h, height·width, height·width + 1)``."""
        table, first = self.table_of(height, width)
        num_heads, *window_size = table.shape
        # Entry of the table, from 0, for every query and key of an axis.
        rows, columns = ((axis_shifts(size, table) - start).long() for size, start in zip((height, width), first))
        seen = [(index >= 0) & (index < n) for index, n in zip((rows, columns), window_size)]
        rows, columns = (index.clamp(0, n - 1) for index, n in zip((rows, columns), window_size))
        keys = table[:, rows[:, None, :, None], columns[None, :, None, :]]  # (N_h, q1, q2, k1, k2)
        keys = keys.masked_fill(~(seen[0][:, None, :, None] & seen[1][None, :, None, :]), NEVER)
        null = self._null(table, first, height, width)
        return torch.cat([keys.reshape(num_heads, height * width, -1), null.reshape(num_heads, -1, 1)], dim=-1)

    @staticmethod
    def _null(table: Tensor, first: Tuple[int, int], height: int, width: int) -> Tensor:
        """log Σ exp(b_δ) over the shifts that lead out of the grid, ``(N_h, height, width)``."""
        num_heads, row_shifts, column_shifts = table.shape

        def outside(size: int, start: int, shifts: int) -> Tensor:  # (q, δ)
            position = torch.arange(size, device=table.device)
            target = position[:, None] + torch.arange(start, start + shifts, device=table.device)
            return (target < 0) | (target >= size)

        # A shift leads out by its column, whatever its row is …
        by_column = table[:, :, None, :].masked_fill(~outside(width, first[1], column_shifts), NEVER).logsumexp(-1)
        # … or by its row, whatever its column is.
        all_columns = table.logsumexp(-1)
        by_row = torch.where(
            outside(height, first[0], row_shifts)[:, :, None], all_columns[:, None, :, None], by_column[:, None]
        )
        return by_row.logsumexp(2)  # over δ1 of (N_h, q1, δ1, q2)


class GridBias(WindowBias):
    """Relative position bias b_δ for all shifts of a grid, and the null key of :class:`WindowBias`.

    On a smaller grid the shifts in the middle of the table are used; for a larger one, and for a checkpoint of another
    size, near shifts keep their biases and far ones are spread, see
    :func:`~attncnn_plugin.layers.encodings.resize_shifts`.

    Args:
        num_heads (int): Number of heads N_h.
        grid_size (tuple[int, int]): Height and width of the grid, in tokens.
    """

    def __init__(self, num_heads: int, grid_size: Tuple[int, int], device=None, dtype=None) -> None:
        height, width = grid_size
        super().__init__(
            num_heads, (1 - height, 1 - width), (2 * height - 1, 2 * width - 1), device=device, dtype=dtype
        )
        self._register_load_state_dict_pre_hook(self._resize_table)

    def table_of(self, height: int, width: int) -> Tuple[Tensor, Tuple[int, int]]:
        table = resize_grid_table(at_least_float32(self.table), (2 * height - 1, 2 * width - 1))
        return table, (1 - height, 1 - width)

    def _resize_table(self, state_dict, prefix, *args) -> None:
        loaded, size = state_dict.get(prefix + 'table'), self.table.shape[1:]
        if (
            loaded is not None
            and loaded.ndim == 3
            and loaded.shape[1] % 2
            and loaded.shape[2] % 2
            and loaded.shape[1:] != size
        ):
            logger.info('Resize %stable from %s to %s shifts.', prefix, tuple(loaded.shape[1:]), tuple(size))
            state_dict[prefix + 'table'] = resize_grid_table(loaded, size)
