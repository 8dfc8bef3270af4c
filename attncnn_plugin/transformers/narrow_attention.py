"""The forward pass of a vision transformer's attention whose heads together are narrower than a token.

timm's and mmpretrain's own mostly takes the channels of all heads to be those of a token, which no longer holds after
heads were removed.
"""

from typing import Any, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .mixed_classes import Mixin


class NarrowAttention(Mixin):
    """Softmax attention of all tokens by the parts of a module, put before its class by :func:`~.mixed_classes.mixed`.

    The module has ``num_heads``, ``scale``, ``proj``, and ``qkv``, with biases of its own or ``q_bias`` and ``v_bias``,
    or three linear maps. Of the following it has some: ``q_norm`` and ``k_norm`` of each head; a
    ``relative_position_bias_table`` or a module ``rel_pos``; a ``gate``; ``attn_drop`` and ``proj_drop``.
    """

    class_name = 'Narrow{}'
    num_heads: int
    proj: nn.Module
    training: bool

    def forward(
        self,
        x: Tensor,
        rope: Optional[Tensor] = None,
        attn_mask: Optional[Tensor] = None,
        is_causal: bool = False,
        mask: Optional[Tensor] = None,
        shared_rel_pos: Optional[Tensor] = None,
        shared_rel_pos_bias: Optional[Tensor] = None,
        rel_pos_bias: Optional[Tensor] = None,
    ) -> Tensor:
        """``(B, N, D)`` to ``(B, N, D)``.

        Args:
            x (Tensor): Tokens.
            rope (Tensor, optional): Sines and cosines of rotations, ``(…, patches, 2·d)``. Defaults to None.
            attn_mask (Tensor, optional): Added to the scores, or a bool for each key to be seen. Defaults to None.
            is_causal (bool): Whether keys after the query are not seen. Defaults to False.
            mask (Tensor, optional): Added to the scores of each window of an image, ``(windows, N, N)``. Defaults to
                None.
            shared_rel_pos, shared_rel_pos_bias, rel_pos_bias (Tensor, optional): What timm and mmpretrain call a bias
                that all layers share, which is not there where heads were removed: None.
        """
        heads = self._queries_of(x)[..., :0]
        shared = (shared_rel_pos, shared_rel_pos_bias, rel_pos_bias)
        if any(bias is not None for bias in shared):
            raise ValueError('a position bias that all layers share is for all heads, but this layer has lost some')
        if self.num_heads > 0:
            query, key, value = self._turned(self._maps(x), rope)
            bias = self._bias(query, key, attn_mask, is_causal, mask)
            heads = self._attend(query, key, value, bias).transpose(1, 2).flatten(2)  # head after head
        gate = getattr(self, 'gate', None)
        if gate is not None:
            heads = heads * gate(x).sigmoid()
        return self._part('proj_drop', self.proj(heads))

    def _queries_of(self, x: Tensor) -> Tensor:
        """The tokens that attend."""
        return x

    def _part(self, name: str, x: Tensor) -> Tensor:
        """What a part of the module makes of x; x without such a part."""
        part = getattr(self, name, None)
        return part(x) if isinstance(part, nn.Module) else x

    def _maps(self, x: Tensor) -> Tuple[Tensor, ...]:
        """Queries, keys and values, each ``(B, N_h, N, d)``."""
        qkv = getattr(self, 'qkv', None)
        if qkv is not None:
            maps = qkv(x)
            query_bias: Any = getattr(self, 'q_bias', None)
            if query_bias is not None:
                value_bias: Any = self.v_bias  # type: ignore[attr-defined]
                maps = maps + torch.cat([query_bias, torch.zeros_like(query_bias), value_bias])
            return maps.unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        suffix = '' if isinstance(getattr(self, 'q', None), nn.Module) else '_proj'
        inputs: Dict[str, Tensor] = {'q': self._queries_of(x), 'k': x, 'v': x}
        return tuple(
            getattr(self, name + suffix)(tokens).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for name, tokens in inputs.items()
        )

    def _turned(self, maps: Tuple[Tensor, ...], rope: Optional[Tensor]) -> Tuple[Tensor, ...]:
        """Queries and keys after their norms and rotations, and the values."""
        query, key = self._part('q_norm', maps[0]), self._part('k_norm', maps[1])
        if rope is not None:
            prefix: int = self.num_prefix_tokens  # type: ignore[attr-defined]
            half = getattr(self, 'rotate_half', False)
            query, key = (
                torch.cat([x[:, :, :prefix], rotated(x[:, :, prefix:], rope, half)], 2).type_as(maps[2])
                for x in (query, key)
            )
        return query, key, maps[2]

    def _bias(
        self, query: Tensor, key: Tensor, attn_mask: Optional[Tensor], is_causal: bool, mask: Optional[Tensor]
    ) -> Optional[Tensor]:
        """What is added to the scores, of a shape that can be expanded to ``(B, N_h, N, N)``; None for nothing."""
        queries, keys = query.shape[2], key.shape[2]
        terms = []
        table = getattr(self, 'relative_position_bias_table', None)
        if table is not None:
            index: Tensor = self.relative_position_index  # type: ignore[attr-defined]
            terms.append(table[index.flatten()].view(queries, keys, -1).permute(2, 0, 1))
        rel_pos: Any = getattr(self, 'rel_pos', None)
        if rel_pos is not None:
            terms.append(rel_pos.get_bias())
        if is_causal:
            attn_mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
        if attn_mask is not None:
            terms.append(attn_mask)
        if mask is not None:  # the windows of an image lie one after the other
            terms.append(mask.repeat(len(query) // len(mask), 1, 1)[:, None])
        return sum(terms[1:], terms[0]) if terms else None

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Optional[Tensor]) -> Tensor:
        """``(B, N_h, N, d)``."""
        scale: float = self.scale  # type: ignore[attr-defined]
        if getattr(self, 'fused_attn', False):
            drop: Any = self.attn_drop  # type: ignore[attr-defined]
            dropout = drop.p if self.training else 0.0
            if bias is not None:
                bias = bias.to(query.dtype)
            return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout, scale=scale)
        scores = (query * scale) @ key.mT
        return self._part('attn_drop', (scores if bias is None else scores + bias).softmax(-1)) @ value


class NarrowClassAttention(NarrowAttention):
    """As :class:`NarrowAttention`, of the class token alone, which is the first one: ``(B, N, D)`` to ``(B, 1, D)``."""

    def _queries_of(self, x: Tensor) -> Tensor:
        return x[:, :1]


def rotated(x: Tensor, rope: Tensor, half: bool) -> Tensor:
    """Rotates pairs of channels by the angles of their positions, (a, b) to (a cos − b sin, b cos + a sin).

    Args:
        x (Tensor): ``(…, N, d)``.
        rope (Tensor): Sines, then cosines, ``(N, 2·d)``, each twice as the pairs are.
        half (bool): Whether a pair is one channel of each half, not two in a row.

    Examples:
        >>> quarter = torch.tensor([[1.0, 1.0, 0.0, 0.0]])  # of a turn
        >>> rotated(torch.tensor([[1.0, 2.0]]), quarter, half=False)
        tensor([[-2.,  1.]])
    """
    sine, cosine = rope.chunk(2, -1)
    if half:
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    else:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cosine + turned * sine
