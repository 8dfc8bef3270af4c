"""Self-attention over a grid whose values are the layer's input itself, by position alone.

The encodings of Cordonnier et al. 2020 (C20): quadratic (eq. 9), generalized quadratic (eq. 19) and learned (4.3).
"""

import math
from typing import Any, Callable, Dict, Hashable, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from .attention_layer import GaussianHeads
from .cache import GridCache
from .encodings import GeneralizedQuadraticEncoding, LearnedEncoding, QuadraticEncoding
from .linear import LinearMap, as_map, check_plain_linear, joined_maps
from .low_rank_heads import TOLERANCE, ShiftHead, cheapest_heads
from .precision import Device, Dtype, at_least_float32, matmul_dtype
from .prunable_heads import PrunableHeads
from .separable import attend_separable, map_heads

ATTN_IMPLS = ('auto', 'dense', 'separable')
# On CPUs low-rank heads mix so many tokens at a time (one image at least): what is between rows and columns then stays
# in the cache. With 32 images of 16x16 tokens at once heads of rank 5 take 1.8 times as long.
TOKENS_AT_ONCE = 1024

OutputMap = Union[LinearMap, nn.Module]


class GridAttention(PrunableHeads):
    """Attention over a grid of tokens: the base of all layers that mix pixels by their probabilities.

    A head has no value projection of its own, D_h = D: the heads' outputs P_h X are concatenated to N_h·D channels
    and mapped by one linear layer (C20, section 2 and appendix E). Subclasses say how pixels are mixed, in
    :meth:`_attend`.

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

    Raises:
        ValueError: A number of heads or a rate out of range, an unknown ``attn_impl``.

    Attributes:
        value (nn.Linear): The map of the concatenated heads, N_h·D to ``out_dim``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        out_dim: Optional[int] = None,
        bias: bool = True,
        attn_drop: float = 0.0,
        attn_impl: str = 'auto',
        device: Device = None,
        dtype: Dtype = None,
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
        self._cache = GridCache()
        self._deployed = False

    def extra_repr(self) -> str:
        return f'dim={self.dim}, num_heads={self.num_heads}, attn_impl={self.attn_impl!r}'

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
        """``(B, H, W, D)`` to ``(B, H, W, D_out)``, the heads mapped by ``output_map``, ``(…, N_h·D)`` to D_out."""
        raise NotImplementedError

    def head_parameters(self) -> Dict[str, Tuple[int, int]]:
        return {'value.weight': (1, self.dim)}

    def value_matrices(self) -> Tensor:
        check_plain_linear('value', self.value)
        return at_least_float32(self.value.weight.unflatten(1, (self.num_heads, self.dim)).transpose(0, 1))

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
        probs = self.attn_drop(probs).to(x.dtype).flatten(0, 1)
        heads = torch.matmul(probs, x.permute(1, 2, 0, 3).reshape(height * width, batch * dim))  # (h·q, b·d)
        heads = heads.reshape(self.num_heads, height, width, batch, dim).permute(3, 1, 2, 0, 4)
        return output_map(heads.reshape(batch, height, width, self.num_heads * dim))


class SeparableScores(GridAttention):
    """Attention with scores by position that are a sum of a row and a column term.

    Softmax over a product grid of a sum is the product of the softmaxes along the axes, boundaries included:
    P[(q1, q2), (k1, k2)] = P1[q1, k1] · P2[q2, k2]. Subclasses define :meth:`axis_scores`.
    """

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
            return attend_separable(x, row_probs, column_probs, output_map)
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

    Raises:
        ValueError: See :class:`GridAttention`.
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
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(dim, num_heads, out_dim, bias, attn_drop, attn_impl, device, dtype)
        self.encoding = QuadraticEncoding(num_heads, device=device, dtype=dtype)

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

    Raises:
        ValueError: ``attn_impl='separable'``; see :class:`GridAttention`.
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
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(dim, num_heads, out_dim, bias, attn_drop, attn_impl, device, dtype)
        if self.attn_impl == 'separable':
            raise ValueError(
                "attn_impl='separable' is not exact for the generalized quadratic encoding, whose score has a cross "
                "term of rows and columns: use 'auto' or 'dense'"
            )
        self.encoding = GeneralizedQuadraticEncoding(num_heads, device=device, dtype=dtype)

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
        return torch.cat([map_heads((head.mix(part) for head in heads), output_map) for part in x.split(images)])

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
        out_dim (int, optional): Channels of the output. Defaults to ``dim``.
        bias (bool): Whether the output has a bias. Defaults to True.
        attn_drop (float): Dropout rate of the attention probabilities. Defaults to 0.
        attn_impl (str): See :class:`GridAttention`. Defaults to ``'auto'``.

    Raises:
        ValueError: An unknown ``position``; see :class:`GridAttention`.
    """

    encoding: LearnedEncoding

    def __init__(
        self,
        dim: int,
        num_heads: int,
        max_size: Tuple[int, int] = (16, 16),
        position: str = 'relative_learned',
        out_dim: Optional[int] = None,
        bias: bool = True,
        attn_drop: float = 0.0,
        attn_impl: str = 'auto',
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(dim, num_heads, out_dim, bias, attn_drop, attn_impl, device, dtype)
        span, _, kind = str(position).partition('_')
        if span != 'relative' or kind not in ('learned', 'sinusoidal'):
            raise ValueError(
                f"position={position!r} is not for attention without content: choose 'relative_learned' or "
                "'relative_sinusoidal'"
            )
        position_dim = 2 * dim if kind == 'learned' else dim
        self.encoding = LearnedEncoding(num_heads, position_dim, max_size, kind, device=device, dtype=dtype)

    @property
    def max_size(self) -> Optional[Tuple[int, int]]:
        return self.encoding.tables.max_size if self.encoding.tables.kind == 'learned' else None

    def head_parameters(self) -> Dict[str, Tuple[int, int]]:
        return {**super().head_parameters(), 'encoding.weight': (0, 1)}
