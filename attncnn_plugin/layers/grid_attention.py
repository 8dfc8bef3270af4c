"""Self-attention over a pixel grid whose values are the layer's input itself (C20, eq. 1–3 and 9)."""

from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import GridCache
from .encodings import GeneralizedQuadraticEncoding, LearnedEncoding, QuadraticEncoding
from .linear import is_plain_linear
from .low_rank_heads import TOLERANCE, ShiftHead, shift_heads
from .precision import matmul_dtype
from .prunable_heads import PrunableHeads
from .separable import attend_separable, map_heads, separable_heads

ATTN_IMPLS = ('auto', 'dense', 'separable')


class GridAttention(PrunableHeads):
    """What every attention of this package does once it has its probabilities: mix pixels, then map the heads.

    A head has no value projection of its own, D_h = D: the heads' outputs P_h X are concatenated to N_h·D channels
    and mapped by one linear layer (C20, section 2 and appendix E).

    Args:
        dim (int): Channels D of the input.
        num_heads (int): Number of heads N_h.
        out_dim (int, optional): Channels of the output. Defaults to ``dim``.
        bias (bool): Whether the output has a bias. Defaults to True.
        attn_drop (float): Dropout rate of the attention probabilities. Defaults to 0.
        attn_impl (str): How pixels are mixed.

            - ``'auto'``: the cheapest way that is exact in the mode the layer is in.
            - ``'dense'``: by the whole matrix of probabilities, O((HW)²) a channel and head.
            - ``'separable'``: along rows, then along columns, O(HW·(H + W)) a channel and head. Exact where the
              score is a sum of a row and a column term; no dropout of single probabilities is possible.

            Defaults to ``'auto'``.

    Raises:
        ValueError: A number of heads or a rate out of range, an unknown ``attn_impl``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        out_dim: int = None,
        bias: bool = True,
        attn_drop: float = 0.0,
        attn_impl: str = 'auto',
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        if num_heads < 1:
            raise ValueError(f'num_heads={num_heads} must be at least 1')
        if attn_impl not in ATTN_IMPLS:
            raise ValueError(f'attn_impl={attn_impl!r} is unknown: choose one of {ATTN_IMPLS}')
        self.dim = dim
        self._init_heads(num_heads)
        self.attn_impl = attn_impl
        self.attn_drop = nn.Dropout(attn_drop)
        self.value = nn.Linear(num_heads * dim, dim if out_dim is None else out_dim, bias, device=device, dtype=dtype)
        self._kept = None

    def extra_repr(self) -> str:
        return f'dim={self.dim}, num_heads={self.num_heads}, attn_impl={self.attn_impl!r}'

    def head_parameters(self) -> Dict[str, Tuple[int, int]]:
        return {'value.weight': (1, self.dim)}

    def switch_to_deploy(self) -> None:
        """For inference: evaluation mode, no gradients; what depends on the grid alone is computed once for a size.

        After a change of parameters through ``.data``, which nothing can see, call it again.
        """
        self.eval().requires_grad_(False)
        self._kept = GridCache()

    @property
    def max_size(self) -> Optional[Tuple[int, int]]:
        """Height and width, in tokens, of the largest grid, None without a limit."""
        return None

    def _by_grid(self, make: Callable[..., Any], *size: Any) -> Any:
        """``make(*size)``, which depends on the parameters alone."""
        return make(*size) if self._kept is None else self._kept(self, make, *size)

    def _map(self, heads: Tensor, value: Optional[Tuple[Tensor, Tensor]]) -> Tensor:
        """The map of the heads, ``(B, H, W, N_h·D)`` to ``(B, H, W, D_out)``."""
        return self.value(heads) if value is None else F.linear(heads, *value)

    def _plain_value(self, value: Optional[Tuple[Tensor, Tensor]]) -> Optional[Tuple[Tensor, Optional[Tensor]]]:
        """Weight and bias of the heads' map, None if it has to be called."""
        if value is None and is_plain_linear(self.value):
            return self.value.weight, self.value.bias
        return value

    def _attend_dense(self, x: Tensor, probs: Tensor, value: Optional[Tuple[Tensor, Tensor]] = None) -> Tensor:
        """Σ_k P[q, k] X[k] by the matrix.

        Args:
            x (Tensor): ``(B, H, W, D)``.
            probs (Tensor): ``(N_h, H*W, H*W)``. With dropout, the images of a batch have the same mask.
            value (tuple[Tensor, Tensor], optional): See :meth:`PositionAttention.forward`.
        """
        batch, height, width, dim = x.shape
        probs = self.attn_drop(probs).to(x.dtype).flatten(0, 1)
        heads = torch.matmul(probs, x.permute(1, 2, 0, 3).reshape(height * width, batch * dim))  # (h·q, b·d)
        heads = heads.reshape(self.num_heads, height, width, batch, dim).permute(3, 1, 2, 0, 4)
        return self._map(heads.reshape(batch, height, width, self.num_heads * dim), value)


