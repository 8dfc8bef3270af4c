"""Self-attention whose scores depend on content and on position (Cordonnier et al. 2020, C20, eq. 3 and 8)."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from .content_scores import ContentScores
from .parts import parts_at_once
from .precision import at_least_float32, full_precision
from .softmax import softmax


class ContentAttention(ContentScores):
    r"""Attention by content and relative position, by any of the four terms of C20's eq. 8.

    - ``'qk'``: content and content, q·k/√D_k, with q = W_qry x_q + b_q and k = W_key x_k + b_k, D_k channels a head;
    - ``'qr'``: content and position, q·r_δ/√D_k;
    - ``'uk'``: a bias of keys, u·k/√D_k;
    - ``'vr'``: a bias of positions, v·r_δ. Alone it makes the layer a
      :class:`~attncnn_plugin.attention.LearnedAttention`, which is separable and does not depend on content.

    The positions, ``position``, are

    - ``'relative_learned'`` or ``'relative_sinusoidal'``: all terms share r_δ = [R[δ1]; C[δ2]], a vector for the row
      shift after one for the column shift (C20, 4.3). The default, q·k + q·r_δ with biases of q and k, is that of
      C20's results. b_q makes all four terms of it, for (W_qry x + b_q)·k has u·k, and b_q·r_δ is v·r_δ; b_k adds the
      same to all keys, and changes nothing.
    - ``'relative_quadratic'`` or ``'relative_generalized'``: r_δ and v of C20's eq. 9 or 19, so that v·r_δ is the score
      of Gaussian heads. q·r_δ does not go with them: content would choose the sign of ‖δ‖² too.
    - ``'absolute_learned'`` or ``'absolute_sinusoidal'``: an encoding P (C20, eq. 3); q and k are maps of X + P, and
      there is no r_δ.

    Args:
        dim (int): Channels D of the input.
        num_heads (int): Number of heads N_h.
        max_size (tuple[int, int]): Height and width, in tokens, of the largest grid of a learned position encoding.
            Defaults to (16, 16).
        terms (Sequence[str], optional): The terms of the score. Defaults to ``('qk', 'qr')`` for learned and sinusoidal
            r_δ, to ``('qk', 'vr')`` for quadratic ones, to ``('qk',)`` for an absolute encoding.
        position (str): See above. Defaults to ``'relative_learned'``.
        qk_dim (int, optional): Channels D_k of a head's queries and keys. Defaults to ``dim``, as in the released code.
        qk_bias (bool): Whether queries and keys have the biases b_q and b_k, as in the released code. Defaults to True.
        position_dim (int, optional): Length D_p of r_δ, half of it for rows and half for columns. It is ``qk_dim``
            with q·r_δ, the default then. Without, it defaults as in
            :class:`~attncnn_plugin.attention.LearnedAttention`.
        center_std, spread_std (float, optional): Of the initial centres and widths of quadratic positions, see
            :class:`~attncnn_plugin.attention.QuadraticEncoding`. Default to 2 and 0.01 there.
        out_dim (int, optional): Channels of the output. Defaults to ``dim``.
        bias (bool): Whether the output has a bias. Defaults to True.
        attn_drop (float): Dropout rate of the attention probabilities. Defaults to 0.
        head_dim (int, optional): Channels of a head's values, see :class:`~attncnn_plugin.attention.GridAttention`.
            Defaults to None, values that are the input itself.

    Raises:
        ValueError: No, unknown or repeated terms; terms that do not go with ``position``; an unknown ``position``; a
            ``qk_dim`` below 1; a ``position_dim`` that is odd, not ``qk_dim`` with q·r_δ, or without a use; a
            ``center_std`` or ``spread_std`` that is negative or without a use.

    Attributes:
        query, key (nn.Linear | None): W_qry and b_q, W_key and b_k, D to N_h·D_k.
        tables (RelativeTables | None): R and C, D_p/2 channels each.
        key_bias (Parameter | None): u, ``(N_h, D_k)``, starts at N(0, 0.02²).
        position_bias (Parameter | None): v, as long as r_δ, ``(N_h, D_p)``; starts as that of
            :class:`~attncnn_plugin.attention.LearnedEncoding`.
        encoding (nn.Module | None): v of quadratic positions, by centres and widths.
        absolute (AbsoluteEncoding | None): P.
    """

    def heads(self, x: Tensor) -> Tensor:
        if not self.depends_on_content:
            return self._mix_along_axes(x)
        if self.value_proj is None:
            values = at_least_float32(x).flatten(1, 2)[:, None]  # (B, 1, H*W, D), those of all heads
        else:
            values = at_least_float32(self._values(x)).flatten(1, 2).transpose(1, 2)  # (B, N_h, H*W, D_h)
        query, key = self._query_key(x)
        bias = self._bias(x.shape[1:3])
        with full_precision(x.device.type):
            heads = attend(query, key, values, self.attn_drop.p if self._drops else 0.0, bias)
        return heads.to(x.dtype).transpose(1, 2).flatten(2).unflatten(1, x.shape[1:3])


def attend(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, bias: Optional[Tensor] = None) -> Tensor:
    """softmax(q·k + b) v.

    Args:
        query (Tensor): ``(B, N, Q, E)``.
        key (Tensor): ``(B, N, K, E)``, or ``(B, 1, K, E)`` for all heads.
        value (Tensor): ``(B, N, K, D)``, or ``(B, 1, K, D)`` for all heads.
        dropout (float): Dropout rate of the probabilities. Defaults to 0.
        bias (Tensor, optional): b, ``(N, Q, K)``. Defaults to none.

    Returns:
        Tensor: ``(B, N, Q, D)``.
    """
    if query.device.type == 'cpu':  # where the fused kernel trains more slowly, and meets subnormal probabilities
        some = parts_at_once(query.device, query.shape[1] * query.shape[2] * key.shape[2])
        if some is None:
            return attend_dense(query, key, value, dropout, bias)
        parts = zip(query.split(some), key.split(some), value.split(some))
        return torch.cat([attend_dense(*part, dropout, bias) for part in parts])
    batch, heads = query.shape[:2]
    dim, spare = value.shape[-1], query.shape[-1] - value.shape[-1]
    # The fused kernels want values as wide as keys.
    key, value = key.expand(batch, heads, -1, -1), F.pad(value, (0, max(spare, 0))).expand(batch, heads, -1, -1)
    if spare < 0:
        query, key = F.pad(query, (0, -spare)), F.pad(key, (0, -spare))
    mask = None if bias is None else bias.to(query.dtype)
    return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, scale=1.0)[..., :dim]


def attend_dense(query: Tensor, key: Tensor, value: Tensor, dropout: float, bias: Optional[Tensor]) -> Tensor:
    """As :func:`attend`, by all the probabilities at once."""
    scores = torch.matmul(query, key.mT)
    probs = F.dropout(softmax(scores if bias is None else scores + bias), dropout)
    return torch.matmul(probs, value)
