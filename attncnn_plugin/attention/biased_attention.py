"""softmax(q·k/√D_k + b) v with position biases b and, if they have one, a null key (Li et al. 2021, eq. 1 and 2)."""

import torch.nn.functional as F
from torch import Tensor

from .softmax import softmax


def attend_shared(query: Tensor, key: Tensor, tokens: Tensor, bias: Tensor, channels_first: bool = False) -> Tensor:
    """Returns softmax(q·k/√D_k + b) v of heads that share their values. A null key has the q·k 0, and the value 0.

    Args:
        query (Tensor): ``(…, N_h, Q, D_k)``.
        key (Tensor): ``(…, N_h, K, D_k)``.
        tokens (Tensor): The values of all heads, ``(…, K, D)``.
        bias (Tensor): b, at least float32, ``(N_h, Q, K)`` or ``(…, N_h, Q, K)``, with a null key K + 1.
        channels_first (bool): As for :func:`shared_heads`; on CPUs alone. Defaults to False.

    Returns:
        Tensor: ``(…, N_h, Q, D)``.
    """
    if query.device.type == 'cpu':
        return shared_heads(probabilities(query, key, bias), tokens, channels_first)
    values = tokens.unsqueeze(-3).expand(*key.shape[:-1], -1)
    null = (0, 0, 0, bias.shape[-1] - key.shape[-2])
    return F.scaled_dot_product_attention(query, F.pad(key, null), F.pad(values, null), attn_mask=bias.to(query.dtype))


def shared_heads(probs: Tensor, tokens: Tensor, channels_first: bool = False) -> Tensor:
    """Heads of probabilities ``(…, N_h, Q, K)`` that share their values ``(…, K, D)``, by one product.

    Args:
        probs (Tensor): Probabilities.
        tokens (Tensor): Values.
        channels_first (bool): Whether the heads lie in memory as ``(…, D, N_h, Q)``. Otherwise they lie as
            ``(…, Q, N_h, D)``, or, so that no copy of many probabilities is kept, as ``(…, N_h, Q, D)``.

    Returns:
        Tensor: ``(…, N_h, Q, D)``.
    """
    num_heads, queries = probs.shape[-3:-1]
    probs = probs.to(tokens.dtype)
    if channels_first:
        heads = tokens.transpose(-2, -1) @ probs.flatten(-3, -2).transpose(-2, -1)  # (…, D, N_h·Q)
        return heads.unflatten(-1, (num_heads, queries)).movedim(-3, -1)
    keys, channels = tokens.shape[-2:]
    if probs.ndim > tokens.ndim and keys > channels:  # the heads are smaller than their probabilities
        heads = probs.flatten(-3, -2) @ tokens  # (…, N_h·Q, D)
        return heads.unflatten(-2, (num_heads, queries))
    heads = probs.transpose(-3, -2).flatten(-3, -2) @ tokens  # (…, Q·N_h, D)
    return heads.unflatten(-2, (queries, num_heads)).transpose(-3, -2)


def probabilities(query: Tensor, key: Tensor, bias: Tensor, dropout: float = 0.0) -> Tensor:
    """Those of the keys of the grid, ``(…, N_h, Q, K)``, at least float32.

    On CPUs the fused kernel has no gradient of the biases; without one more key there are fewer copies to train.
    """
    keys = key.shape[-2]
    scores = query @ (key * key.shape[-1] ** -0.5).transpose(-2, -1)
    if bias.shape[-1] > keys:  # a pad of nothing is a copy too
        scores = F.pad(scores, (0, bias.shape[-1] - keys))
    return F.dropout(softmax(scores + bias), dropout)[..., :keys]
