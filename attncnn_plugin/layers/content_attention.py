"""Self-attention whose scores depend on content and on position (C20, eq. 3 and 8)."""
import contextlib
from typing import Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from .attention import SeparableAttention
from .encodings import AbsoluteEncoding, RelativeTables, at_least_float32, at_shifts

TERMS = ('qk', 'qr', 'uk', 'vr')


class ContentAttention(SeparableAttention):
    r"""Attention by content and relative position, any of the four terms of C20's eq. 8:

    - ``'qk'``: content and content, q·k/√D, with q = W_qry x_q and k = W_key x_k, D channels a head;
    - ``'qr'``: content and position, q·r_δ/√D, with r_δ = R[δ1] + C[δ2];
    - ``'uk'``: a bias of keys, u·k/√D;
    - ``'vr'``: a bias of positions, vᵀ[R[δ1]; C[δ2]]. Alone it is :class:`LearnedAttention`, separable.

    For comparison the position can instead be an absolute encoding P (C20, eq. 3): q and k are then maps of X + P, and
    the terms with r_δ do not exist.

    Args:
        dim (int): Channels D of the input and of a head's queries and keys.
        num_heads (int): Number of heads N_h.
        max_size (tuple[int, int]): Height and width, in tokens, of the largest grid of a learned position encoding.
            Defaults to (16, 16).
        terms (Sequence[str], optional): The terms of the score. Defaults to ``('qk', 'qr')`` for a relative and
            to ``('qk',)`` for an absolute position encoding.
        position (str): ``'relative_learned'``, ``'relative_sinusoidal'``, ``'absolute_learned'`` or
            ``'absolute_sinusoidal'``. Defaults to ``'relative_learned'``.
        kwargs: See :class:`GridAttention`; ``attn_impl='separable'`` is for ``terms=('vr',)`` alone.

    Raises:
        ValueError: No, unknown or repeated terms; terms that do not go with ``position``; an unknown ``position``.

    Attributes:
        query, key (nn.Linear | None): W_qry and W_key, ``(N_h·D, D)``, no bias.
        tables (RelativeTables | None): R and C.
        key_bias (Parameter | None): u, ``(N_h, D)``, starts at N(0, 0.02²).
        position_bias (Parameter | None): v, ``(N_h, 2·D)``, starts as that of ``nn.Linear(2·D, N_h)``.
        absolute (AbsoluteEncoding | None): P.
    """

    def __init__(
            self,
            dim: int,
            num_heads: int,
            max_size: Tuple[int, int] = (16, 16),
            terms: Optional[Sequence[str]] = None,
            position: str = 'relative_learned',
            device=None,
            dtype=None,
            **kwargs,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__(dim, num_heads, **dd, **kwargs)
        span, _, kind = str(position).partition('_')
        if span not in ('relative', 'absolute') or kind not in ('learned', 'sinusoidal'):
            raise ValueError(
                f"position={position!r} is unknown: choose 'relative_learned', 'relative_sinusoidal', "
                "'absolute_learned' or 'absolute_sinusoidal'")
        self.terms = _check_terms(terms, span)
        if self.attn_impl == 'separable' and not self.position_only:
            raise ValueError(
                f"attn_impl='separable' is exact for terms=('vr',) alone, not for terms={self.terms}, whose scores "
                "depend on content: use 'auto' or 'dense'")
        self.position = position

        has = {term: term in self.terms for term in TERMS}
        self.query = nn.Linear(dim, num_heads * dim, bias=False, **dd) if has['qk'] or has['qr'] else None
        self.key = nn.Linear(dim, num_heads * dim, bias=False, **dd) if has['qk'] or has['uk'] else None
        self.tables = RelativeTables(dim, max_size, kind, **dd) if has['qr'] or has['vr'] else None
        self.key_bias = nn.Parameter(torch.empty(num_heads, dim, **dd)) if has['uk'] else None
        self.position_bias = nn.Parameter(torch.empty(num_heads, 2 * dim, **dd)) if has['vr'] else None
        self.absolute = AbsoluteEncoding(dim, max_size, kind, **dd) if span == 'absolute' else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.key_bias is not None:
            nn.init.normal_(self.key_bias, std=0.02)
        if self.position_bias is not None:
            nn.init.kaiming_uniform_(self.position_bias, a=5 ** 0.5)

    @property
    def position_only(self) -> bool:
        """Whether the scores do not depend on the input."""
        return self.terms == ('vr',)

    def head_parameters(self) -> Dict[str, Tuple[int, int]]:
        entries = {'query.weight': self.dim, 'key.weight': self.dim, 'key_bias': 1, 'position_bias': 1}
        own = {name for name, _ in self.named_parameters()}
        return {**super().head_parameters(), **{name: (0, n) for name, n in entries.items() if name in own}}

    def extra_repr(self) -> str:
        return f'{super().extra_repr()}, terms={self.terms}, position={self.position!r}'

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, D)`` to ``(B, H, W, D_out)``, for any H and W that the position encoding covers."""
        if self.position_only:
            return super().forward(x)
        return self._attend_dense(x, self.attention_scores(x).softmax(dim=-1))

    def attention_scores(self, x: Tensor) -> Tensor:
        """The scores of an input, ``(B, N_h, H*W, H*W)``, at least float32.

        Under autocast the projections to queries and keys are made in its precision, the scores of them in float32.

        Args:
            x (Tensor): ``(B, H, W, D)``.
        """
        batch, height, width, _ = x.shape
        pixels = height * width
        positioned = x if self.absolute is None else self.absolute(x)
        query, key = (
            None if linear is None else at_least_float32(linear(positioned))
            .reshape(batch, height, width, self.num_heads, self.dim).permute(0, 3, 1, 2, 4)  # (B, N_h, H, W, D)
            for linear in (self.query, self.key))

        parts = []
        with full_precision(x.device.type):
            if 'qk' in self.terms:
                parts.append(torch.matmul(query.flatten(2, 3), key.flatten(2, 3).mT))
            if 'uk' in self.terms:
                parts.append(torch.matmul(key.flatten(2, 3), at_least_float32(self.key_bias)[:, :, None]).mT)
            if 'qr' in self.terms:
                # q·r_δ = q·R[δ1] + q·C[δ2]: an axis at a time, without a tensor of size (H*W)²·D.
                row, column = self.tables(height, width, like=query)
                row = torch.einsum('bhijd,dik->bhijk', query, at_shifts(row.T, height))
                column = torch.einsum('bhijd,djk->bhijk', query, at_shifts(column.T, width))
                parts.append((row[..., :, None] + column[..., None, :]).reshape(*row.shape[:2], pixels, pixels))
            scores = sum(parts) / self.dim ** 0.5
            if 'vr' in self.terms:
                scores = scores + self.scores(height, width)
        return scores.expand(batch, self.num_heads, pixels, pixels)

    def axis_scores(self, height: int, width: int) -> Tuple[Tensor, Tensor]:
        """The two terms of vᵀr_δ, ``(N_h, height, height)`` and ``(N_h, width, width)``."""
        return self.tables.axis_scores(self.position_bias, height, width)

    def attention_probs(self, height: int, width: int) -> Tensor:
        """The probabilities where they depend on positions alone, ``(N_h, height*width, height*width)``.

        Raises:
            ValueError: The terms are not ``('vr',)``.
        """
        if not self.position_only:
            raise ValueError(
                f'the probabilities of terms={self.terms} depend on the input x: use attention_scores(x).softmax(-1)')
        return super().attention_probs(height, width)


def full_precision(device_type: str):
    """A context without autocast."""
    if not torch.amp.is_autocast_available(device_type):  # the meta device, for one
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


def _check_terms(terms: Optional[Sequence[str]], span: str) -> Tuple[str, ...]:
    """The terms in the order of eq. 8."""
    possible = TERMS if span == 'relative' else ('qk', 'uk')
    if terms is None:
        return possible[:2] if span == 'relative' else possible[:1]
    unknown = [term for term in terms if term not in possible]
    if isinstance(terms, str) or unknown or not terms or len(set(terms)) < len(terms):
        raise ValueError(
            f'terms={terms!r} must be one or more of {possible}, each once, for a position encoding that is {span}')
    return tuple(term for term in TERMS if term in terms)
