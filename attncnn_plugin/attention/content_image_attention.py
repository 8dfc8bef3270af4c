"""Attention by content and position in the place of a convolution (d'Ascoli et al. 2021, "Transformed CNNs")."""

import math
from typing import Any, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from .attention_layer import head_products
from .biased_attention import attend_shared, probabilities, shared_heads
from .image_attention import ImageAttention
from .neighbourhoods import AxisTiles, join_tiles, tile_keys, tile_queries
from .parts import parts_at_once
from .positions import GaussianHeads, QuadraticEncoding, WindowEncoding
from .precision import Device, Dtype, at_least_float32
from .prunable_heads import HeadParameters
from .softmax import softmax
from .structure import StateDict, StructureError
from .window import Window

POSITIONS = ('gaussian', 'table')
SHARED_GATE = 4.0  # λ of new heads: σ(λ) is 0.98


class ContentImageAttention(ImageAttention):
    """Attention with the inputs and outputs of a convolution whose probabilities depend on content and position.

    Queries are the output pixels, keys the pixels of the padded image. The scores are q·k/√D_k + b_δ; with a gate the
    probabilities are (1 − σ(λ))·softmax(q·k/√D_k) + σ(λ)·softmax(b_δ), as those of ConViT. Queries and keys have no
    biases, so that the zeros of a padding are keys without content and without value. W^Q starts at 0: then heads look
    at their shifts whatever the image is, as those of Li et al. 2021.

    Args:
        in_channels (int): Channels C of the image.
        out_channels (int): Channels of the output.
        num_heads (int): Number of heads N_h.
        window (Window): Where the queries are, and how the image is padded.
        qk_dim (int): Channels D_k of a head's queries and keys.
        position (str): ``'gaussian'``, b_δ = −α‖δ − Δ‖² (C20, eq. 9), or ``'table'``, a b_δ for each shift of the
            neighbourhood. Defaults to ``'gaussian'``.
        gated (bool): Whether there is a gate. Defaults to False.
        window_size (Sequence[int], optional): Size of the neighbourhood of a query that its keys are in, an odd number
            of pixels for each axis (Ramachandran et al. 2019). Time and memory then grow linearly with the number of
            pixels. Defaults to None, the whole image; ``'table'`` needs one.
        bias (bool): Whether the output has a bias. Defaults to True.
        groups (int): Groups of channels of the values. Defaults to 1.

    Raises:
        ValueError: An unknown ``position``, or a table without a ``window_size``.

    Attributes:
        query, key (nn.Linear): W^Q and W^K, C to N_h·D_k.
        encoding (QuadraticEncoding | WindowEncoding): Centres and widths, or the table; at least float32.
        gate (Parameter | None): λ, ``(N_h,)``, at least float32.
        value (nn.Linear | GroupedLinear): N_h·C to ``out_channels``.
    """

    depends_on_content = True
    encoding: Union[QuadraticEncoding, WindowEncoding]
    gate: Optional[nn.Parameter]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_heads: int,
        window: Window,
        qk_dim: int,
        position: str = 'gaussian',
        gated: bool = False,
        window_size: Optional[Sequence[int]] = None,
        bias: bool = True,
        groups: int = 1,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(in_channels, out_channels, num_heads, window, bias, groups, device=device, dtype=dtype)
        if position not in POSITIONS:
            raise ValueError(f'position={position!r} is unknown: choose one of {POSITIONS}')
        if position == 'table' and window_size is None:
            raise ValueError("position='table' has an entry for each shift of a window: give its window_size")
        self.qk_dim = qk_dim
        self.window_size = None if window_size is None else tuple(window_size)
        self.query = nn.Linear(in_channels, num_heads * qk_dim, bias=False, device=device, dtype=dtype)
        self.key = nn.Linear(in_channels, num_heads * qk_dim, bias=False, device=device, dtype=dtype)
        nn.init.zeros_(self.query.weight)
        dtype = torch.promote_types(self.value.weight.dtype, torch.float32)
        if window_size is None or position == 'gaussian':
            self.encoding = QuadraticEncoding(num_heads, window.ndim, device=device, dtype=dtype)
        else:
            self.encoding = WindowEncoding(num_heads, window_size, device=device, dtype=dtype)
        gate = torch.full((num_heads,), SHARED_GATE, device=device, dtype=dtype)
        self.register_parameter('gate', nn.Parameter(gate) if gated else None)
        if self.window_size is not None:
            self.register_buffer('neighbourhood', torch.tensor(self.window_size, device=device))

    def extra_repr(self) -> str:
        gated = '' if self.gate is None else ', gated=True'
        near = '' if self.window_size is None else f', window_size={self.window_size}'
        return f'{super().extra_repr()}, qk_dim={self.qk_dim}{gated}{near}'

    def gaussian_heads(self) -> Optional[GaussianHeads]:
        return self.encoding.gaussian_heads() if isinstance(self.encoding, QuadraticEncoding) else None

    def position_share(self) -> Optional[Tensor]:
        return None if self.gate is None else at_least_float32(self.gate).sigmoid()

    def head_parameters(self) -> HeadParameters:
        found = {**super().head_parameters(), 'query.weight': (0, self.qk_dim), 'key.weight': (0, self.qk_dim)}
        if self.gate is not None:
            found['gate'] = (0, 1)
        if isinstance(self.encoding, WindowEncoding):
            return {**found, 'encoding.weight': (0, 1)}
        return {**found, 'encoding.center': (0, 1), 'encoding.sqrt_precision': (0, 1)}

    def structure_in(self, state_dict: StateDict, prefix: str) -> Any:
        """The number of heads in a state dict, whose neighbourhood must be that of the layer."""
        if f'{prefix}query.weight' in state_dict:
            loaded = state_dict.get(f'{prefix}neighbourhood')
            window_size = None if loaded is None else tuple(loaded.tolist())
            if window_size != self.window_size:
                raise StructureError(
                    f'{prefix.rstrip(".")} has window_size={window_size} in the state dict, but '
                    f'window_size={self.window_size} in the model: build it with the same'
                )
        return super().structure_in(state_dict, prefix)

    def _outputs(self, x: Tensor) -> Tensor:
        sizes = [self.window.num_queries(axis, n) for axis, n in enumerate(x.shape[2:])]
        axes = self.tiles(x.shape[2:])
        return self._whole_image(x, sizes) if axes is None else self._neighbourhoods(x, axes)

    def _whole_image(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        padded = self.window.pad(x)
        queries = _tokens(self._query_pixels(padded, sizes))
        bias = self._position_bias(x.shape[2:])
        content = None
        if self.gate is not None:
            content = torch.zeros_like(bias[:1]).masked_fill(bias[:1] == -math.inf, -math.inf)
        tokens = _tokens(padded)
        if self.window.padding_mode == 'zeros' and tokens.shape[1] != math.prod(x.shape[2:]):
            tokens = _tokens(x)
            bias = self._with_null_key(bias, x.shape[2:])
            content = None if content is None else self._with_null_key(content, x.shape[2:])
        query, key = self._heads(self.query(queries)), self._heads(self.key(tokens))
        some = parts_at_once(x.device, bias.numel())
        if some is None:
            heads = self._attend(query, key, tokens, bias, content)
        else:
            parts = zip(query.split(some), key.split(some), tokens.split(some))
            heads = torch.cat([self._attend(*part, bias, content) for part in parts])
        return self._joined(heads).unflatten(-1, list(sizes))

    def tiles(self, size: Sequence[int]) -> Optional[List[AxisTiles]]:
        """The tiles along each axis of an image of ``size``; None where the whole image is computed at once."""
        if self.window_size is None:
            return None
        queries = [self.window.num_queries(axis, pixels) for axis, pixels in enumerate(size)]
        padded = [sum(self.window.padding_of(axis, pixels), pixels) for axis, pixels in enumerate(size)]
        settings = zip(padded, queries, self.window.stride, self.window.anchor, self.window_size)
        axes = [AxisTiles(*of_axis) for of_axis in settings]
        # Where neighbourhoods are about as large as the image, their tiles have more keys than it has pixels.
        if math.prod([tiles.scores for tiles in axes]) >= math.prod([tiles.queries * tiles.pixels for tiles in axes]):
            return None
        return axes

    def _neighbourhoods(self, x: Tensor, axes: Sequence[AxisTiles]) -> Tensor:
        padded = self.window.pad(x)
        queries = tile_queries(self._query_pixels(padded, [tiles.queries for tiles in axes]), axes)
        keys = self.key(_tokens(padded)).transpose(1, 2).unflatten(2, padded.shape[2:])  # once for all tiles
        keys, tokens = tile_keys(torch.cat([keys, padded.to(keys.dtype)], dim=1), axes).split(
            [self.num_heads * self.qk_dim, self.in_channels], dim=-1
        )
        bias = self._position_scores([tiles.shifts(x.device) for tiles in axes])  # (N_h, t, keys)
        seen = _all_axes([tiles.seen(x.device) for tiles in axes])
        seen = seen | ~seen.any(-1, keepdim=True)  # queries that fill up the last tile see all: no 0/0
        hidden = ~seen[:, None]  # (tiles, 1, t, keys)
        some = parts_at_once(x.device, x.shape[0] * bias.numel()) or len(hidden)  # len(x) would fix the batch
        query, key = self._heads(self.query(queries)), self._heads(keys)
        heads = [
            self._attend(*parts, *self._masked(bias, outside))
            for parts, outside in zip(
                zip(query.split(some, 1), key.split(some, 1), tokens.split(some, 1)), hidden.split(some)
            )
        ]
        return join_tiles(self._joined(torch.cat(heads, dim=1)).transpose(-2, -1), axes)

    def _masked(self, bias: Tensor, hidden: Tensor) -> Tuple[Tensor, Optional[Tensor]]:
        """b_δ, and with a gate the 0 of content in its place, −∞ where a key is hidden."""
        content = None if self.gate is None else torch.zeros_like(bias[:1]).masked_fill(hidden, -math.inf)
        return bias.masked_fill(hidden, -math.inf), content

    def _attend(self, query: Tensor, key: Tensor, tokens: Tensor, bias: Tensor, content: Optional[Tensor]) -> Tensor:
        """The heads, ``(…, N_h, Q, C)``, of the tokens ``(…, K, C)`` that they share as values."""
        share = self._gate()
        if share is None or content is None:
            return attend_shared(query, key, tokens, bias, channels_first=self.groups > 1)
        by_position = share * softmax(bias)[..., : tokens.shape[-2]]
        probs = (1 - share) * probabilities(query, key, content) + by_position
        return shared_heads(probs, tokens, channels_first=self.groups > 1)

    def _gate(self) -> Optional[Tensor]:
        """σ(λ), ``(N_h, 1, 1)``; None without a gate."""
        share = self.position_share()
        return None if share is None else share[:, None, None]

    def _heads(self, x: Tensor) -> Tensor:
        """``(…, N, N_h·D_k)`` to ``(…, N_h, N, D_k)``."""
        return x.unflatten(-1, (self.num_heads, self.qk_dim)).transpose(-3, -2)

    def _query_pixels(self, padded: Tensor, sizes: Sequence[int]) -> Tensor:
        """The pixels of the padded image that queries are at, ``(B, C, *sizes)``."""
        for axis, (first, stride, queries) in enumerate(zip(self.window.anchor, self.window.stride, sizes), start=2):
            padded = padded.narrow(axis, first, (queries - 1) * stride + 1)
            padded = padded[(slice(None),) * axis + (slice(None, None, stride),)]
        return padded

    def _position_scores(self, shifts: Sequence[Tensor]) -> Tensor:
        """b_δ, given the shifts ``(Q, K)`` from queries to keys along each axis, ``(N_h, Q, K)``."""
        if isinstance(self.encoding, QuadraticEncoding):
            scores = [self.encoding.scores_along(axis, shift) for axis, shift in enumerate(shifts)]
            total = scores[0]
            for along in scores[1:]:
                total = total[:, :, None, :, None] + along[:, None, :, None, :]
                total = total.flatten(3, 4).flatten(1, 2)
            return total
        table = at_least_float32(self.encoding.weight)
        index = torch.zeros(1, 1, dtype=torch.long, device=table.device)
        for shift, size in zip(shifts, table.shape[1:]):
            along = (shift + size // 2).clamp(0, size - 1)
            index = (index[:, None, :, None] * size + along[None, :, None, :]).flatten(2, 3).flatten(0, 1)
        return table.flatten(1)[:, index]

    def _position_bias(self, size: Sequence[int]) -> Tensor:
        """b_δ of every query for every pixel of the padded image, −∞ outside the neighbourhood, ``(N_h, Q, K)``."""
        device, shifts = self.value.weight.device, []
        for axis, pixels in enumerate(size):
            before, after = self.window.padding_of(axis, pixels)
            queries = self.window.queries(axis, pixels, device)
            shifts.append(torch.arange(-before, pixels + after, device=device) - queries[:, None])
        bias = self._position_scores(shifts)
        if self.window_size is None:
            return bias
        near = [(shift.abs() <= size // 2)[None] for shift, size in zip(shifts, self.window_size)]
        return bias.masked_fill(~_all_axes(near), -math.inf)

    def _with_null_key(self, bias: Tensor, size: Sequence[int]) -> Tensor:
        """Scores of all pixels of the padded image as those of the image's and of one null key for the others.

        Zeros have neither content nor value, so the null key's score is log Σ exp(b_δ) over them.
        """
        outside = self.window.pad(torch.ones(1, 1, *size, device=bias.device)).flatten() == 0
        null = bias.masked_fill(~outside, -math.inf).logsumexp(-1, keepdim=True)
        paddings = [self.window.padding_of(axis, n) for axis, n in enumerate(size)]
        inside = bias.unflatten(-1, [before + n + after for n, (before, after) in zip(size, paddings)])
        for axis, (n, (before, _)) in enumerate(zip(size, paddings), start=bias.ndim - 1):
            inside = inside.narrow(axis, before, n)
        return torch.cat([inside.flatten(bias.ndim - 1), null], dim=-1)

    def position_probs(self, size: Sequence[int]) -> Tensor:
        return self._on_pixels(softmax(self._position_bias(size)), size)[..., :-1]

    def attention_scores(self, x: Tensor) -> Tensor:
        """The logarithms of the probabilities, ``(B, N_h, Q, K + 1)``, at least float32.

        Pixels that the padding repeats are one key, and its zeros are the null key, the last.

        Args:
            x (Tensor): An image, ``(B, C, *size)``.
        """
        products, bias = self._products(x), self._position_bias(x.shape[2:])
        share = self._gate()
        if share is None:
            probs = softmax(products + bias)
        else:
            probs = (1 - share) * self._content_probs(products, bias) + share * softmax(bias)
        return self._on_pixels(probs, x.shape[2:]).log()

    def content_scores(self, x: Tensor) -> Tensor:
        """As :meth:`attention_scores`, of softmax(q·k/√D_k) over the keys that a query sees."""
        size = x.shape[2:]
        return self._on_pixels(self._content_probs(self._products(x), self._position_bias(size)), size).log()

    def position_scores(self, x: Tensor) -> Tensor:
        scores = self._on_pixels(softmax(self._position_bias(x.shape[2:])), x.shape[2:]).log()
        return scores.expand(len(x), -1, -1, -1)

    def _products(self, x: Tensor) -> Tensor:
        """q·k/√D_k of every query and every pixel of the padded image, ``(B, N_h, Q, K)``."""
        padded = self.window.pad(x)
        sizes = [self.window.num_queries(axis, n) for axis, n in enumerate(x.shape[2:])]
        query = self.query(_tokens(self._query_pixels(padded, sizes)))
        return head_products(query, self.key(_tokens(padded)), self.num_heads)

    def _content_probs(self, products: Tensor, bias: Tensor) -> Tensor:
        """The probabilities by content alone, of the keys whose bias is not −∞."""
        return softmax(products.masked_fill(bias == -math.inf, -math.inf))

    def _on_pixels(self, probs: Tensor, size: Sequence[int]) -> Tensor:
        """Probabilities for the padded image, ``(…, Q, padded)``, as those for its pixels and the null key."""
        return self._unpadded(probs, size).roll(-1, -1)


def _tokens(x: Tensor) -> Tensor:
    """``(B, C, *size)`` to ``(B, N, C)``."""
    return x.flatten(2).transpose(1, 2)


def _all_axes(parts: Sequence[Tensor]) -> Tensor:
    """Where all axes are true: ``(T_a, Q_a, K_a)`` of each axis to ``(T, Q, K)``, row-major."""
    total = parts[0]
    for part in parts[1:]:
        total = total[:, None, :, None, :, None] & part[None, :, None, :, None, :]
        total = total.flatten(4, 5).flatten(2, 3).flatten(0, 1)
    return total
