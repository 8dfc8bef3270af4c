"""The start of Trockman and Kolter 2023, "Mimetic Initialization of Self-Attention Layers" (arXiv 2305.09828).

W^Q W^Kᵀ ≈ 0.7 (Z₁ + I) and W^V W^O ≈ 0.4 (Z₂ − I), with entries of Z from N(0, 1/D), both by their singular value
decomposition, of which a head's queries and keys have the first d parts; with sinusoidal position embeddings.
"""

from typing import List, Tuple

import torch
from torch import Tensor

from .embeddings import set_sine_cosine_embedding
from .vision_transformer import Attention, Transformer

QUERY_KEY, VALUE_OUTPUT = 0.7, 0.4


def start_mimetic(network: Transformer, attentions: List[Attention], embeds: bool, generator: torch.Generator) -> None:
    """Sets queries, keys and values of all layers, and the embedding of absolute positions where the network has it."""
    set_mimetic_values(attentions, generator)
    if embeds:
        set_sine_cosine_embedding(network.module, overwrite=True)
    for attention in attentions:
        products = QUERY_KEY * _noise(attention.num_heads, attention.width, generator, 1)
        attention.set_maps('qk', *factors(products, attention.head_dim))  # each head has a Z₁ of its own


def set_mimetic_values(attentions: List[Attention], generator: torch.Generator) -> None:
    """Sets W^V W^O ≈ 0.4 (Z − I) of all heads together; their biases become 0."""
    for attention in attentions:
        weight, width = attention.weight('v'), attention.width  # (N_h, d, D)
        if weight.flatten(0, 1).shape[0] != width:
            raise ValueError(f"the heads of {attention.name} need {width} channels together: use method='gaussian'")
        ((values,), (outputs,)) = factors(VALUE_OUTPUT * _noise(1, width, generator, -1), width)
        attention.set_maps('v', values.reshape(weight.shape))
        attention.output.weight.data.copy_(outputs.T)
        if attention.output.bias is not None:
            attention.output.bias.data.zero_()


def _noise(number: int, width: int, generator: torch.Generator, sign: int) -> Tensor:
    """Draws Z, and adds I or −I by its sign, ``(number, D, D)``, float64."""
    noise = torch.randn(number, width, width, generator=generator, dtype=torch.float64, device='cpu') / width**0.5
    return noise + sign * torch.eye(width, device='cpu')


def factors(products: Tensor, rank: int) -> Tuple[Tensor, Tensor]:
    """Computes A and B, ``(N, rank, D)``, whose products AᵀB are nearest to some ``(N, D, D)``, by their SVD."""
    left, values, right = torch.linalg.svd(products)
    roots = values[:, :rank, None].sqrt()
    return roots * left.mT[:, :rank], roots * right[:, :rank]
