"""Where a head looks, and how widely."""

from typing import Optional, Tuple

import torch
from torch import Tensor, nn

from ..layers.encodings import GeneralizedQuadraticEncoding, QuadraticEncoding
from .attention_maps import has_position_scores, position_probs

MAX_WIDTH = 1e3  # tokens: the width of a head that attends to all keys alike


def gaussian_heads(layer: nn.Module) -> Optional[Tuple[Tensor, Tensor]]:
    """Centres Δ and inverse covariances Σ⁻¹ of Gaussian heads (C20, eq. 9 and 19).

    Args:
        layer (nn.Module): An attention layer.

    Returns:
        tuple[Tensor, Tensor] | None: ``(N_h, 2)`` in tokens, (row, column), and ``(N_h, 2, 2)``, float64 on the CPU;
        None for heads of another kind.
    """
    encoding = getattr(layer, 'encoding', None)
    if isinstance(encoding, QuadraticEncoding):
        factor = torch.diag_embed(encoding.sqrt_precision.detach().cpu().double()[:, None].expand(-1, 2))
    elif isinstance(encoding, GeneralizedQuadraticEncoding):
        factor = encoding.sqrt_precision.detach().cpu().double()
    else:
        return None
    return encoding.center.detach().cpu().double(), factor @ factor.mT


def head_centers(
    layer: nn.Module,
    height: int,
    width: int,
    query: Optional[Tuple[int, int]] = None,
    probs: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """The centre of each head and its width, the standard deviation along an axis, √(tr Σ/2).

    For Gaussian heads, C20's eq. 9 and 19, they are those of the encoding: the centre Δ, and for the quadratic one the
    width 1/√(2α). For others they are the mean and the standard deviation of the shifts that a query attends to.

    Args:
        layer (nn.Module): An attention layer.
        height, width (int): Size of the grid in tokens.
        query (tuple[int, int], optional): Row and column of the query. Defaults to the middle of the grid.
        probs (Tensor, optional): Probabilities to use in place of those by position, ``(N_h, H*W, H*W)``: of a layer
            whose scores depend on content, for instance their mean over images. Not for Gaussian heads.

    Returns:
        tuple[Tensor, Tensor]: Centres ``(N_h, 2)`` in tokens, (row, column), and widths ``(N_h,)``, 1000 at most,
        float64 on the CPU.

    Raises:
        ValueError: No term of the scores depends on position alone, and there are no ``probs``; a query outside of the
            grid.
    """
    gaussian = gaussian_heads(layer)
    if gaussian is not None:
        center, precision = gaussian
        variance = 1 / torch.linalg.eigvalsh(precision).clamp(min=MAX_WIDTH**-2)
        return center, variance.mean(-1).sqrt()
    maps = query_maps(layer, height, width, query, probs)
    row, column = middle(height, width) if query is None else query
    rows = torch.arange(height, dtype=torch.float64) - row
    columns = torch.arange(width, dtype=torch.float64) - column
    maps = maps / maps.sum((1, 2), keepdim=True).clamp(min=1e-12)
    center = torch.stack([maps.sum(2) @ rows, maps.sum(1) @ columns], dim=-1)
    second = maps.sum(2) @ rows.square() + maps.sum(1) @ columns.square()
    return center, ((second - center.square().sum(-1)).clamp(min=0) / 2).sqrt()


def query_maps(
    layer: nn.Module,
    height: int,
    width: int,
    query: Optional[Tuple[int, int]] = None,
    probs: Optional[Tensor] = None,
) -> Tensor:
    """The probabilities of the keys for one query, ``(N_h, height, width)``, float64 on the CPU.

    Args, Raises: see :func:`head_centers`.
    """
    index = query_index(query, height, width)
    if probs is None and not has_position_scores(layer):
        raise ValueError(
            f'no term of the scores of layer, terms={layer.terms}, depends on position alone: give probs, '
            'for instance mean_attention_probs_of(model, images)[name]'
        )
    if probs is None and hasattr(layer, 'axis_scores'):  # P[q] = P1[q1] ⊗ P2[q2], without the whole of P
        rows, columns = (scores.detach().cpu().double().softmax(-1) for scores in layer.axis_scores((height, width)))
        return rows[:, index // width, :, None] * columns[:, index % width, None, :]
    probs = position_probs(layer, height, width) if probs is None else probs
    return probs[:, index].detach().cpu().double().unflatten(1, (height, width))


def query_index(query: Optional[Tuple[int, int]], height: int, width: int) -> int:
    """Where a query stands among the tokens, row-major; the middle of the grid for None.

    Raises:
        ValueError: It is outside of the grid.
    """
    row, column = middle(height, width) if query is None else query
    if not (0 <= row < height and 0 <= column < width):
        raise ValueError(
            f'query={tuple(query)} must be a row from 0 to {height - 1} and a column from 0 to {width - 1} of the grid'
        )
    return row * width + column


def middle(height: int, width: int) -> Tuple[int, int]:
    """Row and column of the token in the middle of a grid."""
    return height // 2, width // 2
