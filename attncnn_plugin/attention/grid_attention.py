"""Self-attention over a grid whose values are the layer's input itself, by position alone.

The encodings of Cordonnier et al. 2020 (C20): quadratic (eq. 9), generalized quadratic (eq. 19) and learned (4.3).
"""

from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from .attention_layer import GaussianHeads
from .encodings import (
    CENTER_STD,
    SPREAD_STD,
    GeneralizedQuadraticEncoding,
    LearnedEncoding,
    QuadraticEncoding,
)
from .heads import PrunableHeads
from .linear import check_plain_linear
from .position_tables import RelativeTables
from .precision import Device, Dtype, at_least_float32, full_precision
from .softmax import softmax, without_subnormals
from .state_dicts import StateDict, StructureError


class GridAttention(PrunableHeads):
    """Attention over a grid of tokens: the base of all layers that mix pixels by their probabilities.

    The values of a head are the input itself, D_h = D: the heads' outputs P_h X are concatenated to N_h·D channels
    and mapped by one linear layer (C20, section 2 and appendix E). With a ``head_dim`` they are W_val X, D_h channels a
    head, N_h·D_h in all. C20 (remark after Theorem 1) advises D_h = D, for with fewer channels a head cannot be every
    slice of a kernel. Subclasses say how pixels are mixed, in :meth:`heads`.

    Args:
        dim (int): Channels D of the input.
        num_heads (int): Number of heads N_h.
        out_dim (int, optional): Channels of the output. Defaults to ``dim``.
        bias (bool): Whether the output has a bias. Defaults to True.
        attn_drop (float): Dropout rate of the attention probabilities. Defaults to 0.
        head_dim (int, optional): Channels D_h of a head's values, for instance D/N_h. Defaults to None, values that are
            the input itself.

    Raises:
        ValueError: A number of heads or of channels or a rate out of range.

    Attributes:
        head_dim (int): Channels of a head's values.
        value_proj (nn.Linear | None): W_val, D to N_h·D_h, no bias: probabilities add up to 1, so that it would be one
            of the output. None for values that are the input.
        value (nn.Linear): W_out, the map of the concatenated heads, N_h·D_h to ``out_dim``.
    """

    value_proj: Any

    def __init__(
        self,
        dim: int,
        num_heads: int,
        out_dim: Optional[int] = None,
        bias: bool = True,
        attn_drop: float = 0.0,
        head_dim: Optional[int] = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        super().__init__()
        if num_heads < 1:
            raise ValueError(f'num_heads={num_heads} must be at least 1')
        if head_dim is not None and head_dim < 1:
            raise ValueError(f'head_dim={head_dim} must be at least 1, or None for values that are the input itself')
        self.dim = dim
        self.head_dim = dim if head_dim is None else head_dim
        self._init_heads(num_heads)
        self.attn_drop = nn.Dropout(attn_drop)
        self.value_proj = None if head_dim is None else nn.Linear(dim, num_heads * head_dim, bias=False, **dd)
        self.value = nn.Linear(num_heads * self.head_dim, dim if out_dim is None else out_dim, bias, **dd)

    def extra_repr(self) -> str:
        head_dim = '' if self.value_proj is None else f', head_dim={self.head_dim}'
        return f'dim={self.dim}, num_heads={self.num_heads}{head_dim}'

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, D)`` to ``(B, H, W, D_out)``, for any H and W that the position encoding covers."""
        return self.value(self.heads(x) if self.num_heads else x[..., :0])

    def heads(self, x: Tensor) -> Tensor:
        """Computes the outputs of all heads side by side, ``(B, H, W, N_h·D_h)``."""
        return self._mix(self.attention_probs(x.shape[1:3]), x)

    def head_parameters(self) -> Dict[str, Tuple[int, int]]:
        of_values = {} if self.value_proj is None else {'value_proj.weight': (0, self.head_dim)}
        return {**of_values, 'value.weight': (1, self.head_dim)}

    def follow(self, state_dict: StateDict, prefix: str) -> bool:
        projection, value = (state_dict.get(f'{prefix}{name}.weight') for name in ('value_proj', 'value'))
        if value is not None and (projection is None) != (self.value_proj is None):
            head_dim = None if projection is None else len(projection) // max(self.num_heads, 1)
            raise StructureError(
                f'{prefix}value_proj.weight is {"not " if projection is None else ""}in the state dict, but '
                f'{"not " if projection is not None else ""}in the model: build it with head_dim={head_dim}'
            )
        return super().follow(state_dict, prefix)

    def value_matrices(self) -> Tensor:
        check_plain_linear('value', self.value)
        shape = self.num_heads, self.head_dim
        output = at_least_float32(self.value.weight.unflatten(1, shape).transpose(0, 1))
        if self.value_proj is None:
            return output
        check_plain_linear('value_proj', self.value_proj)
        with full_precision(output.device.type):
            return torch.matmul(output, at_least_float32(self.value_proj.weight.unflatten(0, shape)))

    @property
    def max_size(self) -> Optional[Tuple[int, int]]:
        """Height and width, in tokens, of the largest grid; None without a limit."""
        return None

    @property
    def position_tables(self) -> Optional[RelativeTables]:
        """R and C; None for a layer without relative position vectors."""
        return None

    def share_position_tables(self, tables: RelativeTables) -> None:
        """Takes R and C of another layer instead of its own."""
        raise NotImplementedError

    @property
    def _drops(self) -> bool:
        """Whether single probabilities are dropped."""
        return self.training and self.attn_drop.p > 0

    def _mix(self, probs: Tensor, x: Tensor) -> Tensor:
        """Σ_k P[q, k] V[k] of every head, ``(B, H, W, N_h·D_h)``.

        Args:
            probs (Tensor): P, ``(N_h, H*W, H*W)``. With dropout, the images of a batch have the same mask.
            x (Tensor): ``(B, H, W, D)``.
        """
        probs = self.attn_drop(probs).to(x.dtype)
        if self.value_proj is None:
            heads = torch.einsum('hqk,bkd->bqhd', probs, x.flatten(1, 2))
        else:
            heads = torch.einsum('hqk,bkhd->bqhd', probs, self._values(x).flatten(1, 2))
        return heads.flatten(2).unflatten(1, x.shape[1:3])

    def _values(self, x: Tensor) -> Tensor:
        """W_val X of each head, ``(B, H, W, N_h, D_h)``; not for values that are the input."""
        return self.value_proj(x).unflatten(-1, (self.num_heads, self.head_dim))


class SeparableScores(GridAttention):
    """Attention with scores by position that are a sum of a row and a column term.

    Softmax over a product grid of a sum is the product of the softmaxes along the axes, boundaries included:
    P[(q1, q2), (k1, k2)] = P1[q1, k1] · P2[q2, k2]. So pixels are mixed along rows, then along columns, by
    O(HW·(H + W)) multiply-adds a channel and head instead of O((HW)²). Subclasses define :meth:`axis_scores`.
    """

    @property
    def has_axis_scores(self) -> bool:
        """Whether the scores that depend on position alone are such a sum."""
        return self.has_position_scores

    def axis_scores(self, size: Sequence[int]) -> Tuple[Tensor, Tensor]:
        """The two terms of the score, ``(N_h, height, height)`` and ``(N_h, width, width)``."""
        raise NotImplementedError

    def axis_probs(self, size: Sequence[int]) -> Tuple[Tensor, Tensor]:
        """The factors P1 ``(N_h, height, height)`` and P2 ``(N_h, width, width)`` of the probabilities."""
        rows, columns = self.axis_scores(size)
        return softmax(rows), softmax(columns)

    def _product_probs(self, size: Sequence[int]) -> Tensor:
        """P1 ⊗ P2, ``(N_h, height*width, height*width)``."""
        rows, columns = self.axis_probs(size)
        return without_subnormals(torch.einsum('hqk,hrl->hqrkl', rows, columns)).flatten(3).flatten(1, 2)

    def _mix_along_axes(self, x: Tensor) -> Tensor:
        """(P1_h ⊗ P2_h) V_h of every head, ``(B, H, W, N_h·D_h)``."""
        if self._drops:  # single probabilities, which the factors do not have
            return self._mix(self._product_probs(x.shape[1:3]), x)
        values = [x] * self.num_heads if self.value_proj is None else self._values(x).unbind(3)
        heads: List[Tensor] = []
        for rows, columns, value in zip(*self.axis_probs(x.shape[1:3]), values):
            mixed = rows.to(x.dtype) @ value.flatten(2)  # Σ_k1 P1[q1, k1] V[k1, k2]
            heads.append(columns.to(x.dtype) @ mixed.unflatten(2, value.shape[2:]))  # Σ_k2 P2[q2, k2] …
        return torch.cat(heads, dim=-1)


class SeparableAttention(SeparableScores):
    """Attention by position alone whose score is a sum of a row and a column term: quadratic and learned heads."""

    encoding: Union[QuadraticEncoding, LearnedEncoding]

    def axis_scores(self, size: Sequence[int]) -> Tuple[Tensor, Tensor]:
        rows, columns = self.encoding.axis_scores(size)
        return rows, columns

    def attention_probs(self, size: Sequence[int]) -> Tensor:
        return self._product_probs(size)

    def heads(self, x: Tensor) -> Tensor:
        return self._mix_along_axes(x)


class QuadraticAttention(SeparableAttention):
    """Attention with the quadratic encoding, −α‖δ − Δ‖² (C20, eq. 9): isotropic Gaussian heads.

    Args:
        dim (int): Channels D of the input.
        num_heads (int): Number of heads N_h.
        out_dim (int, optional): Channels of the output. Defaults to ``dim``.
        bias (bool): Whether the output has a bias. Defaults to True.
        attn_drop (float): Dropout rate of the attention probabilities. Defaults to 0.
        head_dim (int, optional): See :class:`GridAttention`. Defaults to None.
        center_std, spread_std (float): Of the initial centres and widths, see
            :class:`~attncnn_plugin.attention.QuadraticEncoding`. Default to 2 and 0.01.

    Raises:
        ValueError: See :class:`GridAttention`; a standard deviation below 0.
    """

    encoding: QuadraticEncoding

    def __init__(
        self,
        dim: int,
        num_heads: int,
        out_dim: Optional[int] = None,
        bias: bool = True,
        attn_drop: float = 0.0,
        head_dim: Optional[int] = None,
        center_std: float = CENTER_STD,
        spread_std: float = SPREAD_STD,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        super().__init__(dim, num_heads, out_dim, bias, attn_drop, head_dim, **dd)
        self.encoding = QuadraticEncoding(num_heads, center_std=center_std, spread_std=spread_std, **dd)

    def gaussian_heads(self) -> GaussianHeads:
        return self.encoding.gaussian_heads()

    def head_parameters(self) -> Dict[str, Tuple[int, int]]:
        return {**super().head_parameters(), 'encoding.center': (0, 1), 'encoding.sqrt_precision': (0, 1)}


class GeneralizedQuadraticAttention(GridAttention):
    """Attention with the generalized quadratic encoding, −½(δ − Δ)ᵀΣ⁻¹(δ − Δ) (C20, eq. 19): Gaussian heads.

    The score has a cross term of rows and columns, so that pixels are mixed by the whole matrix of probabilities.

    Args:
        dim (int): Channels D of the input.
        num_heads (int): Number of heads N_h.
        out_dim (int, optional): Channels of the output. Defaults to ``dim``.
        bias (bool): Whether the output has a bias. Defaults to True.
        attn_drop (float): Dropout rate of the attention probabilities. Defaults to 0.
        head_dim (int, optional): See :class:`GridAttention`. Defaults to None.
        center_std, spread_std (float): Of the initial centres and factors M, see
            :class:`~attncnn_plugin.attention.GeneralizedQuadraticEncoding`. Default to 2 and 0.01.

    Raises:
        ValueError: See :class:`GridAttention`; a standard deviation below 0.
    """

    encoding: GeneralizedQuadraticEncoding

    def __init__(
        self,
        dim: int,
        num_heads: int,
        out_dim: Optional[int] = None,
        bias: bool = True,
        attn_drop: float = 0.0,
        head_dim: Optional[int] = None,
        center_std: float = CENTER_STD,
        spread_std: float = SPREAD_STD,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        super().__init__(dim, num_heads, out_dim, bias, attn_drop, head_dim, **dd)
        self.encoding = GeneralizedQuadraticEncoding(num_heads, center_std, spread_std, **dd)

    def gaussian_heads(self) -> GaussianHeads:
        return self.encoding.gaussian_heads()

    def head_parameters(self) -> Dict[str, Tuple[int, int]]:
        return {**super().head_parameters(), 'encoding.center': (0, 1), 'encoding.sqrt_precision': (0, 1)}

    def attention_probs(self, size: Sequence[int]) -> Tensor:
        return softmax(self.encoding.scores(size))


class LearnedAttention(SeparableAttention):
    """Attention with the learned encoding, vᵀr_δ with r_δ = [R[δ1]; C[δ2]] (C20, 4.3).

    Args:
        dim (int): Channels D of the input.
        num_heads (int): Number of heads N_h.
        max_size (tuple[int, int]): Height and width, in tokens, of the largest grid. Defaults to (16, 16).
        position (str): ``'relative_learned'`` or ``'relative_sinusoidal'``: R and C. Defaults to
            ``'relative_learned'``.
        position_dim (int, optional): Length D_p of r_δ = [R[δ1]; C[δ2]], half of it for rows and half for columns.
            Defaults to 2·D for learned vectors, D channels an axis, as in the released code of C20, whose 12.3M
            parameters need it; the text has D_p = D. Defaults to D for sinusoidal vectors.
        out_dim (int, optional): Channels of the output. Defaults to ``dim``.
        bias (bool): Whether the output has a bias. Defaults to True.
        attn_drop (float): Dropout rate of the attention probabilities. Defaults to 0.
        head_dim (int, optional): See :class:`GridAttention`. Defaults to None.

    Raises:
        ValueError: An unknown ``position``; a ``position_dim`` that is odd, or no multiple of 4 for sinusoidal vectors;
            see :class:`GridAttention`.
    """

    encoding: LearnedEncoding

    def __init__(
        self,
        dim: int,
        num_heads: int,
        max_size: Tuple[int, int] = (16, 16),
        position: str = 'relative_learned',
        position_dim: Optional[int] = None,
        out_dim: Optional[int] = None,
        bias: bool = True,
        attn_drop: float = 0.0,
        head_dim: Optional[int] = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        super().__init__(dim, num_heads, out_dim, bias, attn_drop, head_dim, **dd)
        span, _, kind = str(position).partition('_')
        if span != 'relative' or kind not in ('learned', 'sinusoidal'):
            raise ValueError(
                f"position={position!r} is not for attention without content: choose 'relative_learned' or "
                "'relative_sinusoidal'"
            )
        if position_dim is None:
            position_dim = 2 * dim if kind == 'learned' else dim
        self.encoding = LearnedEncoding(num_heads, position_dim, max_size, kind, **dd)

    @property
    def max_size(self) -> Optional[Tuple[int, int]]:
        return self.encoding.tables.max_size if self.encoding.tables.kind == 'learned' else None

    @property
    def position_tables(self) -> Optional[RelativeTables]:
        return self.encoding.tables

    def share_position_tables(self, tables: RelativeTables) -> None:
        self.encoding.tables = tables

    def head_parameters(self) -> Dict[str, Tuple[int, int]]:
        return {**super().head_parameters(), 'encoding.weight': (0, 1)}