class PositionAttention(GridAttention):
    """Attention that depends on positions alone: the base of the three classes below."""

    position_only = True

    def forward(self, x: Tensor, value: Optional[Tuple[Tensor, Tensor]] = None) -> Tensor:
        """``(B, H, W, D)`` to ``(B, H, W, D_out)``, for any H and W.

        Args:
            x (Tensor): ``(B, H, W, D)``.
            value (tuple[Tensor, Tensor], optional): Weight ``(D_out, N_h·D)`` and bias of the map of the heads, such as
                its product with a linear layer that follows. Defaults to those of the layer.
        """
        return self._attend_dense(x, self.attention_probs(x.shape[1], x.shape[2]), value)

    def attention_probs(self, height: int, width: int) -> Tensor:
        """The probabilities of every query (row-major) for every key.

        Returns:
            Tensor: ``(N_h, height*width, height*width)``, float32 (float64 for float64 parameters), without dropout.
        """
        return self.scores(height, width).softmax(dim=-1)

    def scores(self, height: int, width: int) -> Tensor:
        """The scores, up to a constant per query, ``(N_h, height*width, height*width)``, at least float32."""
        return self.encoding.scores(height, width)


class SeparableAttention(PositionAttention):
    """Position-only attention whose score is a sum of a row and a column term.

    Softmax over a product grid of a sum is the product of the softmaxes along the axes, boundaries included:
    P[(q1, q2), (k1, k2)] = P1[q1, k1] · P2[q2, k2].
    """

    def forward(self, x: Tensor, value: Optional[Tuple[Tensor, Tensor]] = None) -> Tensor:
        """``(B, H, W, D)`` to ``(B, H, W, D_out)``, for any H and W.

        Raises:
            RuntimeError: ``attn_impl='separable'`` while attention dropout is active.
        """
        height, width = x.shape[1], x.shape[2]
        if self.num_heads and self._use_separable(height, width):
            row_probs, column_probs = self._by_grid(self.axis_probs, height, width)
            plain = self._plain_value(value)
            if plain is not None:
                return attend_separable(x, row_probs, column_probs, *plain)
            return self.value(torch.cat(list(separable_heads(x, row_probs, column_probs)), dim=-1))
        return self._attend_dense(x, self.attention_probs(height, width), value)

    def axis_scores(self, height: int, width: int) -> Tuple[Tensor, Tensor]:
        """The two terms of the score, ``(N_h, height, height)`` and ``(N_h, width, width)``."""
        return self.encoding.axis_scores(height, width)

    def axis_probs(self, height: int, width: int) -> Tuple[Tensor, Tensor]:
        """The factors P1 ``(N_h, height, height)`` and P2 ``(N_h, width, width)`` of the probabilities."""
        row_scores, column_scores = self.axis_scores(height, width)
        return row_scores.softmax(dim=-1), column_scores.softmax(dim=-1)

    def attention_probs(self, height: int, width: int) -> Tensor:
        row_probs, column_probs = self.axis_probs(height, width)
        probs = row_probs[:, :, None, :, None] * column_probs[:, None, :, None, :]
        return probs.reshape(self.num_heads, height * width, height * width)

    def scores(self, height: int, width: int) -> Tensor:
        row_scores, column_scores = self.axis_scores(height, width)
        scores = row_scores[:, :, None, :, None] + column_scores[:, None, :, None, :]
        return scores.reshape(self.num_heads, height * width, height * width)

    def _use_separable(self, height: int, width: int) -> bool:
        dropout = self.training and self.attn_drop.p > 0
        if self.attn_impl == 'separable':
            if dropout:
                raise RuntimeError(
                    f"attn_impl='separable' cannot drop single attention probabilities (attn_drop={self.attn_drop.p}, "
                    "training mode): set attn_drop=0, or attn_impl='auto', which is dense while dropout is active"
                )
            return True
        return self.attn_impl == 'auto' and not dropout and height + width < height * width


