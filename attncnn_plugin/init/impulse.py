"""The start of Zheng et al. 2025, "Structured Initialization for Vision Transformers" (arXiv 2505.19985).

Queries and keys of a head are factors of the position embedding's pseudo-inverse on both sides of a matrix of impulses,
P⁺ (1000·H + 3·Z) P⁺ᵀ with H[q, q + Δ] = 1 and noise Z elsewhere, cut to the head's d channels by a singular value
decomposition, with the numbers of the released code (``timm/models/vision_transformer.py`` of its repository): a random
embedding of deviation 0.36, both factors of Frobenius norm 7.
"""

from typing import Any, List, Tuple

import torch
from torch import Tensor, nn

from .parts import Attention, position_embedding
from .shifts import Size

EMBEDDING_DEVIATION = 18 * 0.02  # 18 times timm's own
FACTOR_NORM = 7.0
IMPULSE, NOISE, NOISE_DEVIATION = 1000.0, 3.0, 0.6


def start_impulse(network: Any, chosen: List[Tuple[Attention, Tensor]], size: Size, generator: torch.Generator) -> None:
    """Sets the embedding, and queries and keys of layers with the heads' shifts ``(N_h, 2)``."""
    patches = size[0] * size[1]
    rows = position_embedding(network, patches)
    rows.copy_(EMBEDDING_DEVIATION * torch.randn(rows.shape, generator=generator))
    embedding = rows[-patches:].double().cpu()
    embedding = nn.functional.layer_norm(embedding, embedding.shape[-1:])
    for attention, shifts in chosen:
        rank = min(attention.head_dim, *embedding.shape)
        values, vectors = torch.linalg.eigh(embedding.T @ embedding)
        inverse = vectors[:, -rank:] / values[-rank:] @ vectors[:, -rank:].T @ embedding.T  # (D, patches)
        impulses = torch.stack([_impulses(shift, size) for shift in shifts])
        noise = torch.empty_like(impulses)
        nn.init.trunc_normal_(noise, std=NOISE_DEVIATION, generator=generator)
        target = IMPULSE * impulses + NOISE * noise * (impulses == 0)
        left, strengths, right = torch.linalg.svd(inverse @ target @ inverse.T)
        factors = []
        for vectors_of_heads in (left.mT, right):
            factor = strengths[:, : attention.head_dim, None].sqrt() * vectors_of_heads[:, : attention.head_dim]
            factors.append(FACTOR_NORM * factor / factor.flatten(1).norm(dim=1)[:, None, None])
        attention.set_queries_and_keys(*factors)


def _impulses(shift: Tensor, size: Size) -> Tensor:
    """H[q, k] = 1 at k = q + Δ, where that is in the grid, ``(patches, patches)``."""
    rows, columns = (
        torch.diag(torch.ones(n - abs(int(d)), dtype=torch.float64), int(d))
        if abs(int(d)) < n
        else torch.zeros(n, n, dtype=torch.float64)
        for n, d in zip(size, shift)
    )
    return torch.kron(rows, columns)
