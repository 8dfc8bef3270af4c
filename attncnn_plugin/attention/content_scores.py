"""Scores of attention by content and by position, and what they say (Cordonnier et al. 2020, C20, eq. 3 and 8)."""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from .attention_layer import GaussianHeads, head_products
from .encodings import GeneralizedQuadraticEncoding, QuadraticEncoding, init_position_weight
from .grid_attention import SeparableScores
from .position_tables import AbsoluteEncoding, RelativeTables
from .precision import Device, Dtype, at_least_float32, full_precision
from .shifts import at_shifts
from .softmax import softmax
from .state_dicts import StateDict, StructureError

TERMS = ('qk', 'qr', 'uk', 'vr')
ENCODINGS = {
    'relative_quadratic': QuadraticEncoding,
    'relative_generalized': GeneralizedQuadraticEncoding,
}
POSITIONS = ('relative_learned', 'relative_sinusoidal', *ENCODINGS, 'absolute_learned', 'absolute_sinusoidal')


class ContentScores(SeparableScores):
    """The parameters and the scores of :class:`~attncnn_plugin.attention.ContentAttention`, whose arguments it has."""

    # Each is None without its terms.
    query: Any
    key: Any
    key_bias: Any
    tables: Any
    position_bias: Any
    encoding: Any
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
        center_std: Optional[float] = None,
        spread_std: Optional[float] = None,
        out_dim: Optional[int] = None,
        bias: bool = True,
        attn_drop: float = 0.0,
        head_dim: Optional[int] = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        super().__init__(dim, num_heads, out_dim, bias, attn_drop, head_dim, **dd)
        self.terms = check_terms(terms, position)
        self.position = position
        self.qk_dim = dim if qk_dim is None else qk_dim
        if self.qk_dim < 1:
            raise ValueError(f'qk_dim={qk_dim} must be at least 1')

        has = {term: term in self.terms for term in TERMS}
        span, _, kind = position.partition('_')
        heads_dim = num_heads * self.qk_dim
        self.query = nn.Linear(dim, heads_dim, qk_bias, **dd) if has['qk'] or has['qr'] else None
        self.key = nn.Linear(dim, heads_dim, qk_bias, **dd) if has['qk'] or has['uk'] else None
        self.key_bias = nn.Parameter(torch.empty(num_heads, self.qk_dim, **dd)) if has['uk'] else None
        self.tables = self.position_bias = self.encoding = None
        stds = {'center_std': center_std, 'spread_std': spread_std}
        stds = {name: std for name, std in stds.items() if std is not None}
        if position in ENCODINGS:
            self.encoding = ENCODINGS[position](num_heads, **stds, **dd)
        elif stds:
            raise ValueError(f'{stds} are of quadratic positions, {tuple(ENCODINGS)}, not of position={position!r}')
        elif has['qr'] or has['vr']:
            self.tables = RelativeTables(self._position_dim(position_dim, kind), max_size, kind, **dd)
            if has['vr']:
                self.position_bias = nn.Parameter(torch.empty(num_heads, self.tables.dim, **dd))
        if self.tables is None and position_dim is not None:
            raise ValueError(
                f'position_dim={position_dim} is the length of learned and sinusoidal vectors r_δ, which '
                f'terms={self.terms} and position={position!r} do not have'
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
    def has_axis_scores(self) -> bool:
        return self.has_position_scores and not isinstance(self.encoding, GeneralizedQuadraticEncoding)

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
        entries.update({'key_bias': 1, 'position_bias': 1, 'encoding.center': 1, 'encoding.sqrt_precision': 1})
        own = {name for name, _ in self.named_parameters()}
        return {**super().head_parameters(), **{name: (0, n) for name, n in entries.items() if name in own}}

    def follow(self, state_dict: StateDict, prefix: str) -> bool:
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
        return super().follow(state_dict, prefix)

    def extra_repr(self) -> str:
        qk_dim = '' if self.qk_dim == self.dim else f', qk_dim={self.qk_dim}'
        return f'{super().extra_repr()}{qk_dim}, terms={self.terms}, position={self.position!r}'

    def gaussian_heads(self) -> Optional[GaussianHeads]:
        if isinstance(self.encoding, (QuadraticEncoding, GeneralizedQuadraticEncoding)):
            return self.encoding.gaussian_heads()
        return None

    def axis_scores(self, size: Sequence[int]) -> Tuple[Tensor, Tensor]:
        """The two terms of v·r_δ, ``(N_h, height, height)`` and ``(N_h, width, width)``."""
        if self.encoding is not None:
            return self.encoding.axis_scores(size)
        return self.tables.axis_scores(self.position_bias, size)

    def attention_probs(self, size: Sequence[int]) -> Tensor:
        if self.depends_on_content:
            raise ValueError(
                f'the probabilities of terms={self.terms} depend on the input x: use attention_scores(x).softmax(-1)'
            )
        return self._product_probs(size)

    def position_probs(self, size: Sequence[int]) -> Optional[Tensor]:
        if self.has_axis_scores:
            return self._product_probs(size)
        return softmax(self.encoding.scores(size)) if self.has_position_scores else None

    def attention_scores(self, x: Tensor) -> Tensor:
        """All scores of an input, ``(B, N_h, H*W, H*W)``, at least float32.

        Under autocast the projections to queries and keys are made in its precision, the scores of them in float32.

        Args:
            x (Tensor): ``(B, H, W, D)``.
        """
        query, key = self._query_key(x)
        with full_precision(x.device.type):
            scores = torch.matmul(query, key.mT)
        bias = self._bias(x.shape[1:3])
        return scores if bias is None else scores + bias

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
        batch, height, width, _ = x.shape
        if not {'qr', 'vr'} & set(self.terms):
            return None
        if self.has_position_scores and not self.has_axis_scores:
            return self.encoding.scores((height, width)).expand(batch, -1, -1, -1)
        rows, columns = self._position_axis_scores(x)
        scores = rows[..., :, None] + columns[..., None, :]  # (…, q1, q2, k1, k2)
        return scores.expand(batch, *scores.shape[-5:]).reshape(batch, self.num_heads, height * width, height * width)

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

    @property
    def _adds_axes(self) -> bool:
        """Whether scores of rows and columns are added to those of content."""
        return 'qr' in self.terms or self.has_axis_scores

    def _bias(self, size: Sequence[int]) -> Optional[Tensor]:
        """The scores by position that are added to those of content, but are no sum of rows and columns.

        Returns:
            Tensor | None: ``(N_h, H*W, H*W)``.
        """
        if self.has_position_scores and not self.has_axis_scores:
            return self.encoding.scores(size)
        return None

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
        positioned = x if self.absolute is None else self.absolute(x)
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
            if self._adds_axes:
                by_axis = self._query_axis_scores(query) if 'qr' in self.terms else None
                queries += self._with_position_bias(by_axis, batch, height, width)
                pixels = one_hot_pixels(height, width, queries[-1])
                keys.append(pixels.expand(*(keys[0].shape[:2] if keys else (1, 1)), -1, -1))
            query = torch.cat([part.permute(0, 3, 1, 2, 4) for part in queries], dim=-1)
            return query.flatten(2, 3), torch.cat(keys, dim=-1)

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


def one_hot_pixels(height: int, width: int, like: Tensor) -> Tensor:
    """[e_k1; e_k2] of every pixel, ``(1, height*width, height + width)``."""
    row, column = (torch.eye(size, device=like.device, dtype=like.dtype) for size in (height, width))
    pixels = torch.cat([row[:, None].expand(-1, width, -1), column[None].expand(height, -1, -1)], dim=-1)
    return pixels.reshape(1, height * width, -1)


def check_terms(terms: Optional[Sequence[str]], position: str) -> Tuple[str, ...]:
    """The terms of a score, in the order of eq. 8.

    Raises:
        ValueError: No, unknown or repeated terms; terms that do not go with ``position``; an unknown ``position``.
    """
    if position not in POSITIONS:
        raise ValueError(f'position={position!r} is unknown: choose one of {POSITIONS}')
    span = str(position).partition('_')[0]
    possible = TERMS if span == 'relative' else ('qk', 'uk')
    if terms is None:
        terms = ('qk',) if span == 'absolute' else ('qk', 'vr') if position in ENCODINGS else ('qk', 'qr')
    unknown = [term for term in terms if term not in possible]
    if isinstance(terms, str) or unknown or not terms or len(set(terms)) < len(terms):
        raise ValueError(
            f'terms={terms!r} must be one or more of {possible}, each once, for a position encoding that is {span}'
        )
    terms = tuple(term for term in TERMS if term in terms)
    if position in ENCODINGS and ('qr' in terms or 'vr' not in terms):
        raise ValueError(
            f"terms={terms} must have 'vr' and not 'qr' for position={position!r}: v·r_δ are its Gaussian heads, and "
            'in q·r_δ content would choose the sign of ‖δ‖² too'
        )
    if terms == ('vr',) and position == 'relative_generalized':
        raise ValueError(
            f'terms={terms} with position={position!r} do not depend on content: use GeneralizedQuadraticAttention, or '
            "add 'qk'"
        )
    return terms
