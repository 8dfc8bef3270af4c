"""The start of Trockman and Kolter 2023, "Mimetic Initialization of Self-Attention Layers" (arXiv 2305.09828).

W^Q W^Kᵀ ≈ α₁Z₁ + β₁I and W^V W^O ≈ α₂Z₂ − β₂I, with entries of Z from N(0, 1/D), α₁ = β₁ = 0.7 and α₂ = β₂ = 0.4, both
by their singular value decomposition, of which a head's queries and keys have the first d parts; with sinusoidal
position embeddings.
"""

import torch
from torch import Tensor

from .parts import Attention

QUERY_KEY, VALUE_OUTPUT = 0.7, 0.4


def set_mimetic_queries_and_keys(attention: Attention, generator: torch.Generator) -> None:
    """Each head with a Z₁ of its own."""
    width, head_dim = attention.weight('q').shape[-1], attention.head_dim
    products = [_noisy_identity(width, QUERY_KEY, 1.0, generator) for _ in range(attention.num_heads)]
    left, values, right = torch.linalg.svd(torch.stack(products))
    roots = values[:, :head_dim, None].sqrt()
    attention.set_queries_and_keys(roots * left.mT[:, :head_dim], roots * right[:, :head_dim])


def mimetic_values(attention: Attention, generator: torch.Generator) -> Tensor:
    """W^V W^O of all heads together, ``(D, D)``, for rows of tokens."""
    return _noisy_identity(attention.weight('v').shape[-1], VALUE_OUTPUT, -1.0, generator)


def _noisy_identity(width: int, scale: float, sign: float, generator: torch.Generator) -> Tensor:
    """scale·(Z + sign·I)."""
    noise = torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5
    return scale * (noise + sign * torch.eye(width, dtype=torch.float64))
