"""Self-attention over a grid of tokens; every head uses the tokens themselves as values.

Tokens ``(B, H, W, D)`` become tokens of the same shape, for any H and W that the position encoding covers.

Paper: `On the Relationship between Self-Attention and Convolutional Layers` - https://arxiv.org/abs/1911.03584 (C20)
"""

import math
from typing import Any, List, Sequence, Tuple

import torch
from torch import Tensor, nn

from .attention_layer import AttentionLayer, HeadParameters, check_plain_linear, head_products
from .positions import GeneralizedQuadraticEncoding, LearnedEncoding, QuadraticEncoding, RelativeTables
from .precision import at_least_float32, full_precision
from .shifts import at_shifts, over_axes, windows
from .softmax import softmax, without_subnormals
from .strides import is_exporting

# Of so many pairs of a query and a key, or of one head, probabilities are computed at once. For 32×32 tokens all heads
# at once take a third longer, and more memory; for 16×16 tokens one head at a time takes a tenth longer.
PAIRS_AT_ONCE = 2**20


class GridAttention(AttentionLayer):
    """Mixes tokens by the scores of a position encoding; the base of the layers below.

    The values of a head are the tokens themselves, D_h = D: the heads' outputs P_h X are concatenated to N_h·D
    channels, and one linear layer, ``value``, is W^V W^O of all heads (C20, eq. 1 and 4). C20's remark on D_h and D_out
    advises D_h = D_out: with fewer channels a head cannot be every slice of a kernel.

    Args:
        dim (int): Channels D of a token.
        num_heads (int): Number of heads N_h.
        attn_drop (float): Dropout rate of the attention probabilities, of which the images of a batch have the same
            mask where these depend only on position. Defaults to 0.
        **dd: ``device`` and ``dtype`` of the parameters, as of ``nn.Linear``.

    Raises:
        ValueError: A number of heads below 1, or a rate out of range.

    Attributes:
        encoding (nn.Module | None): The scores by position.
        value (nn.Linear): W^V W^O, from the concatenated heads, N_h·D, to D.
    """

    encoding: Any
    encoding_type: Any = None  # the class of an encoding that takes only the number of heads

    def __init__(self, dim: int, num_heads: int, attn_drop: float = 0.0, **dd: Any) -> None:
        super().__init__()
        if num_heads < 1:
            raise ValueError(f'num_heads={num_heads} must be at least 1')
        self.dim = dim
        self.num_heads = self.built_heads = num_heads
        self.attn_drop = nn.Dropout(attn_drop)
        self.value = nn.Linear(num_heads * dim, dim, **dd)
        if self.encoding_type is not None:
            self.encoding = self.encoding_type(num_heads, **dd)

    def extra_repr(self) -> str:
        return f'dim={self.dim}, num_heads={self.num_heads}'

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, H, W, D)`` to the same."""
        return self.value(self.heads(x))

    def heads(self, x: Tensor) -> Tensor:
        """Computes P_h X of all heads side by side, ``(B, H, W, N_h·D)``."""
        probs = self.attn_drop(self._probs(x)).to(x.dtype)
        heads = probs.flatten(-3, -2) @ x.flatten(1, 2)  # side by side for each query
        return heads.unflatten(1, (*x.shape[1:3], self.num_heads)).flatten(3)

    def _probs(self, x: Tensor) -> Tensor:
        """Returns the probabilities of an input, ``(H*W, N_h, H*W)`` or ``(B, H*W, N_h, H*W)``."""
        return self.attention_probs(x.shape[1:3]).transpose(0, 1)

    def value_matrices(self) -> Tensor:
        check_plain_linear('value', self.value)
        return at_least_float32(self.value.weight.unflatten(1, (self.num_heads, self.dim)).transpose(0, 1))

    def head_parameters(self) -> HeadParameters:
        return {'value.weight': (1, self.dim), **super().head_parameters()}


class SeparableAttention(GridAttention):
    """Attention by scores that are the sum of a row and a column term.

    The softmax of the sum is the product of the softmaxes along the axes, P[(q1, q2), (k1, k2)] = P1[q1, k1] ·
    P2[q2, k2]. So tokens are mixed along rows, then along columns, by O(HW·(H + W)) multiply-adds instead of O((HW)²).
    """

    def axis_probs(self, size: Sequence[int]) -> Tuple[Tensor, Tensor]:
        """Returns P1 ``(N_h, H, H)`` and P2 ``(N_h, W, W)``."""
        rows, columns = self.encoding.axis_scores(size)
        return softmax(rows), softmax(columns)

    def position_probs(self, size: Sequence[int]) -> Tensor:
        return without_subnormals(over_axes(self.axis_probs(size), torch.mul))

    def heads(self, x: Tensor) -> Tensor:
        if self.training and self.attn_drop.p > 0:  # dropout needs the whole matrix of probabilities
            return super().heads(x)
        heads: List[Tensor] = []
        for rows, columns in zip(*self.axis_probs(x.shape[1:3])):
            mixed = rows.to(x.dtype) @ x.flatten(2)  # Σ_k1 P1[q1, k1] X[k1, k2]
            heads.append(columns.to(x.dtype) @ mixed.unflatten(2, x.shape[2:]))  # Σ_k2 P2[q2, k2] …
        return torch.cat(heads, dim=-1)


class QuadraticAttention(SeparableAttention):
    """Attention with the quadratic encoding, −α‖δ − Δ‖² (C20, eq. 9): isotropic Gaussian heads.

    The arguments are those of :class:`GridAttention`.
    """

    encoding_type = QuadraticEncoding


class GeneralizedQuadraticAttention(GridAttention):
    """Attention with the generalized quadratic encoding, −½(δ − Δ)ᵀΣ⁻¹(δ − Δ) (C20, eq. 19): Gaussian heads.

    The score has a cross term of rows and columns, so that tokens are mixed by the whole matrix of probabilities. The
    arguments are those of :class:`GridAttention`.
    """

    encoding_type = GeneralizedQuadraticEncoding

    def position_probs(self, size: Sequence[int]) -> Tensor:
        return self._backwards(*self.encoding.chain_probs(size)).permute(2, 0, 1, 3, 4).flatten(3).flatten(1, 2).flip(2)

    def heads(self, x: Tensor) -> Tensor:
        tokens = x.flatten(1, 2).flip(1).transpose(0, 1).flatten(1)  # (K, B·D)
        some = 1 if is_exporting() else max(1, PAIRS_AT_ONCE // math.prod(x.shape[1:3]) ** 2)
        rows, columns = self.encoding.chain_probs(x.shape[1:3])
        heads: List[Tensor] = []
        for part in zip(rows.split(some), columns.split(some, 2)):
            probs = self.attn_drop(self._backwards(*part)).to(x.dtype)
            head = (probs.flatten(3).flatten(0, 2) @ tokens).unflatten(0, probs.shape[:3])
            heads.append(head.unflatten(3, x.shape[::3]).permute(3, 0, 1, 2, 4))
        return torch.cat(heads, dim=3).flatten(3)

    def _backwards(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns the product of both, ``(q1, q2, N_h, k1, k2)``, keys from the last to the first."""
        rows = windows(rows, columns.shape[-1]).permute(1, 3, 0, 2, 4)
        return without_subnormals(columns[..., None, :] * rows)


