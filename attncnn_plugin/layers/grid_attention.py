"""Self-attention over a grid whose values are the layer's input itself, by position alone.

The encodings of Cordonnier et al. 2020 (C20): quadratic (eq. 9), generalized quadratic (eq. 19) and learned (4.3).
"""

import math
from typing import Any, Callable, Dict, Hashable, Iterator, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from .attention_layer import GaussianHeads
from .cache import GridCache
from .encodings import (
    CENTER_STD,
    SPREAD_STD,
    GeneralizedQuadraticEncoding,
    LearnedEncoding,
    QuadraticEncoding,
)
from .linear import LinearMap, as_map, check_plain_linear, joined_maps
from .low_rank_heads import TOLERANCE, ShiftHead, cheapest_heads
from .position_tables import RelativeTables
from .precision import Device, Dtype, at_least_float32, full_precision, matmul_dtype
from .prunable_heads import PrunableHeads
from .separable import attend_separable, map_heads, mix_values
from .structure import StateDict, StructureError

ATTN_IMPLS = ('auto', 'dense', 'separable')
# On CPUs low-rank heads mix so many tokens at a time (one image at least): what is between rows and columns then stays
# in the cache. With 32 images of 16x16 tokens at once heads of rank 5 take 1.8 times as long.
TOKENS_AT_ONCE = 1024

OutputMap = Union[LinearMap, nn.Module]


