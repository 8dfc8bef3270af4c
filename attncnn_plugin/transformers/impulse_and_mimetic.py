"""The starts of Zheng et al. 2025 and of Trockman and Kolter 2023.

Impulses ("Structured Initialization for Vision Transformers", arXiv 2505.19985): queries and keys of a head are factors
of the position embedding's pseudo-inverse on both sides of a matrix of impulses, P⁺ (1000·H + 3·Z) P⁺ᵀ with
H[q, q + Δ] = 1 and noise Z elsewhere, cut to the head's d channels by a singular value decomposition, with the numbers
of the released code: a random embedding of deviation 0.36, both factors of Frobenius norm 7.

Mimetic ("Mimetic Initialization of Self-Attention Layers", arXiv 2305.09828): W^Q W^Kᵀ ≈ 0.7 (Z₁ + I) and
W^V W^O ≈ 0.4 (Z₂ − I), with entries of Z from N(0, 1/D), both by their singular value decomposition, of which a head's
queries and keys have the first d parts; with sinusoidal position embeddings. Impulses have these values too.
"""

from typing import List, Tuple

import torch
from torch import Tensor, nn

from .embeddings import patch_positions, position_embedding, set_sine_cosine_embedding
from .vision_transformer import Attention, Transformer

EMBEDDING_DEVIATION = 18 * 0.02  # 18 times timm's own
FACTOR_NORM = 7.0
IMPULSE, NOISE, NOISE_DEVIATION = 1000.0, 3.0, 0.6
QUERY_KEY, VALUE_OUTPUT = 0.7, 0.4


def start_impulse(network: Transformer, attentions: List[Attention], generator: torch.Generator) -> None:
    """Sets the embedding, and queries, keys and values of all layers."""
    _set_mimetic_values(attentions, generator)
    size = network.grid
    rows = position_embedding(network, size[0] * size[1])
    rows.copy_(EMBEDDING_DEVIATION * torch.randn(rows.shape, generator=generator, device='cpu'))
    embedding = rows[-size[0] * size[1] :].double().cpu()
    embedding = nn.functional.layer_norm(embedding, embedding.shape[-1:])
    values, vectors = torch.linalg.eigh(embedding.T @ embedding)
    of_patches = patch_positions(size) - patch_positions(size)[:, None]
    for attention in attentions:
        rank = min(attention.head_dim, *embedding.shape)
        inverse = vectors[:, -rank:] / values[-rank:] @ vectors[:, -rank:].T @ embedding.T  # (D, patches)
        impulses = (of_patches == attention.shifts[:, None, None]).all(-1).double()  # H[q, k] = 1 at k = q + Δ
        noise = nn.init.trunc_normal_(torch.empty_like(impulses), std=NOISE_DEVIATION, generator=generator)
        target = IMPULSE * impulses + NOISE * noise * (impulses == 0)
        queries_and_keys = factors(inverse @ target @ inverse.T, attention.head_dim)
        attention.set_maps('qk', *(FACTOR_NORM * x / x.norm(dim=(1, 2), keepdim=True) for x in queries_and_keys))


def start_mimetic(network: Transformer, attentions: List[Attention], embeds: bool, generator: torch.Generator) -> None:
    """Sets queries, keys and values of all layers, and the embedding of absolute positions where the network has it."""
    _set_mimetic_values(attentions, generator)
    if embeds:
        set_sine_cosine_embedding(network.module, overwrite=True)
    for attention in attentions:
        products = QUERY_KEY * _noise(attention.num_heads, attention.width, generator, 1)
        attention.set_maps('qk', *factors(products, attention.head_dim))  # each head has a Z₁ of its own


def _set_mimetic_values(attentions: List[Attention], generator: torch.Generator) -> None:
    """Sets W^V W^O ≈ 0.4 (Z − I) of all heads together; their biases become 0."""
    for attention in attentions:
        weight, width = attention.weight('v'), attention.width  # (N_h, d, D)
        if weight.flatten(0, 1).shape[0] != width:
            have = f'the heads of {attention.name} must have {width} channels together'
            raise ValueError(f"{have}, as a token: use method='gaussian'")
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
