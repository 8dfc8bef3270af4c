"""The start of Zheng et al. 2025, "Structured Initialization for Vision Transformers" (arXiv 2505.19985).

Queries and keys of a head are factors of the position embedding's pseudo-inverse on both sides of a matrix of impulses,
P⁺ (1000·H + 3·Z) P⁺ᵀ with H[q, q + Δ] = 1 and noise Z elsewhere, cut to the head's d channels by a singular value
decomposition, with the numbers of the released code: a random embedding of deviation 0.36, both factors of Frobenius
norm 7. Values are those of a mimetic start.
"""

import torch
from torch import nn

from attncnn_plugin.transformers.embeddings import patch_positions, position_embedding
from attncnn_plugin.transformers.mimetic import factors, set_mimetic_values
from attncnn_plugin.transformers.vision_transformer import find_attention, find_transformer

EMBEDDING_DEVIATION = 18 * 0.02  # 18 times timm's own
FACTOR_NORM = 7.0
IMPULSE, NOISE, NOISE_DEVIATION = 1000.0, 3.0, 0.6
ORDER = [(i // 3 - 1, i % 3 - 1) for i in (4, 1, 5, 3, 7, 0, 2, 6, 8)]  # of the positions of a kernel, by heads


@torch.no_grad()
def start_impulses(model: nn.Module, seed: int = 0) -> None:
    """Sets the embedding of absolute positions, and queries, keys and values of all layers."""
    network, generator = find_transformer(model), torch.Generator().manual_seed(seed)
    attentions = find_attention(network)
    set_mimetic_values(attentions, generator)
    size = network.grid
    rows = position_embedding(network, size[0] * size[1])
    rows.copy_(EMBEDDING_DEVIATION * torch.randn(rows.shape, generator=generator))
    embedding = rows[-size[0] * size[1] :].double()
    embedding = nn.functional.layer_norm(embedding, embedding.shape[-1:])
    values, vectors = torch.linalg.eigh(embedding.T @ embedding)
    of_patches = patch_positions(size) - patch_positions(size)[:, None]
    for attention in attentions:
        shifts = torch.tensor([ORDER[head % 9] for head in range(attention.num_heads)])
        rank = min(attention.head_dim, *embedding.shape)
        inverse = vectors[:, -rank:] / values[-rank:] @ vectors[:, -rank:].T @ embedding.T  # (D, patches)
        impulses = (of_patches == shifts[:, None, None]).all(-1).double()  # H[q, k] = 1 at k = q + Δ
        noise = nn.init.trunc_normal_(torch.empty_like(impulses), std=NOISE_DEVIATION, generator=generator)
        target = IMPULSE * impulses + NOISE * noise * (impulses == 0)
        queries_and_keys = factors(inverse @ target @ inverse.T, attention.head_dim)
        attention.set_maps('qk', *(FACTOR_NORM * x / x.norm(dim=(1, 2), keepdim=True) for x in queries_and_keys))