class GridAttention(PrunableHeads):
    """Attention over a grid of tokens: the base of all layers that mix pixels by their probabilities.

    The values of a head are the input itself, D_h = D: the heads' outputs P_h X are concatenated to N_h·D channels
    and mapped by one linear layer (C20, section 2 and appendix E). With a ``head_dim`` they are W_val X, D_h channels a
    head, N_h·D_h in all. C20 (remark after Theorem 1) advises D_h = D, for with fewer channels a head cannot be every
    slice of a kernel. Subclasses say how pixels are mixed, in :meth:`_attend`.

    Args:
        dim (int): Channels D of the input.
        num_heads (int): Number of heads N_h.
        out_dim (int, optional): Channels of the output. Defaults to ``dim``.
        bias (bool): Whether the output has a bias. Defaults to True.
        attn_drop (float): Dropout rate of the attention probabilities. Defaults to 0.
        attn_impl (str): The way to mix pixels.

            - ``'auto'``: the cheapest way that is exact in the mode the layer is in.
            - ``'dense'``: by the whole matrix of probabilities, O((HW)²) a channel and head.
            - ``'separable'``: along rows, then along columns, O(HW·(H + W)) a channel and head. Exact where the
              score is a sum of a row and a column term; no dropout of single probabilities is possible.

            Defaults to ``'auto'``.
        head_dim (int, optional): Channels D_h of a head's values, for instance D/N_h. Defaults to None, values that are
            the input itself.

    Raises:
        ValueError: A number of heads or of channels or a rate out of range, an unknown ``attn_impl``.

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
        attn_impl: str = 'auto',
        head_dim: Optional[int] = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        super().__init__()
        if num_heads < 1:
            raise ValueError(f'num_heads={num_heads} must be at least 1')
        if attn_impl not in ATTN_IMPLS:
            raise ValueError(f'attn_impl={attn_impl!r} is unknown: choose one of {ATTN_IMPLS}')
        if head_dim is not None and head_dim < 1:
            raise ValueError(f'head_dim={head_dim} must be at least 1, or None for values that are the input itself')
        self.dim = dim
        self.head_dim = dim if head_dim is None else head_dim
        self._init_heads(num_heads)
        self.attn_impl = attn_impl
        self.attn_drop = nn.Dropout(attn_drop)
        self.value_proj = None if head_dim is None else nn.Linear(dim, num_heads * head_dim, bias=False, **dd)
        self.value = nn.Linear(num_heads * self.head_dim, dim if out_dim is None else out_dim, bias, **dd)
        self._cache = GridCache()
        self._deployed = False

    def extra_repr(self) -> str:
        head_dim = '' if self.value_proj is None else f', head_dim={self.head_dim}'
        return f'dim={self.dim}, num_heads={self.num_heads}{head_dim}, attn_impl={self.attn_impl!r}'

    def forward(self, x: Tensor, following: Optional[nn.Module] = None) -> Tensor:
        """``(B, H, W, D)`` to ``(B, H, W, D_out)``, for any H and W that the position encoding covers.

        Args:
            x (Tensor): Tokens, ``(B, H, W, D)``.
            following (nn.Module, optional): A layer to apply to the output. A linear layer becomes one with the map of
                the heads where that is cheaper. Defaults to none.
        """
        joined = None if following is None else joined_maps(self.value, following, math.prod(x.shape[:3]))
        if joined is not None:
            return self._attend(x, joined)
        output = self._attend(x, as_map(self.value))
        return output if following is None else following(output)

    def _attend(self, x: Tensor, output_map: OutputMap) -> Tensor:
        """``(B, H, W, D)`` to ``(B, H, W, D_out)``, the heads mapped by ``output_map``, ``(…, N_h·D_h)`` to D_out."""
        raise NotImplementedError

    def head_parameters(self) -> Dict[str, Tuple[int, int]]:
        of_values = {} if self.value_proj is None else {'value_proj.weight': (0, self.head_dim)}
        return {**of_values, 'value.weight': (1, self.head_dim)}

    def structure_in(self, state_dict: StateDict, prefix: str) -> Optional[int]:
        projection, value = (state_dict.get(f'{prefix}{name}.weight') for name in ('value_proj', 'value'))
        if value is not None and (projection is None) != (self.value_proj is None):
            head_dim = None if projection is None else len(projection) // max(self.num_heads, 1)
            raise StructureError(
                f'{prefix}value_proj.weight is {"not " if projection is None else ""}in the state dict, but '
                f'{"not " if projection is not None else ""}in the model: build it with head_dim={head_dim}'
            )
        return super().structure_in(state_dict, prefix)

    def value_matrices(self) -> Tensor:
        check_plain_linear('value', self.value)
        shape = self.num_heads, self.head_dim
        output = at_least_float32(self.value.weight.unflatten(1, shape).transpose(0, 1))
        if self.value_proj is None:
            return output
        check_plain_linear('value_proj', self.value_proj)
        with full_precision(output.device.type):
            return torch.matmul(output, at_least_float32(self.value_proj.weight.unflatten(0, shape)))

    def switch_to_deploy(self) -> None:
        """For inference: evaluation mode, no gradients; what depends on the grid alone is computed once for a size.

        After a change of large parameters through ``.data``, which nothing can see, call it again.
        """
        self.eval().requires_grad_(False)
        self._cache = GridCache()
        self._deployed = True

    @property
    def max_size(self) -> Optional[Tuple[int, int]]:
        """Height and width, in tokens, of the largest grid; None without a limit."""
        return None

    @property
    def position_tables(self) -> Optional[RelativeTables]:
        """R and C; None for a layer without relative position vectors."""
        return None

    def share_position_tables(self, tables: RelativeTables) -> None:
        """Takes R and C of another layer in place of its own."""
        raise NotImplementedError

    @property
    def _drops(self) -> bool:
        """Whether single probabilities are dropped, which only the dense way can do."""
        return self.training and self.attn_drop.p > 0

    def _cached(self, function: Callable[..., Any], *key: Hashable) -> Any:
        """``function(*key)``, which depends on the parameters alone; in a layer for inference, computed once."""
        return self._cache(self, function, *key) if self._deployed else function(*key)

    def _attend_dense(self, x: Tensor, probs: Tensor, output_map: OutputMap) -> Tensor:
        """Σ_k P[q, k] X[k] by the matrix.

        Args:
            x (Tensor): ``(B, H, W, D)``.
            probs (Tensor): ``(N_h, H*W, H*W)``. With dropout, the images of a batch have the same mask.
            output_map (LinearMap | nn.Module): The map of the heads.
        """
        batch, height, width, dim = x.shape
        probs = self.attn_drop(probs).to(x.dtype)
        if self.value_proj is None:
            tokens = x.flatten(1, 2).transpose(0, 1).reshape(height * width, batch * dim)
            heads = torch.matmul(probs.flatten(0, 1), tokens)  # (h·q, b·d)
        else:
            values = self._values(x).permute(3, 1, 2, 0, 4)  # (h, k1, k2, b, d)
            heads = torch.bmm(probs, values.reshape(self.num_heads, height * width, batch * self.head_dim))
        heads = heads.reshape(self.num_heads, height, width, batch, self.head_dim).permute(3, 1, 2, 0, 4)
        return output_map(heads.flatten(3))

    def _values(self, x: Tensor) -> Tensor:
        """W_val X of each head, ``(B, H, W, N_h, D_h)``; not for values that are the input."""
        return self.value_proj(x).unflatten(-1, (self.num_heads, self.head_dim))


class SeparableScores(GridAttention):
    """Attention with scores by position that are a sum of a row and a column term.

    Softmax over a product grid of a sum is the product of the softmaxes along the axes, boundaries included:
    P[(q1, q2), (k1, k2)] = P1[q1, k1] · P2[q2, k2]. Subclasses define :meth:`axis_scores`.
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
        row_scores, column_scores = self.axis_scores(size)
        return row_scores.softmax(dim=-1), column_scores.softmax(dim=-1)

    def _product_probs(self, size: Sequence[int]) -> Tensor:
        """P1 ⊗ P2, ``(N_h, height*width, height*width)``."""
        row_probs, column_probs = self.axis_probs(size)
        probs = row_probs[:, :, None, :, None] * column_probs[:, None, :, None, :]
        return probs.flatten(3).flatten(1, 2)

    def _attend_separable(self, x: Tensor, output_map: OutputMap) -> Tensor:
        """Along rows and columns where that is exact and cheaper, by the matrix otherwise.

        Raises:
            RuntimeError: ``attn_impl='separable'`` while attention dropout is active.
        """
        height, width = size = x.shape[1:3]
        if self.attn_impl == 'separable' and self._drops:
            raise RuntimeError(
                f"attn_impl='separable' cannot drop single attention probabilities (attn_drop={self.attn_drop.p}, "
                "training mode): set attn_drop=0, or attn_impl='auto', which is dense while dropout is active"
            )
        cheaper = self.attn_impl == 'auto' and not self._drops and height + width < height * width
        if self.num_heads and (cheaper or self.attn_impl == 'separable'):
            row_probs, column_probs = self._cached(self.axis_probs, size)
            if self.value_proj is None:
                return attend_separable(x, row_probs, column_probs, output_map)
            return output_map(mix_values(self._values(x), row_probs, column_probs).flatten(3))
        return self._attend_dense(x, self._product_probs(size), output_map)


