"""The attention layers of Cordonnier et al. 2020 (C20), dense: what the benchmarks compare with.

Scores, probabilities and values are einsums over all pairs of pixels, as in the code that the paper published; written
from its equations, for the grid that a layer is built for. Queries have the indices i, j and keys k, l, row first.
Parameters have the names of this package's, so that weights go from one to the other.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def axis_shifts(size: int) -> Tensor:
    """δ = k − q of an axis, ``(size, size)``."""
    position = torch.arange(size)
    return position[None, :] - position[:, None]


def grid_shifts(height: int, width: int) -> Tensor:
    """δ = k − q of every query and key, ``(H, W, H, W, 2)``."""
    rows, columns = axis_shifts(height)[:, None, :, None], axis_shifts(width)[None, :, None, :]
    return torch.stack(torch.broadcast_tensors(rows, columns), dim=-1).to(torch.get_default_dtype())


class DenseAttention(nn.Module):
    """What the layers have in common: the dropout of probabilities and the linear map of the heads.

    Args:
        dim (int): Channels D.
        num_heads (int): Number of heads N_h.
        height, width (int): The grid in tokens.
        attn_drop (float): Dropout rate of the probabilities. Defaults to 0.
    """

    def __init__(self, dim: int, num_heads: int, height: int, width: int, attn_drop: float = 0.0) -> None:
        super().__init__()
        self.dim, self.num_heads, self.height, self.width = dim, num_heads, height, width
        self.attn_drop = nn.Dropout(attn_drop)
        self.value = nn.Linear(num_heads * dim, dim)

    def softmax(self, scores: Tensor) -> Tensor:
        """Over the two axes of keys, the last ones."""
        return scores.reshape(*scores.shape[:-2], -1).softmax(dim=-1).view(scores.shape)

    def map_heads(self, values: Tensor) -> Tensor:
        """``(B, H, W, N_h, D)`` to ``(B, H, W, D)``."""
        return self.value(values.contiguous().view(-1, self.height, self.width, self.num_heads * self.dim))


class DenseGaussian(DenseAttention):
    """Scores u·R of a vector u a head and a constant R[q, k]; the probabilities are the same for all images."""

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, D)`` to the same."""
        scores = torch.einsum('ijkld,hd->ijhkl', self.shifts, self.head_vectors())
        probs = self.attn_drop(self.softmax(scores))  # one mask for the batch
        return self.map_heads(torch.einsum('ijhkl,bkld->bijhd', probs, x))


class DenseQuadratic(DenseGaussian):
    """−α‖δ − Δ‖² = u·(δ1, δ2, ‖δ‖²) + constant, u = α·(2Δ1, 2Δ2, −1) (C20, eq. 9 and section 3).

    Args:
        See :class:`DenseAttention`.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.center = nn.Parameter(2 * torch.randn(self.num_heads, 2))
        self.sqrt_precision = nn.Parameter(1 + 0.01 * torch.randn(self.num_heads))
        shifts = grid_shifts(self.height, self.width)
        squared_norm = shifts.square().sum(-1, keepdim=True)
        self.register_buffer('shifts', torch.cat([shifts, squared_norm], dim=-1), persistent=False)

    def head_vectors(self) -> Tensor:
        """u, ``(N_h, 3)``."""
        alpha = self.sqrt_precision.square() / 2
        return alpha[:, None] * torch.cat([2 * self.center, -torch.ones_like(self.center[:, :1])], dim=1)


class DenseGeneralizedQuadratic(DenseGaussian):
    """−½(δ − Δ)ᵀΣ⁻¹(δ − Δ), multiplied out, Σ⁻¹ = MMᵀ (C20, eq. 19).

    Args:
        See :class:`DenseAttention`.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.center = nn.Parameter(2 * torch.randn(self.num_heads, 2))
        self.sqrt_precision = nn.Parameter(torch.eye(2) + 0.01 * torch.randn(self.num_heads, 2, 2))
        shifts = grid_shifts(self.height, self.width)
        product = shifts.prod(-1, keepdim=True)
        self.register_buffer('shifts', torch.cat([shifts.square(), 2 * product, shifts], dim=-1), persistent=False)

    def head_vectors(self) -> Tensor:
        """Of δ1², δ2², 2·δ1δ2, δ1 and δ2, ``(N_h, 5)``."""
        inverse = torch.einsum('hij,hkj->hik', self.sqrt_precision, self.sqrt_precision)
        squares = torch.stack([inverse[:, 0, 0], inverse[:, 1, 1], inverse[:, 0, 1]], dim=1)
        return torch.cat([-squares / 2, torch.einsum('hij,hj->hi', inverse, self.center)], dim=1)


