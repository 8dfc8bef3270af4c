"""The attention layers of Cordonnier et al. 2020 (C20), dense: what the benchmarks compare with.

Scores, probabilities and values are einsums over all pairs of pixels, as in the code that the paper published; written
from its equations, for the grid that a layer is built for. Queries have the indices i, j and keys k, l, row first.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attncnn_plugin.attention import (
    ContentAttention,
    GeneralizedQuadraticAttention,
    LearnedAttention,
    QuadraticAttention,
)


def with_dense_original(model: nn.Module, height: int, width: int) -> nn.Module:
    """Returns a copy of a self-attention network with the same weights and the dense original's attention.

    Args:
        model (nn.Module): A network of this package, in timm's or mmpretrain's form, with learned tables and the
            default terms where it has any.
        height, width (int): The grid in tokens.
    """
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.attn = DENSE[type(block.attn)](block.attn, height, width)
    return model


class DenseAttention(nn.Module):
    """Base of the layers: the softmax and the map of the heads. Subclasses have ``scores(x)``.

    Args:
        layer (nn.Module): The layer of this package whose parameters it has.
        height, width (int): The grid in tokens.
    """

    def __init__(self, layer: nn.Module, height: int, width: int) -> None:
        super().__init__()
        self.layer = layer
        rows, columns = (torch.arange(size)[None, :] - torch.arange(size)[:, None] for size in (height, width))
        self.init_shifts(rows, columns)  # δ = k − q of an axis, (size, size)

    def init_shifts(self, rows: Tensor, columns: Tensor) -> None:
        """Keeps δ1 and δ2 of every query and key, ``(i, j, k, l)``, of the parameters' dtype."""
        delta = torch.broadcast_tensors(rows[:, None, :, None], columns[None, :, None, :])
        self.register_buffer('shifts', self.features(*(axis.to(self.layer.value.weight) for axis in delta)))

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, D)`` to the same."""
        scores = self.scores(x)
        probs = scores.flatten(-2).softmax(dim=-1).view(scores.shape)
        batch = 'b' if probs.dim() == 6 else ''
        return self.layer.value(torch.einsum(f'{batch}ijhkl,bkld->bijhd', probs, x).flatten(3))


class DenseQuadratic(DenseAttention):
    """−α‖δ − Δ‖² = α·(2Δ1, 2Δ2, −1)·(δ1, δ2, ‖δ‖²) + constant (C20, eq. 9 and section 3)."""

    def features(self, rows: Tensor, columns: Tensor) -> Tensor:
        return torch.stack([rows, columns, rows.square() + columns.square()], dim=-1)

    def scores(self, x: Tensor) -> Tensor:
        center, alpha = self.layer.encoding.center, self.layer.encoding.sqrt_precision.square() / 2
        vectors = alpha[:, None] * torch.cat([2 * center, -torch.ones_like(center[:, :1])], dim=1)
        return torch.einsum('ijkld,hd->ijhkl', self.shifts, vectors)


class DenseGeneralized(DenseAttention):
    """−½(δ − Δ)ᵀΣ⁻¹(δ − Δ), multiplied out, Σ⁻¹ = MMᵀ (C20, eq. 19)."""

    def features(self, rows: Tensor, columns: Tensor) -> Tensor:
        return torch.stack([rows.square(), columns.square(), 2 * rows * columns, rows, columns], dim=-1)

    def scores(self, x: Tensor) -> Tensor:
        center, factor = self.layer.encoding.center, self.layer.encoding.sqrt_precision
        inverse = torch.einsum('hij,hkj->hik', factor, factor)
        squares = torch.stack([inverse[:, 0, 0], inverse[:, 1, 1], inverse[:, 0, 1]], dim=1)
        vectors = torch.cat([-squares / 2, torch.einsum('hij,hj->hi', inverse, center)], dim=1)
        return torch.einsum('ijkld,hd->ijhkl', self.shifts, vectors)


class DenseLearned(DenseAttention):
    """vᵀ[R[δ1]; C[δ2]], the vectors looked up for every pair of rows and of columns (C20, 4.3)."""

    @property
    def tables(self) -> nn.Module:
        """R and C."""
        return self.layer.encoding.tables

    def init_shifts(self, rows: Tensor, columns: Tensor) -> None:
        largest = self.tables.max_size
        self.register_buffer('row_index', rows + largest[0] - 1)
        self.register_buffer('column_index', columns + largest[1] - 1)

    def vectors(self) -> list:
        """R[δ1] ``(i, k, D_p)`` and C[δ2] ``(j, l, D_p)``."""
        tables = self.tables
        return [F.embedding(self.row_index, tables.row_table), F.embedding(self.column_index, tables.column_table)]

    def scores(self, x: Tensor) -> Tensor:
        of_rows, of_columns = self.layer.encoding.weight.chunk(2, dim=1)
        rows, columns = self.vectors()
        row_scores = torch.einsum('ikd,hd->ihk', rows, of_rows)[:, None, :, :, None]
        scores = row_scores + torch.einsum('jld,hd->jhl', columns, of_columns)[:, :, None]
        return scores.expand(len(x), -1, -1, -1, -1, -1)


class DenseContent(DenseLearned):
    """(q·k + q·r_δ)/√D with r_δ = [R[δ1]; C[δ2]], and q and k linear maps of the input with biases (C20, 4.3)."""

    @property
    def tables(self) -> nn.Module:
        return self.layer.tables

    def scores(self, x: Tensor) -> Tensor:
        maps = self.layer.query, self.layer.key
        query, key = (linear(x).unflatten(3, (-1, x.shape[3])) for linear in maps)  # (b, i, j, h, D)
        rows, columns = self.vectors()
        of_rows, of_columns = query.chunk(2, dim=-1)
        scores = torch.einsum('bijhd,bklhd->bijhkl', query, key)
        scores = scores + torch.einsum('bijhd,ikd->bijhk', of_rows, rows)[..., :, None]
        scores = scores + torch.einsum('bijhd,jld->bijhl', of_columns, columns)[..., None, :]
        return scores / x.shape[3] ** 0.5


DENSE = {
    ContentAttention: DenseContent,
    GeneralizedQuadraticAttention: DenseGeneralized,
    LearnedAttention: DenseLearned,
    QuadraticAttention: DenseQuadratic,
}