class SeparableAttention(SeparableScores):
    """Attention by position alone whose score is a sum of a row and a column term: quadratic and learned heads."""

    encoding: Union[QuadraticEncoding, LearnedEncoding]

    def axis_scores(self, size: Sequence[int]) -> Tuple[Tensor, Tensor]:
        rows, columns = self.encoding.axis_scores(size)
        return rows, columns

    def attention_probs(self, size: Sequence[int]) -> Tensor:
        return self._product_probs(size)

    def _attend(self, x: Tensor, output_map: OutputMap) -> Tensor:
        return self._attend_separable(x, output_map)


class QuadraticAttention(SeparableAttention):
    """Attention with the quadratic encoding, −α‖δ − Δ‖² (C20, eq. 9): isotropic Gaussian heads.

    Args:
        dim (int): Channels D of the input.
        num_heads (int): Number of heads N_h.
        out_dim (int, optional): Channels of the output. Defaults to ``dim``.
        bias (bool): Whether the output has a bias. Defaults to True.
        attn_drop (float): Dropout rate of the attention probabilities. Defaults to 0.
        attn_impl (str): See :class:`GridAttention`. Defaults to ``'auto'``.
        head_dim (int, optional): See :class:`GridAttention`. Defaults to None.
        center_std, spread_std (float): Of the initial centres and widths, see
            :class:`~attncnn_plugin.layers.QuadraticEncoding`. Default to 2 and 0.01.

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
        attn_impl: str = 'auto',
        head_dim: Optional[int] = None,
        center_std: float = CENTER_STD,
        spread_std: float = SPREAD_STD,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        super().__init__(dim, num_heads, out_dim, bias, attn_drop, attn_impl, head_dim, **dd)
        self.encoding = QuadraticEncoding(num_heads, center_std=center_std, spread_std=spread_std, **dd)

    def gaussian_heads(self) -> GaussianHeads:
        return self.encoding.gaussian_heads()

    def head_parameters(self) -> Dict[str, Tuple[int, int]]:
        return {**super().head_parameters(), 'encoding.center': (0, 1), 'encoding.sqrt_precision': (0, 1)}


class GeneralizedQuadraticAttention(GridAttention):
    """Attention with the generalized quadratic encoding, −½(δ − Δ)ᵀΣ⁻¹(δ − Δ) (C20, eq. 19): Gaussian heads.

    The score depends on the shift alone, but has a cross term of rows and columns. Where the parameters do not change,
    ``attn_impl='auto'`` mixes pixels along rows and columns for the heads whose table of shifts is of low rank, see
    :mod:`~attncnn_plugin.layers.low_rank_heads`: in evaluation on the CPU, and after :meth:`switch_to_deploy`
    everywhere. The tables are decomposed once for a size.

    Args:
        dim (int): Channels D of the input.
        num_heads (int): Number of heads N_h.
        out_dim (int, optional): Channels of the output. Defaults to ``dim``.
        bias (bool): Whether the output has a bias. Defaults to True.
        attn_drop (float): Dropout rate of the attention probabilities. Defaults to 0.
        attn_impl (str): ``'auto'`` or ``'dense'``, see :class:`GridAttention`. Defaults to ``'auto'``.
        head_dim (int, optional): See :class:`GridAttention`. Defaults to None.
        center_std, spread_std (float): Of the initial centres and factors M, see
            :class:`~attncnn_plugin.layers.GeneralizedQuadraticEncoding`. Default to 2 and 0.01.

    Raises:
        ValueError: ``attn_impl='separable'``; a standard deviation below 0; see :class:`GridAttention`.
    """

    encoding: GeneralizedQuadraticEncoding

    def __init__(
        self,
        dim: int,
        num_heads: int,
        out_dim: Optional[int] = None,
        bias: bool = True,
        attn_drop: float = 0.0,
        attn_impl: str = 'auto',
        head_dim: Optional[int] = None,
        center_std: float = CENTER_STD,
        spread_std: float = SPREAD_STD,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        super().__init__(dim, num_heads, out_dim, bias, attn_drop, attn_impl, head_dim, **dd)
        if self.attn_impl == 'separable':
            raise ValueError(
                "attn_impl='separable' is not exact for the generalized quadratic encoding, whose score has a cross "
                "term of rows and columns: use 'auto' or 'dense'"
            )
        self.encoding = GeneralizedQuadraticEncoding(num_heads, center_std, spread_std, **dd)

    def gaussian_heads(self) -> GaussianHeads:
        return self.encoding.gaussian_heads()

    def head_parameters(self) -> Dict[str, Tuple[int, int]]:
        return {**super().head_parameters(), 'encoding.center': (0, 1), 'encoding.sqrt_precision': (0, 1)}

    def attention_probs(self, size: Sequence[int]) -> Tensor:
        return self.encoding.scores(size).softmax(dim=-1)

    def _attend(self, x: Tensor, output_map: OutputMap) -> Tensor:
        size, dtype = x.shape[1:3], matmul_dtype(x)
        if not self._uses_low_rank(x.device, dtype):
            return self._attend_dense(x, self.attention_probs(size), output_map)
        heads = self._cache(self.encoding, self._cheapest_heads, size, dtype)
        images = len(x)
        if x.device.type == 'cpu' and isinstance(output_map, LinearMap):  # another module may want to see all images
            images = max(1, TOKENS_AT_ONCE // math.prod(size))
        return torch.cat([map_heads(self._mixed(heads, part), output_map) for part in x.split(images)])

    def _mixed(self, heads: Sequence[ShiftHead], x: Tensor) -> Iterator[Tensor]:
        """P_h of the values of one head after the other."""
        values = [x] * len(heads) if self.value_proj is None else self._values(x).unbind(3)
        return (head.mix(own) for head, own in zip(heads, values))

    def _cheapest_heads(self, size: Sequence[int], dtype: torch.dtype) -> Sequence[ShiftHead]:
        return cheapest_heads(self.encoding.shift_scores(size), size, dtype)

    def _uses_low_rank(self, device: torch.device, dtype: torch.dtype) -> bool:
        if self.attn_impl != 'auto' or self.num_heads == 0 or self._drops or dtype not in TOLERANCE:
            return False
        # The choice depends on values. A compiled graph does not know them, and to read them stops a GPU.
        if torch.compiler.is_compiling() or device.type != 'cpu' and not self._deployed or device.type == 'meta':
            return False
        return not (torch.is_grad_enabled() and any(p.requires_grad for p in self.encoding.parameters()))


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
        attn_impl (str): See :class:`GridAttention`. Defaults to ``'auto'``.
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
        attn_impl: str = 'auto',
        head_dim: Optional[int] = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        super().__init__(dim, num_heads, out_dim, bias, attn_drop, attn_impl, head_dim, **dd)
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
