"""Self-attention over patches with a relative position bias and a null key (L21, sections 3 and 4)."""
import copy
import logging
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .encodings import at_least_float32, axis_shifts, resize_shifts
from .linear import check_plain_linear, is_plain_linear
from .merged_attention import MergedPatchAttention, attend, attend_merged, merge_matrices, token_major
from .separable import is_exporting

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
        rows, columns = (
            (axis_shifts(size, table) - start).long() for size, start in zip((height, width), first))
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
            outside(height, first[0], row_shifts)[:, :, None], all_columns[:, None, :, None], by_column[:, None])
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
            num_heads, (1 - height, 1 - width), (2 * height - 1, 2 * width - 1), device=device, dtype=dtype)
        self._register_load_state_dict_pre_hook(self._resize_table)

    def table_of(self, height: int, width: int) -> Tuple[Tensor, Tuple[int, int]]:
        table = resize_grid_table(at_least_float32(self.table), (2 * height - 1, 2 * width - 1))
        return table, (1 - height, 1 - width)

    def _resize_table(self, state_dict, prefix, *args) -> None:
        loaded, size = state_dict.get(prefix + 'table'), self.table.shape[1:]
        if (loaded is not None and loaded.ndim == 3 and loaded.shape[1] % 2 and loaded.shape[2] % 2
                and loaded.shape[1:] != size):
            logger.info('Resize %stable from %s to %s shifts.', prefix, tuple(loaded.shape[1:]), tuple(size))
            state_dict[prefix + 'table'] = resize_grid_table(loaded, size)


class PatchAttention(nn.Module):
    """Multi-head self-attention over a grid of tokens (L21, eq. 1 and 2), heads as wide as the token: D_h = D.

    Scores are q·k/√D + b_δ; queries, keys and values have no biases, so that the null key can be zero.

    Args:
        dim (int): Channels D of a token and of a head.
        num_heads (int): Number of heads N_h.
        position (WindowBias): The relative position bias.
        out_dim (int, optional): Channels of the output. Defaults to ``dim``.
        bias (bool): Whether the output has a bias. Defaults to True.
        attn_drop (float): Dropout rate of the attention probabilities. Defaults to 0.

    Attributes:
        query, key, value (nn.Linear): W^Q, W^K and W^V, D to N_h·D.
        out (nn.Linear): W^O, N_h·D to ``out_dim``.
    """

    def __init__(
            self,
            dim: int,
            num_heads: int,
            position: WindowBias,
            out_dim: Optional[int] = None,
            bias: bool = True,
            attn_drop: float = 0.,
            device=None,
            dtype=None,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.dim = dim
        self.num_heads = num_heads
        self.attn_drop = attn_drop
        self.position = position
        self.query = nn.Linear(dim, num_heads * dim, bias=False, **dd)
        self.key = nn.Linear(dim, num_heads * dim, bias=False, **dd)
        self.value = nn.Linear(dim, num_heads * dim, bias=False, **dd)
        self.out = nn.Linear(num_heads * dim, dim if out_dim is None else out_dim, bias, **dd)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.query, self.key, self.value, self.out):
            nn.init.trunc_normal_(linear.weight, std=0.02)
        if self.out.bias is not None:
            nn.init.zeros_(self.out.bias)
        self.position.reset_parameters()

    def extra_repr(self) -> str:
        return f'dim={self.dim}, num_heads={self.num_heads}'

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, D)`` to ``(B, H, W, D_out)``, for any H and W."""
        batch, height, width, dim = x.shape
        bias = self.position(height, width)
        dropout = self.attn_drop if self.training else 0.
        if self._merging_is_cheaper(batch * height * width):
            query_key, value_out = merge_matrices(*self._weights(), self.num_heads)
            return attend_merged(
                x,
                lambda tokens: F.linear(tokens, query_key),
                lambda heads: F.linear(heads, value_out, self.out.bias),
                token_major(bias),
                dropout)
        # (N, B, D), so that the heads of all images, (B·N_h, N, D), are a view of what the linear maps put out.
        tokens = x.reshape(batch, height * width, dim).transpose(0, 1).contiguous()
        query, key, value = (
            linear(tokens).unflatten(2, (self.num_heads, dim)).permute(1, 2, 0, 3)
            for linear in (self.query, self.key, self.value))
        heads = attend(query, key, value, bias, dropout)
        return self.out(heads.transpose(1, 2).reshape(batch, height, width, self.out.in_features))

    def merge(self) -> MergedPatchAttention:
        """The same attention with the matrices of a head multiplied; this layer stays as it is.

        Raises:
            RuntimeError: One of its linear maps is no plain linear layer any more.
        """
        for name in ('query', 'key', 'value', 'out'):
            check_plain_linear(name, getattr(self, name))
        merged = MergedPatchAttention(
            self.dim,
            self.num_heads,
            copy.deepcopy(self.position),
            out_dim=self.out.out_features,
            bias=self.out.bias is not None,
            attn_drop=self.attn_drop,
            device='meta',  # no random numbers are drawn
            dtype=self.out.weight.dtype).to_empty(device=self.out.weight.device)
        merged.load_state_dict(self.state_dict())
        return merged.requires_grad_(self.out.weight.requires_grad).train(self.training)

    def _weights(self) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.query.weight, self.key.weight, self.value.weight, self.out.weight

    def _merging_is_cheaper(self, tokens: int) -> bool:
        """Whether the products of the matrices cost less than they save in a pass over T tokens.

        W^Q W^Kᵀ costs N_h·D³ multiply-adds and saves N_h·T·D², W^V W^O costs N_h·D²·D_out and saves N_h·T·D².
        """
        if not all(map(is_plain_linear, (self.query, self.key, self.value, self.out))):
            return False
        # A size that an exported program is to take later cannot decide now.
        return not is_exporting() and 2 * tokens > self.dim + self.out.out_features


def resize_grid_table(table: Tensor, size: Tuple[int, int]) -> Tensor:
    """A table of biases ``(N_h, rows, columns)`` for other numbers of shifts."""
    for axis, length in ((1, size[0]), (2, size[1])):
        if table.shape[axis] != length:
            table = resize_shifts(table.movedim(axis, 0).flatten(1), length).unflatten(
                1, table.movedim(axis, 0).shape[1:]).movedim(0, axis)
    return table