class DenseLearned(DenseAttention):
    """vᵀ[R[δ1]; C[δ2]], the vectors looked up for every pair of rows and of columns (C20, 4.3).

    Args:
        max_height, max_width (int): The largest grid of the tables.
        For the others see :class:`DenseAttention`.
    """

    def __init__(self, *args, max_height: int, max_width: int, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._add_tables(max_height, max_width, self.dim)
        limit = self.dim**-0.5
        self.weight = nn.Parameter(torch.empty(self.num_heads, 2 * self.dim).uniform_(-limit, limit))

    def _add_tables(self, max_height: int, max_width: int, dim: int) -> None:
        self.row_table = nn.Parameter(torch.randn(2 * max_height - 1, dim))
        self.column_table = nn.Parameter(torch.randn(2 * max_width - 1, dim))
        self.register_buffer('row_index', axis_shifts(self.height) + max_height - 1, persistent=False)
        self.register_buffer('column_index', axis_shifts(self.width) + max_width - 1, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, D)`` to the same."""
        row_weight, column_weight = self.weight.chunk(2, dim=1)
        row_scores = F.linear(F.embedding(self.row_index, self.row_table), row_weight)  # (i, k, h)
        column_scores = F.linear(F.embedding(self.column_index, self.column_table), column_weight)  # (j, l, h)
        row_scores = row_scores.permute(0, 2, 1)[None, :, None, :, :, None]
        column_scores = column_scores.permute(0, 2, 1)[None, None, :, :, None, :]
        probs = self.softmax(row_scores + column_scores)  # (1, i, j, h, k, l)
        probs = self.attn_drop(probs.expand(len(x), -1, -1, -1, -1, -1))  # a mask an image
        return self.map_heads(torch.einsum('bijhkl,bkld->bijhd', probs, x))


class DenseContent(DenseLearned):
    """(q·k + q·r_δ)/√D with r_δ = [R[δ1]; C[δ2]], and q and k linear maps of the input with biases (C20, 4.3).

    Args:
        See :class:`DenseLearned`.
    """

    def __init__(self, *args, max_height: int, max_width: int, **kwargs) -> None:
        DenseAttention.__init__(self, *args, **kwargs)
        self._add_tables(max_height, max_width, self.dim // 2)
        self.query = nn.Linear(self.dim, self.num_heads * self.dim)
        self.key = nn.Linear(self.dim, self.num_heads * self.dim)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, D)`` to the same."""
        shape = len(x), self.height, self.width, self.num_heads, self.dim
        query, key = self.query(x).view(shape), self.key(x).view(shape)
        scale = math.sqrt(self.dim)
        rows, columns = F.embedding(self.row_index, self.row_table), F.embedding(self.column_index, self.column_table)
        content = torch.einsum('bijhd,bklhd->bijhkl', query, key) / scale
        of_rows, of_columns = query.chunk(2, dim=-1)
        row_scores = torch.einsum('bijhd,ikd->bijhk', of_rows, rows) / scale
        column_scores = torch.einsum('bijhd,jld->bijhl', of_columns, columns) / scale
        probs = self.softmax(content + row_scores[..., :, None] + column_scores[..., None, :])
        return self.map_heads(torch.einsum('bijhkl,bkld->bijhd', self.attn_drop(probs), x))