class LearnedAttention(SeparableAttention):
    """Attention with the learned encoding, v·r_δ with r_δ = [R[δ1]; C[δ2]] (C20, 4.3).

    Vectors r_δ have D channels for rows and D for columns, as in the released code of C20, whose 12.3M parameters need
    it.

    Args:
        dim, num_heads, attn_drop: As of :class:`GridAttention`.
        max_size (tuple[int, int]): Height and width, in tokens, of the largest grid. Defaults to (16, 16).

    Raises:
        ValueError: See :class:`GridAttention`.
    """

    def __init__(
        self, dim: int, num_heads: int, max_size: Tuple[int, int] = (16, 16), attn_drop: float = 0.0, **dd: Any
    ) -> None:
        super().__init__(dim, num_heads, attn_drop, **dd)
        self.encoding = LearnedEncoding(num_heads, 2 * dim, max_size, **dd)


class ContentAttention(GridAttention):
    """Attention by content and by relative position (C20, eq. 8), with q = W_qry x_q + b_q and k = W_key x_k + b_k.

    Scores are (q·k + q·r_δ)/√D with r_δ = [R[δ1]; C[δ2]] (C20, 4.3), as in the released code. These are all four terms
    of eq. 8 with u = v = b_q and Ŵ_key = I: b_q·k is u·k, and b_q·r_δ is v·r_δ; b_k adds the same to all keys, and
    changes nothing.

    Args:
        dim (int): Channels D of a token, and of the queries and keys of a head; even.
        num_heads, max_size, attn_drop: As of :class:`LearnedAttention`.

    Raises:
        ValueError: A ``dim`` that is odd; see :class:`GridAttention`.

    Attributes:
        query, key (nn.Linear): W_qry and b_q, W_key and b_k, D to N_h·D.
        tables (RelativeTables): R and C, D/2 channels each.
    """

    depends_on_content = True
    has_position_scores = False  # q·r_δ depends on the query too

    def __init__(
        self, dim: int, num_heads: int, max_size: Tuple[int, int] = (16, 16), attn_drop: float = 0.0, **dd: Any
    ) -> None:
        super().__init__(dim, num_heads, attn_drop, **dd)
        self.query = nn.Linear(dim, num_heads * dim, **dd)
        self.key = nn.Linear(dim, num_heads * dim, **dd)
        self.tables = RelativeTables(dim, max_size, **dd)

    def _probs(self, x: Tensor) -> Tensor:
        return softmax(self._scores(x))

    def attention_scores(self, x: Tensor) -> Tensor:
        return self._scores(x).transpose(1, 2)

    def _scores(self, x: Tensor) -> Tensor:
        """Returns the scores as ``(B, H*W, N_h, H*W)``, in the order of the heads' outputs."""
        query = self.query(x)
        rows, columns = self._position_terms(query)
        # The strides of the sum are those of its first term; in place, as new memory takes longer than a sum.
        scores = rows + self._content_scores(query, x).transpose(1, 2).unflatten(3, x.shape[1:3])
        scores += columns
        return scores.flatten(3)

    def content_scores(self, x: Tensor) -> Tensor:
        return self._content_scores(self.query(x), x)

    def position_scores(self, x: Tensor) -> Tensor:
        rows, columns = self._position_terms(self.query(x))
        return (rows + columns).flatten(-2).transpose(-3, -2)

    def head_parameters(self) -> HeadParameters:
        projections = [f'{linear}.{name}' for linear in ('query', 'key') for name in ('weight', 'bias')]
        return {**super().head_parameters(), **dict.fromkeys(projections, (0, self.dim))}

    def _content_scores(self, query: Tensor, x: Tensor) -> Tensor:
        """Returns q·k/√D, ``(B, N_h, H*W, H*W)``."""
        return head_products(query.flatten(1, 2), self.key(x).flatten(1, 2), self.num_heads)

    def _position_terms(self, query: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns the two terms of q·r_δ/√D, which broadcast to ``(B, H*W, N_h, H, W)``."""
        height, width = query.shape[1:3]
        row, column = (table.T / self.dim**0.5 for table in self.tables((height, width)))
        of_rows, of_columns = at_least_float32(query).unflatten(3, (self.num_heads, self.dim)).chunk(2, dim=-1)
        with full_precision(query.device.type):
            rows = torch.einsum('bijhd,dik->bijhk', of_rows, at_shifts(row, height))  # q₁·R[k1 − q1]
            columns = torch.einsum('bijhd,djk->bijhk', of_columns, at_shifts(column, width))  # q₂·C[k2 − q2]
        return rows.flatten(1, 2).contiguous()[..., :, None], columns.flatten(1, 2)[..., None, :]
