"""Generalized quadratic heads in their cheapest exact form (C20, eq. 19): P[q, k] = G[k − q] / z[q].

z[q] is the sum of G over the keys of the grid. A table G of rank r, G[δ1, δ2] = Σ_i U_i[δ1] V_i[δ2], is mixed along
rows, then along columns, for r·(H + W) multiply-adds a token and channel in place of H·W.
"""

from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from .shifts import at_grid_shifts, at_shifts, over_keys

# The largest error of a probability at which the factors count as exact.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}

# A multiply-add of the small matrices of the factors takes as long as this many of the large matrix of the head:
# measured on a CPU at 16x16 and 32x32 tokens, 400 channels, batch 1 to 32, the ranks at which the two take as long.
COST_OF_SMALL = 1.4


@dataclass(frozen=True, eq=False)
class LowRankHead:
    """P[q, k] = Σ_i U_i[k1 − q1] V_i[k2 − q2] / z[q].

    Attributes:
        rows (Tensor): U of every query, term and key, ``(H·r, H)``.
        columns (Tensor): V of every query, term and key, ``(W, r·W)``.
        normalizer (Tensor): z, ``(H, W, 1)``.
    """

    rows: Tensor
    columns: Tensor
    normalizer: Tensor

    def mix(self, x: Tensor) -> Tensor:
        """``(B, H, W, D)`` to the same."""
        batch, height, width, dim = x.shape
        mixed = torch.bmm(self.rows.expand(batch, -1, -1), x.reshape(batch, height, width * dim))  # (b, q1·i, k2·d)
        mixed = mixed.reshape(batch * height, self.columns.shape[1], dim)  # (b·q1, i·k2, d)
        mixed = torch.bmm(self.columns.expand(batch * height, -1, -1), mixed)
        return mixed.reshape(x.shape) / self.normalizer


@dataclass(frozen=True, eq=False)
class DenseHead:
    """P[q, k] = G[k − q] / z[q].

    Attributes:
        table (Tensor): G, ``(2·H − 1, 2·W − 1)``.
        normalizer (Tensor): z, ``(H, W, 1)``.
    """

    table: Tensor
    normalizer: Tensor

    def mix(self, x: Tensor) -> Tensor:
        """``(B, H, W, D)`` to the same."""
        batch, height, width, dim = x.shape
        probs = at_grid_shifts(self.table[None], (height, width))
        mixed = torch.bmm(probs.expand(batch, -1, -1), x.reshape(batch, height * width, dim))
        return mixed.reshape(x.shape) / self.normalizer


@dataclass(frozen=True, eq=False)
class ScoredHead:
    """P[q, ·] = softmax_k S[k − q], for a head whose G would underflow for some query.

    Attributes:
        scores (Tensor): S, ``(2·H − 1, 2·W − 1)``, in the precision that it was computed in.
    """

    scores: Tensor

    def mix(self, x: Tensor) -> Tensor:
        """``(B, H, W, D)`` to the same."""
        batch, height, width, dim = x.shape
        best = over_keys(self.scores[None], (height, width), torch.amax).reshape(1, -1, 1)
        probs = (at_grid_shifts(self.scores[None], (height, width)) - best).to(x.dtype).softmax(dim=-1)
        mixed = torch.bmm(probs.expand(batch, -1, -1), x.reshape(batch, height * width, dim))
        return mixed.reshape(x.shape)


ShiftHead = Union[LowRankHead, DenseHead, ScoredHead]


@torch.no_grad()
def cheapest_heads(scores: Tensor, size: Sequence[int], dtype: torch.dtype) -> Sequence[ShiftHead]:
    """The cheapest exact form of every head. The choice depends on values, so they are read on the host.

    Args:
        scores (Tensor): Scores of the shifts, the best of a head at 0, ``(N_h, 2·height − 1, 2·width − 1)``, float64
            where the device has it.
        size (Sequence[int]): Height and width of the grid.
        dtype (torch.dtype): That of the tokens, float32 or float64.
    """
    tables = scores.exp()
    normalizers = over_keys(tables, size, torch.sum)
    left, singular, right = torch.linalg.svd(tables.nan_to_num(), full_matrices=False)
    # An error of at most ε at every shift has singular values of at most ε·√(number of shifts): no fewer terms will do.
    largest_error = TOLERANCE[dtype] * normalizers.amax((1, 2)) * tables[0].numel() ** 0.5
    least = (singular > largest_error[:, None]).sum(-1).tolist()
    # Where all of G that a query sees is near the smallest number of the dtype, its ratios are too coarse.
    representable = (normalizers.flatten(1).amin(-1) > torch.finfo(dtype).tiny / torch.finfo(dtype).eps).tolist()
    heads: List[ShiftHead] = []
    for head, (table, normalizer) in enumerate(zip(tables, normalizers)):
        if not representable[head]:  # or not a number
            heads.append(ScoredHead(scores[head]))
            continue
        factors = (left[head] * singular[head]).to(dtype), right[head].to(dtype)
        low_rank = _low_rank_head(table, normalizer, factors, max(1, least[head]))
        heads.append(low_rank or DenseHead(table.to(dtype), normalizer[..., None].to(dtype)))
    return heads


def _low_rank_head(
    table: Tensor, normalizer: Tensor, factors: Tuple[Tensor, Tensor], least: int
) -> Optional[LowRankHead]:
    """The head by as few terms of its singular value decomposition as make P exact, if they are cheaper.

    Args:
        table (Tensor): G, ``(2·H − 1, 2·W − 1)``.
        normalizer (Tensor): z, ``(H, W)``.
        factors (tuple[Tensor, Tensor]): U·σ ``(2·H − 1, terms)`` and V ``(terms, 2·W − 1)``, in the tokens' dtype.
        least (int): The fewest terms to try.
    """
    (left, right), (height, width) = factors, normalizer.shape
    limit = int(height * width / (COST_OF_SMALL * (height + width)))  # the most terms that are cheaper than the matrix
    for rank in range(least, min(limit, len(right)) + 1):
        # What the rounded factors leave of G; of P it is this, divided by z, at the worst key of each query.
        error = table - left[:, :rank].to(table.dtype) @ right[:rank].to(table.dtype)
        if (over_keys(error.abs()[None], (height, width), torch.amax)[0] / normalizer).max() <= TOLERANCE[left.dtype]:
            rows = at_shifts(left[:, :rank].T, height)  # (r, q1, k1)
            columns = at_shifts(right[:rank], width)  # (r, q2, k2)
            return LowRankHead(
                rows.transpose(0, 1).reshape(height * rank, height),
                columns.transpose(0, 1).reshape(width, rank * width),
                normalizer[..., None].to(left.dtype),
            )
    return None
