"""Self-attention whose scores depend on content and on position (Cordonnier et al. 2020, eq. 3 and 8)."""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention_layer import head_products
from .encodings import init_position_weight
from .grid_attention import OutputMap, SeparableScores
from .linear import is_exporting, product_is_cheaper
from .position_tables import AbsoluteEncoding, RelativeTables
from .precision import Device, Dtype, at_least_float32, full_precision
from .shifts import at_shifts
from .structure import StateDict, StructureError

TERMS = ('qk', 'qr', 'uk', 'vr')

# Keys from which on the fused kernel trains no slower on CPUs; at 256 its backward pass takes 1.5 times as long.
FUSED_FROM = 1024


class ContentAttention(SeparableScores):
    r"""Attention by content and relative position, by any of the four terms of C20's eq. 8.

    - ``'qk'``: content and content, q·k/√D_k, with q = W_qry x_q + b_q and k = W_key x_k + b_k, D_k channels a head;
    - ``'qr'``: content and position, q·r_δ/√D_k;
    - ``'uk'``: a bias of keys, u·k/√D_k;
    - ``'vr'``: a bias of positions, v·r_δ. Alone it makes the layer a
      :class:`~attncnn_plugin.layers.LearnedAttention`, which is separable and does not depend on content.

    All terms share r_δ = [R[δ1]; C[δ2]], a vector for the row shift after one for the column shift (C20, 4.3). The
    default, q·k + q·r_δ with biases of q and k, is that of C20's results. b_q makes all four terms of it, for
    (W_qry x + b_q)·k has u·k, and b_q·r_δ is v·r_δ; b_k adds the same to all keys, and changes nothing.

    For comparison the position can instead be an absolute encoding P (C20, eq. 3): q and k are then maps of X + P, and
    the terms with r_δ do not exist.

    Args:
        dim (int): Channels D of the input.
        num_heads (int): Number of heads N_h.
        max_size (tuple[int, int]): Height and width, in tokens, of the largest grid of a learned position encoding.
            Defaults to (16, 16).
        terms (Sequence[str], optional): The terms of the score. Defaults to ``('qk', 'qr')`` for a relative and
            to ``('qk',)`` for an absolute position encoding.
        position (str): ``'relative_learned'``, ``'relative_sinusoidal'``, ``'absolute_learned'`` or
            ``'absolute_sinusoidal'``. Defaults to ``'relative_learned'``.
        qk_dim (int, optional): Channels D_k of a head's queries and keys. Defaults to ``dim``, as in the released code.
        qk_bias (bool): Whether queries and keys have the biases b_q and b_k, as in the released code. Defaults to True.
        position_dim (int, optional): Length D_p of r_δ, half of it for rows and half for columns. It is ``qk_dim``
            with q·r_δ, the default then. Without, it defaults as in :class:`~attncnn_plugin.layers.LearnedAttention`.
        out_dim (int, optional): Channels of the output. Defaults to ``dim``.
        bias (bool): Whether the output has a bias. Defaults to True.
        attn_drop (float): Dropout rate of the attention probabilities. Defaults to 0.
        attn_impl (str): See :class:`~attncnn_plugin.layers.GridAttention`; ``'separable'`` is for ``terms=('vr',)``
            alone. Defaults to ``'auto'``.
        head_dim (int, optional): Channels of a head's values, see :class:`~attncnn_plugin.layers.GridAttention`.
            Defaults to None, values that are the input itself.

    Raises:
        ValueError: No, unknown or repeated terms; terms that do not go with ``position``; an unknown ``position``;
            a ``qk_dim`` below 1; a ``position_dim`` that is odd, not ``qk_dim`` with q·r_δ, or without a use.

    Attributes:
        query, key (nn.Linear | None): W_qry and b_q, W_key and b_k, D to N_h·D_k.
        tables (RelativeTables | None): R and C, D_p/2 channels each.
        key_bias (Parameter | None): u, ``(N_h, D_k)``, starts at N(0, 0.02²).
        position_bias (Parameter | None): v, as long as r_δ, ``(N_h, D_p)``; starts as that of
            :class:`~attncnn_plugin.layers.LearnedEncoding`.
        absolute (AbsoluteEncoding | None): P.
    """

    # Each is None without its terms.
    query: Any
    key: Any
    tables: Any
    key_bias: Any
    position_bias: Any
    absolute: Any

    def __init__(
        self,
        dim: int,
        num_heads: int,
        max_size: Tuple[int, int] = (16, 16),
        terms: Optional[Sequence[str]] = None,
        position: str = 'relative_learned',
        qk_dim: Optional[int] = None,
        qk_bias: bool = True,
        position_dim: Optional[int] = None,
        out_dim: Optional[int] = None,
        bias: bool = True,
        attn_drop: float = 0.0,
        attn_impl: str = 'auto',
        head_dim: Optional[int] = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        super().__init__(dim, num_heads, out_dim, bias, attn_drop, attn_impl, head_dim, **dd)
        span, _, kind = str(position).partition('_')
        if span not in ('relative', 'absolute') or kind not in ('learned', 'sinusoidal'):
            raise ValueError(
                f"position={position!r} is unknown: choose 'relative_learned', 'relative_sinusoidal', "
                "'absolute_learned' or 'absolute_sinusoidal'"
            )
        self.terms = _check_terms(terms, span)
        if self.attn_impl == 'separable' and self.depends_on_content:
            raise ValueError(
                f"attn_impl='separable' is exact for terms=('vr',) alone, not for terms={self.terms}, whose scores "
                "depend on content: use 'auto' or 'dense'"
            )
        self.position = position

        has = {term: term in self.terms for term in TERMS}
        self.qk_dim = dim if qk_dim is None else qk_dim
        if self.qk_dim < 1:
            raise ValueError(f'qk_dim={qk_dim} must be at least 1')
        heads_dim = num_heads * self.qk_dim
        self.query = nn.Linear(dim, heads_dim, qk_bias, **dd) if has['qk'] or has['qr'] else None
        self.key = nn.Linear(dim, heads_dim, qk_bias, **dd) if has['qk'] or has['uk'] else None
        self.key_bias = nn.Parameter(torch.empty(num_heads, self.qk_dim, **dd)) if has['uk'] else None
        self.tables = self.position_bias = None
        if has['qr'] or has['vr']:
            position_dim = self._position_dim(position_dim, kind)
            self.tables = RelativeTables(position_dim, max_size, kind, **dd)
            if has['vr']:
                self.position_bias = nn.Parameter(torch.empty(num_heads, position_dim, **dd))
        elif position_dim is not None:
            raise ValueError(
                f'position_dim={position_dim} is the length of r_δ, which terms={self.terms} and position={position!r} '
                'do not have'
            )
        self.absolute = AbsoluteEncoding(dim, max_size, kind, **dd) if span == 'absolute' else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.key_bias is not None:
            nn.init.normal_(self.key_bias, std=0.02)
        if self.position_bias is not None:
            init_position_weight(self.position_bias)

    def _position_dim(self, position_dim: Optional[int], kind: str) -> int:
        """Length of r_δ, checked."""
        if 'qr' in self.terms:
            if position_dim not in (None, self.qk_dim):
                raise ValueError(
                    f'position_dim={position_dim} must be qk_dim={self.qk_dim}, or None, for the term q·r_δ'
                )
            return self.qk_dim
        if position_dim is None:
            return 2 * self.dim if kind == 'learned' else self.dim
        return position_dim

    @property
    def depends_on_content(self) -> bool:
        return self.terms != ('vr',)

    @property
    def has_position_scores(self) -> bool:
        return 'vr' in self.terms  # q·r_δ depends on the query too

    @property
    def max_size(self) -> Optional[Tuple[int, int]]:
        return self.tables.max_size if self.tables is not None and self.tables.kind == 'learned' else None

    @property
    def position_tables(self) -> Optional[RelativeTables]:
        return self.tables

    def share_position_tables(self, tables: RelativeTables) -> None:
        self.tables = tables

    def head_parameters(self) -> Dict[str, Tuple[int, int]]:
        entries = {f'{linear}.{name}': self.qk_dim for linear in ('query', 'key') for name in ('weight', 'bias')}
        entries.update(key_bias=1, position_bias=1)
        own = {name for name, _ in self.named_parameters()}
        return {**super().head_parameters(), **{name: (0, n) for name, n in entries.items() if name in own}}

    def structure_in(self, state_dict: StateDict, prefix: str) -> Optional[int]:
        for name in ('query', 'key'):
            linear = getattr(self, name)
            if not isinstance(linear, nn.Linear) or f'{prefix}{name}.weight' not in state_dict:
                continue
            saved = f'{prefix}{name}.bias' in state_dict
            if saved != (linear.bias is not None):
                raise StructureError(
                    f'{prefix}{name} has {"a" if saved else "no"} bias in the state dict: build the layer with '
                    f'qk_bias={saved}'
                )
        return super().structure_in(state_dict, prefix)

    def extra_repr(self) -> str:
        qk_dim = '' if self.qk_dim == self.dim else f', qk_dim={self.qk_dim}'
        return f'{super().extra_repr()}{qk_dim}, terms={self.terms}, position={self.position!r}'

    def _attend(self, x: Tensor, output_map: OutputMap) -> Tensor:
        if not self.depends_on_content:
            return self._attend_separable(x, output_map)
        batch, height, width, dim = x.shape
        if self.num_heads == 0:
            return output_map(x[..., :0])
        query, key = self._merged_query_key(x) if self._merges(x.shape[:3]) else self._query_key(x)
        if self.value_proj is None:
            values = at_least_float32(x).reshape(batch, 1, height * width, dim)
        else:
            values = at_least_float32(self._values(x)).flatten(1, 2).transpose(1, 2)
        with full_precision(x.device.type):
            heads = attend(query, key, values, self.attn_drop.p if self.training else 0.0)
        if query.shape[1] == self.num_heads:
            heads = heads.transpose(1, 2)
        return output_map(heads.to(x.dtype).reshape(batch, height, width, -1))

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

    def axis_scores(self, size: Sequence[int]) -> Tuple[Tensor, Tensor]:
        """The two terms of v·r_δ, ``(N_h, height, height)`` and ``(N_h, width, width)``."""
        return self.tables.axis_scores(self.position_bias, size)

    def attention_probs(self, size: Sequence[int]) -> Tensor:
        if self.depends_on_content:
            raise ValueError(
                f'the probabilities of terms={self.terms} depend on the input x: use attention_scores(x).softmax(-1)'
            )
        return self._product_probs(size)

    def position_probs(self, size: Sequence[int]) -> Optional[Tensor]:
        return self._product_probs(size) if self.has_position_scores else None

    def encoded(self, x: Tensor) -> Tensor:
        return x if self.absolute is None else self.absolute(x)

    def attention_scores(self, x: Tensor) -> Tensor:
        """All scores of an input, ``(B, N_h, H*W, H*W)``, at least float32.

        Under autocast the projections to queries and keys are made in its precision, the scores of them in float32.

        Args:
            x (Tensor): ``(B, H, W, D)``.
        """
        query, key = self._query_key(x)
        with full_precision(x.device.type):
            return torch.matmul(query, key.mT)

    def content_scores(self, x: Tensor) -> Optional[Tensor]:
        if self.key is None:
            return None
        tokens = x.flatten(1, 2)
        key = self.key(tokens)
        query = self.query(tokens) if 'qk' in self.terms else torch.zeros_like(key)
        if 'uk' in self.terms:
            query = query + self.key_bias.flatten().expand_as(key)  # (q + u)·k
        return head_products(query, key, self.num_heads)

    def position_scores(self, x: Tensor) -> Optional[Tensor]:
        if self.tables is None:
            return None
        batch, height, width, _ = x.shape
        rows, columns = self._position_axis_scores(x)
        scores = rows[..., :, None] + columns[..., None, :]  # (…, q1, q2, k1, k2)
        return scores.expand(batch, *scores.shape[-5:]).reshape(batch, self.num_heads, height * width, height * width)

    def query_shift_scores(self, tokens: Tensor, size: Sequence[int]) -> Optional[Tuple[Tensor, Tensor]]:
        if 'qr' not in self.terms:
            return None
        query = at_least_float32(self.query(tokens)).unflatten(1, (self.num_heads, self.qk_dim)) / self.qk_dim**0.5
        with full_precision(tokens.device.type):
            row, column = self.tables(size, like=query)
            of_rows, of_columns = query.chunk(2, dim=-1)
            rows, columns = of_rows @ row.T, of_columns @ column.T
        if 'vr' in self.terms:
            row_bias, column_bias = self.tables.shift_scores(self.position_bias, size)
            rows, columns = rows + row_bias, columns + column_bias
        return rows, columns

    def _position_axis_scores(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """The terms of rows and of columns, ``(B, N_h, H, W, H)`` and ``(B, N_h, H, W, W)``.

        Without q·r_δ the axes that they do not depend on are of size 1, and there is no B.
        """
        size = x.shape[1:3]
        rows = columns = torch.zeros((), device=x.device)
        with full_precision(x.device.type):
            if 'qr' in self.terms:
                query = at_least_float32(self.query(x)).unflatten(-1, (self.num_heads, self.qk_dim))
                rows, columns = (part.permute(0, 3, 1, 2, 4) for part in self._query_axis_scores(query))
            if 'vr' in self.terms:
                row, column = self.axis_scores(size)
                rows, columns = rows + row[:, :, None], columns + column[:, None]
        return rows, columns

    def _query_axis_scores(self, query: Tensor) -> Tuple[Tensor, Tensor]:
        """q·r_δ/√D_k = (q₁·R[δ1] + q₂·C[δ2])/√D_k with the two halves of q, for the rows and for the columns of keys.

        Args:
            query (Tensor): ``(B, H, W, N_h, D_k)``.

        Returns:
            tuple[Tensor, Tensor]: ``(B, H, W, N_h, H)`` and ``(B, H, W, N_h, W)``.
        """
        height, width = query.shape[1:3]
        row, column = (table.T / self.qk_dim**0.5 for table in self.tables((height, width), like=query))
        of_rows, of_columns = query.chunk(2, dim=-1)
        rows = torch.einsum('bijhd,dik->bijhk', of_rows, at_shifts(row, height))
        return rows, torch.einsum('bijhd,djk->bijhk', of_columns, at_shifts(column, width))

    def _query_key(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Vectors of which the scores are the products, at least float32.

        Row and column terms are entries of the query, for each row and each column of the grid, and the key of a pixel
        picks those of its own: q·k/√D_k + f[k1] + g[k2] = [q/√D_k; f; g]·[k; e_k1; e_k2].

        Returns:
            tuple[Tensor, Tensor]: ``(B, N_h, H*W, E)``, and ``(B, N_h, H*W, E)`` or ``(B, 1, H*W, E)``.
        """
        batch, height, width, _ = x.shape
        positioned = self.encoded(x)
        shape = self.num_heads, self.qk_dim
        query: Any
        key: Any
        query, key = (
            None if linear is None else at_least_float32(linear(positioned)).unflatten(-1, shape)
            for linear in (self.query, self.key)
        )  # (B, H, W, N_h, D_k)
        queries, keys = [], []
        with full_precision(x.device.type):
            if 'qk' in self.terms:
                queries.append(query / self.qk_dim**0.5)
            if 'uk' in self.terms:
                bias = at_least_float32(self.key_bias) / self.qk_dim**0.5
                queries = [sum(queries) + bias.expand_as(key)]  # (q + u)·k
            if queries:
                keys.append(key.permute(0, 3, 1, 2, 4).flatten(2, 3))
            if self.tables is not None:
                by_axis = self._query_axis_scores(query) if 'qr' in self.terms else None
                queries += self._with_position_bias(by_axis, batch, height, width)
                pixels = one_hot_pixels(height, width, queries[-1])
                keys.append(pixels.expand(*(keys[0].shape[:2] if keys else (1, 1)), -1, -1))
            query = torch.cat([part.permute(0, 3, 1, 2, 4) for part in queries], dim=-1)
            return query.flatten(2, 3), torch.cat(keys, dim=-1)

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
            if self.tables is not None:
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

    def _with_position_bias(
        self, by_axis: Optional[Tuple[Tensor, Tensor]], batch: int, height: int, width: int
    ) -> List[Tensor]:
        """Adds v·r_δ, where it is one of the terms, to q·r_δ, where that is, ``(B, H, W, N_h, H)`` and ``(…, W)``."""
        if by_axis is not None and 'vr' not in self.terms:
            return list(by_axis)
        rows, columns = self.axis_scores((height, width))
        rows, columns = rows.transpose(0, 1)[:, None], columns.transpose(0, 1)  # (q1, 1, N_h, k1) and (q2, N_h, k2)
        if by_axis is None:
            return [scores.expand(batch, height, width, -1, -1) for scores in (rows, columns)]
        return [by_axis[0] + rows, by_axis[1] + columns]


def attend(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """softmax(q·k) v.

    Args:
        query (Tensor): ``(B, N, Q, E)``.
        key (Tensor): ``(B, N, K, E)``, or ``(B, 1, K, E)`` for all heads.
        value (Tensor): ``(B, 1, K, D)``, for all heads.
        dropout (float): Dropout rate of the probabilities.

    Returns:
        Tensor: ``(B, N, Q, D)``.
    """
    learns = torch.is_grad_enabled() and query.requires_grad
    # The fused kernel's choices would become conditions on the sizes of an exported program.
    if is_exporting() or (learns and query.device.type == 'cpu' and key.shape[2] < FUSED_FROM):
        probs = F.dropout(torch.matmul(query, key.mT).softmax(dim=-1), dropout)
        return torch.matmul(probs, value)
    batch, heads = query.shape[:2]
    dim, spare = value.shape[-1], query.shape[-1] - value.shape[-1]
    # The fused kernels want values as wide as keys.
    key, value = key.expand(batch, heads, -1, -1), F.pad(value, (0, max(spare, 0))).expand(batch, heads, -1, -1)
    if spare < 0:
        query, key = F.pad(query, (0, -spare)), F.pad(key, (0, -spare))
    return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=1.0)[..., :dim]


def one_hot_pixels(height: int, width: int, like: Tensor) -> Tensor:
    """[e_k1; e_k2] of every pixel, ``(1, height*width, height + width)``."""
    row, column = (torch.eye(size, device=like.device, dtype=like.dtype) for size in (height, width))
    pixels = torch.cat([row[:, None].expand(-1, width, -1), column[None].expand(height, -1, -1)], dim=-1)
    return pixels.reshape(1, height * width, -1)


def _check_terms(terms: Optional[Sequence[str]], span: str) -> Tuple[str, ...]:
    """The terms in the order of eq. 8."""
    possible = TERMS if span == 'relative' else ('qk', 'uk')
    if terms is None:
        return possible[:2] if span == 'relative' else possible[:1]
    unknown = [term for term in terms if term not in possible]
    if isinstance(terms, str) or unknown or not terms or len(set(terms)) < len(terms):
        raise ValueError(
            f'terms={terms!r} must be one or more of {possible}, each once, for a position encoding that is {span}'
        )
    return tuple(term for term in TERMS if term in terms)
