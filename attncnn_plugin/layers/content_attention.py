"""Self-attention whose scores depend on content and on position (Cordonnier et al. 2020, C20, eq. 3 and 8)."""

from typing import Any, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .content_scores import ContentScores, one_hot_pixels
from .grid_attention import OutputMap
from .linear import is_exporting, product_is_cheaper
from .parts import parts_at_once
from .precision import at_least_float32, full_precision
from .shifts import at_shifts

# Keys from which on the fused kernel trains no slower on CPUs; at 256 its backward pass takes 1.5 times as long.
FUSED_FROM = 1024


class ContentAttention(ContentScores):
    r"""Attention by content and relative position, by any of the four terms of C20's eq. 8.

    - ``'qk'``: content and content, q·k/√D_k, with q = W_qry x_q + b_q and k = W_key x_k + b_k, D_k channels a head;
    - ``'qr'``: content and position, q·r_δ/√D_k;
    - ``'uk'``: a bias of keys, u·k/√D_k;
    - ``'vr'``: a bias of positions, v·r_δ. Alone it makes the layer a
      :class:`~attncnn_plugin.layers.LearnedAttention`, which is separable and does not depend on content.

    The positions, ``position``, are

    - ``'relative_learned'`` or ``'relative_sinusoidal'``: all terms share r_δ = [R[δ1]; C[δ2]], a vector for the row
      shift after one for the column shift (C20, 4.3). The default, q·k + q·r_δ with biases of q and k, is that of
      C20's results. b_q makes all four terms of it, for (W_qry x + b_q)·k has u·k, and b_q·r_δ is v·r_δ; b_k adds the
      same to all keys, and changes nothing.
    - ``'relative_quadratic'`` or ``'relative_generalized'``: r_δ and v of C20's eq. 9 or 19, so that v·r_δ is the score
      of Gaussian heads. q·r_δ does not go with them: content would choose the sign of ‖δ‖² too.
    - ``'relative_free_quadratic'``: r_δ = (‖δ‖², δ1, δ2) and a free v, as in ConViT (d'Ascoli et al. 2021).
    - ``'absolute_learned'`` or ``'absolute_sinusoidal'``: an encoding P (C20, eq. 3); q and k are maps of X + P, and
      there is no r_δ.

    With ``gated=True`` the scores are not added up. A gate λ of each head mixes two attentions instead (ConViT's
    gated positional self-attention): (1 − σ(λ))·softmax(content) + σ(λ)·softmax(v·r_δ), whose rows add up to 1.

    Args:
        dim (int): Channels D of the input.
        num_heads (int): Number of heads N_h.
        max_size (tuple[int, int]): Height and width, in tokens, of the largest grid of a learned position encoding.
            Defaults to (16, 16).
        terms (Sequence[str], optional): The terms of the score. Defaults to ``('qk', 'qr')`` for learned and sinusoidal
            r_δ, to ``('qk', 'vr')`` for quadratic ones and with a gate, to ``('qk',)`` for an absolute encoding.
        position (str): See above. Defaults to ``'relative_learned'``.
        gated (bool): Whether a gate mixes content and position. Defaults to False.
        qk_dim (int, optional): Channels D_k of a head's queries and keys. Defaults to ``dim``, as in the released code.
        qk_bias (bool): Whether queries and keys have the biases b_q and b_k, as in the released code. Defaults to True.
        position_dim (int, optional): Length D_p of r_δ, half of it for rows and half for columns. It is ``qk_dim``
            with q·r_δ, the default then. Without, it defaults as in :class:`~attncnn_plugin.layers.LearnedAttention`.
        center_std, spread_std (float, optional): Of the initial centres and widths of quadratic positions, see
            :class:`~attncnn_plugin.layers.QuadraticEncoding`. Default to 2 and 0.01 there.
        out_dim (int, optional): Channels of the output. Defaults to ``dim``.
        bias (bool): Whether the output has a bias. Defaults to True.
        attn_drop (float): Dropout rate of the attention probabilities. Defaults to 0.
        attn_impl (str): See :class:`~attncnn_plugin.layers.GridAttention`; ``'separable'`` is for ``terms=('vr',)``
            alone. Defaults to ``'auto'``.
        head_dim (int, optional): Channels of a head's values, see :class:`~attncnn_plugin.layers.GridAttention`.
            Defaults to None, values that are the input itself.

    Raises:
        ValueError: No, unknown or repeated terms; terms that do not go with ``position`` or the gate; an unknown
            ``position``; a ``qk_dim`` below 1; a ``position_dim`` that is odd, not ``qk_dim`` with q·r_δ, or without a
            use; a ``center_std`` or ``spread_std`` that is negative or without a use.

    Attributes:
        query, key (nn.Linear | None): W_qry and b_q, W_key and b_k, D to N_h·D_k.
        tables (RelativeTables | None): R and C, D_p/2 channels each.
        key_bias (Parameter | None): u, ``(N_h, D_k)``, starts at N(0, 0.02²).
        position_bias (Parameter | None): v, as long as r_δ, ``(N_h, D_p)``; starts as that of
            :class:`~attncnn_plugin.layers.LearnedEncoding`.
        encoding (nn.Module | None): v of quadratic positions, by centres and widths or free.
        gate (Parameter | None): λ, ``(N_h,)``, starts at 1.
        absolute (AbsoluteEncoding | None): P.
    """

    def _attend(self, x: Tensor, output_map: OutputMap) -> Tensor:
        if not self.depends_on_content:
            return self._attend_separable(x, output_map)
        batch, height, width, dim = x.shape
        if self.num_heads == 0:
            return output_map(x[..., :0])
        if self.value_proj is None:
            values = at_least_float32(x).reshape(batch, 1, height * width, dim)
        else:
            values = at_least_float32(self._values(x)).flatten(1, 2).transpose(1, 2)
        heads = self._attend_added(x, values) if self.gate is None else self._attend_gated(x, values)
        return output_map(heads.to(x.dtype).reshape(batch, height, width, self.num_heads * self.head_dim))

    def _attend_added(self, x: Tensor, values: Tensor) -> Tensor:
        """The heads' outputs for scores that are added up, ``(B, H*W, N_h, D_h)``.

        Args:
            x (Tensor): ``(B, H, W, D)``.
            values (Tensor): ``(B, 1, H*W, D)`` for all heads, or ``(B, N_h, H*W, D_h)``.
        """
        query, key = self._merged_query_key(x) if self._merges(x.shape[:3]) else self._query_key(x)
        bias = self._cached(self._bias, x.shape[1:3])
        if bias is not None and query.shape[2] != bias.shape[1]:  # heads are further queries
            bias = bias.transpose(0, 1).flatten(0, 1)[None]
        with full_precision(x.device.type):
            heads = attend(query, key, values, self.attn_drop.p if self._drops else 0.0, bias)
        if query.shape[1] == self.num_heads:
            heads = heads.transpose(1, 2)
        return heads

    def _attend_gated(self, x: Tensor, values: Tensor) -> Tensor:
        """As :meth:`_attend_added`, for probabilities by content and by position that a gate mixes."""
        if self._drops or self.attn_impl == 'dense':
            probs = self.attn_drop(self._gated_probs(x))
            with full_precision(x.device.type):
                return torch.matmul(probs, values).transpose(1, 2)
        share: Any = self.position_share()
        content = self._attend_added(x, values)
        probs = self._cached(self.position_probs, x.shape[1:3])
        with full_precision(x.device.type):
            position = torch.matmul(probs.to(values.dtype), values).transpose(1, 2)
            return torch.lerp(content.reshape(position.shape), position, share[:, None].to(values.dtype))

    def _merges(self, shape: Sequence[int]) -> bool:
        """Whether it is cheaper to multiply q by W_key once for each query than by all keys of all tokens.

        That is N_h·D_k·D multiply-adds a token less for the keys, and N_h·D·D in place of N_h·D_k·D for the queries;
        but a score is of D channels then, not of D_k. W_qryᵀ W_key costs N_h·D_k·D².
        """
        if 'qk' not in self.terms:
            return False
        batch, height, width = shape
        saved = 2 * self.qk_dim * self.dim - self.dim**2 - height * width * (self.dim - self.qk_dim)
        product = 0 if self._deployed else self.num_heads * self.qk_dim * self.dim**2
        return product_is_cheaper((self.query, self.key), batch * height * width, self.num_heads * saved, product)

    def _merged_query_key(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """As :meth:`_query_key`, with the matrices of a head multiplied: q·k = x_q (W_qryᵀ W_key) x_k.

        The keys are the pixels themselves, the same for all heads. Where the values are too, heads are no more than
        further queries.

        Returns:
            tuple[Tensor, Tensor]: ``(B, 1, H*W*N_h, E)``, or with values of each head ``(B, N_h, H*W, E)``; and
            ``(B, 1, H*W, E)``.
        """
        batch, height, width, dim = x.shape
        positioned = self.encoded(x)
        weight, bias, row, row_bias, column, column_bias = self._cached(self._merged_maps, (height, width))
        query = at_least_float32(F.linear(positioned, weight, bias))
        with full_precision(x.device.type):
            tokens = at_least_float32(positioned)
            queries = [query.unflatten(-1, (self.num_heads, dim))]
            keys = [tokens.flatten(1, 2)]
            if self._adds_axes:
                by_axis: Any = None
                if row is not None:
                    rows = torch.einsum('bijd,hdik->bijhk', tokens, at_shifts(row, height))
                    columns = torch.einsum('bijd,hdjk->bijhk', tokens, at_shifts(column, width))
                    by_axis = (
                        rows + at_shifts(row_bias, height).transpose(0, 1)[:, None],
                        columns + at_shifts(column_bias, width).transpose(0, 1),
                    )
                queries += self._with_position_bias(by_axis, batch, height, width)
                keys.append(one_hot_pixels(height, width, query).expand(batch, -1, -1))
            query, key = torch.cat(queries, dim=-1), torch.cat(keys, dim=-1)[:, None]
            if self.value_proj is None:
                return query.flatten(1, 3)[:, None], key
            return query.flatten(1, 2).transpose(1, 2), key

    def _merged_maps(self, size: Sequence[int]) -> Tuple[Optional[Tensor], ...]:
        """The affine maps from a pixel to its queries for pixels, rows and columns.

        Returns:
            tuple: W_qryᵀ W_key/√D_k as a weight ``(N_h·D, D)``, and (b_q + u) W_key/√D_k, ``(N_h·D,)``; R W_qry/√D_k of
            every shift, ``(N_h, D, 2·H − 1)``, and R b_q/√D_k, ``(N_h, 2·H − 1)``; the same of C. None without q·r_δ.
        """
        shape = self.num_heads, self.qk_dim
        query, key = (at_least_float32(linear.weight).unflatten(0, shape) for linear in (self.query, self.key))
        scale = self.qk_dim**-0.5
        maps: List[Optional[Tensor]] = [None] * 4
        with full_precision(query.device.type):
            query_bias = key_bias = query.new_zeros(shape)
            if self.query.bias is not None:
                query_bias, key_bias = (at_least_float32(linear.bias).view(shape) for linear in (self.query, self.key))
            # q·b_k is the same for all keys, so that b_k has the gradient 0. It must have one: training on several
            # devices waits for it.
            bias = query_bias + 0 * key_bias
            if 'uk' in self.terms:
                bias = bias + at_least_float32(self.key_bias)
            weight = torch.matmul(key.mT, query) * scale
            bias = torch.matmul(bias[:, None], key).flatten() * scale
            if 'qr' in self.terms:
                halves = zip(self.tables(size, like=query), query.chunk(2, dim=1), query_bias.chunk(2, dim=1))
                for axis, (table, own, own_bias) in enumerate(halves):
                    maps[2 * axis] = torch.matmul(own.mT, table.T) * scale
                    maps[2 * axis + 1] = torch.matmul(own_bias, table.T) * scale
        dtype = self.query.weight.dtype
        return (weight.flatten(0, 1).to(dtype), bias.to(dtype), *maps)


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
    learns = torch.is_grad_enabled() and query.requires_grad
    # The fused kernel's choices would become conditions on the sizes of an exported program.
    if is_exporting() or (learns and query.device.type == 'cpu' and key.shape[2] < FUSED_FROM):
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
    probs = F.dropout((scores if bias is None else scores + bias).softmax(dim=-1), dropout)
    return torch.matmul(probs, value)