class QuadraticAttention(SeparableAttention):
    """Attention with the quadratic encoding, −α‖δ − Δ‖² (C20, eq. 9): isotropic Gaussian heads.

    Args:
        See :class:`GridAttention`.
    """

    def __init__(self, dim: int, num_heads: int, device=None, dtype=None, **kwargs) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        self.encoding = QuadraticEncoding(num_heads, device=device, dtype=dtype)

    def head_parameters(self) -> Dict[str, Tuple[int, int]]:
        return {**super().head_parameters(), 'encoding.center': (0, 1), 'encoding.sqrt_precision': (0, 1)}


class GeneralizedQuadraticAttention(PositionAttention):
    """Attention with the generalized quadratic encoding, −½(δ − Δ)ᵀΣ⁻¹(δ − Δ) (C20, eq. 19): Gaussian heads.

    Where nothing is to be learned about the heads, ``attn_impl='auto'`` mixes pixels along rows and columns for those
    whose table of shifts is of low rank, see :mod:`~attncnn_plugin.layers.low_rank_heads`.

    Args:
        See :class:`GridAttention`; ``attn_impl`` is ``'auto'`` or ``'dense'``.

    Raises:
        ValueError: ``attn_impl='separable'``.
    """

    def __init__(self, dim: int, num_heads: int, device=None, dtype=None, **kwargs) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if self.attn_impl == 'separable':
            raise ValueError(
                "attn_impl='separable' is not exact for the generalized quadratic encoding, whose score has a cross "
                "term of rows and columns: use 'auto' or 'dense'"
            )
        self.encoding = GeneralizedQuadraticEncoding(num_heads, device=device, dtype=dtype)

    def forward(self, x: Tensor, value: Optional[Tuple[Tensor, Tensor]] = None) -> Tensor:
        """``(B, H, W, D)`` to ``(B, H, W, D_out)``, for any H and W."""
        height, width, dtype = *x.shape[1:3], matmul_dtype(x)
        if not self._use_shift_heads(x.device, dtype):
            return super().forward(x, value)
        heads = (head.mix(x) for head in self._by_grid(self._shift_heads, height, width, dtype))
        plain = self._plain_value(value)
        if plain is not None:
            return map_heads(heads, *plain)
        return self.value(torch.cat(list(heads), dim=-1))

    def _shift_heads(self, height: int, width: int, dtype: torch.dtype) -> Sequence[ShiftHead]:
        return shift_heads(self.encoding.shift_scores(height, width), height, width, dtype)

    def _use_shift_heads(self, device: torch.device, dtype: torch.dtype) -> bool:
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in self.encoding.parameters())
        dropout = self.training and self.attn_drop.p > 0
        # The choice depends on values, which a compiled graph and the meta device do not know.
        return (
            self.attn_impl == 'auto'
            and self.num_heads > 0
            and dtype in TOLERANCE
            and not learns
            and not dropout
            and device.type != 'meta'
            and not torch.compiler.is_compiling()
        )

    def head_parameters(self) -> Dict[str, Tuple[int, int]]:
        return {**super().head_parameters(), 'encoding.center': (0, 1), 'encoding.sqrt_precision': (0, 1)}


class LearnedAttention(SeparableAttention):
    """Attention with the learned encoding, vᵀr_δ (C20, 4.3).

    Args:
        max_size (tuple[int, int]): Height and width, in tokens, of the largest grid. Defaults to (16, 16).
        position (str): ``'relative_learned'`` or ``'relative_sinusoidal'``: R and C. Defaults to
            ``'relative_learned'``.
        For the others see :class:`GridAttention`.

    Raises:
        ValueError: An unknown ``position``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        max_size: Tuple[int, int] = (16, 16),
        position: str = 'relative_learned',
        device=None,
        dtype=None,
        **kwargs,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        span, _, kind = str(position).partition('_')
        if span != 'relative' or kind not in ('learned', 'sinusoidal'):
            raise ValueError(
                f"position={position!r} is not for attention without content: choose 'relative_learned' or "
                "'relative_sinusoidal'"
            )
        self.encoding = LearnedEncoding(num_heads, dim, max_size, kind, device=device, dtype=dtype)

    @property
    def max_size(self) -> Optional[Tuple[int, int]]:
        return self.encoding.tables.max_size if self.encoding.tables.kind == 'learned' else None

    def head_parameters(self) -> Dict[str, Tuple[int, int]]:
        return {**super().head_parameters(), 'encoding.weight': (0, 1)}
