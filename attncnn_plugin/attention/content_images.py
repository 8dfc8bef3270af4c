"""Attention by content and position instead of a convolution (d'Ascoli et al. 2021, "Transformed CNNs")."""

import math
from typing import Any, List, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention_layer import head_products
from .heads import HeadParameters
from .images import ImageAttention
from .neighbourhoods import AxisTiles, join_tiles, tile_keys, tile_queries
from .positions import QuadraticEncoding
from .precision import at_least_float32
from .shifts import over_axes
from .softmax import softmax
from .window import check_choice

POSITIONS = ('gaussian', 'table')
SHARED_GATE = 4.0  # λ of heads that content and position share: σ(λ) is 0.98
# On CPUs so many scores at once stay in the cache: all images at once take 1.1 to 2.4 times as long, at 14×14 pixels.
SCORES_AT_ONCE = 2**19


class ContentImageAttention(ImageAttention):
    """Attention with the inputs and outputs of a convolution whose probabilities depend on content and position.

    Queries are the output pixels, keys the pixels of the padded image. The scores are q·k/√D_k + b_δ; with a gate the
    probabilities are (1 − σ(λ))·softmax(q·k/√D_k) + σ(λ)·softmax(b_δ), as those of ConViT. Queries and keys have no
    biases, so that the zeros of a padding are keys without content and without value. W^Q starts at 0: then heads look
    at their shifts whatever the image is, as those of Li et al. 2021.

    Args:
        in_channels, out_channels, num_heads, window, bias, groups: As of :class:`ImageAttention`.
        qk_dim (int): Channels D_k of a head's queries and keys.
        position (str): ``'gaussian'``, b_δ = −α‖δ − Δ‖² (C20, eq. 9), or ``'table'``, a b_δ for each shift of the
            neighbourhood. Defaults to ``'gaussian'``.
        gated (bool): Whether there is a gate. Defaults to False.
        window_size (Sequence[int], optional): Size of the neighbourhood of a query that its keys are in, an odd number
            of pixels for each axis (Ramachandran et al. 2019). Time and memory then grow linearly with the number of
            pixels. Defaults to None, the whole image; ``'table'`` needs one.

    Raises:
        ValueError: An unknown ``position``, or a table without a ``window_size``.

    Attributes:
        query, key (nn.Linear): W^Q and W^K, C to N_h·D_k.
        gate (Parameter | None): λ, ``(N_h,)``, at least float32.
    """

    depends_on_content = True
    gate: Optional[nn.Parameter]

    def __init__(
        self,
        *args: Any,
        qk_dim: int,
        position: str = 'gaussian',
        gated: bool = False,
        window_size: Optional[Sequence[int]] = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        check_choice('position', position, POSITIONS)
        if position == 'table' and window_size is None:
            raise ValueError("position='table' has an entry for each shift of a window: give its window_size")
        self.qk_dim = qk_dim
        self.window_size = None if window_size is None else tuple(window_size)
        near = None if window_size is None else list(window_size)  # as JSON has it
        self.settings.update(content='gated' if gated else 'additive', window_size=near, qk_dim=qk_dim)
        dd: Any = dict(device=self.value.weight.device, dtype=self.value.weight.dtype)
        self.query = nn.Linear(self.in_channels, self.num_heads * qk_dim, bias=False, **dd)
        self.key = nn.Linear(self.in_channels, self.num_heads * qk_dim, bias=False, **dd)
        nn.init.zeros_(self.query.weight)
        self._init_positions(position, window_size or ())
        gate = next(self.encoding.parameters()).new_full((self.num_heads,), SHARED_GATE)
        self.register_parameter('gate', nn.Parameter(gate) if gated else None)

    def extra_repr(self) -> str:
        gated = '' if self.gate is None else ', gated=True'
        near = '' if self.window_size is None else f', window_size={self.window_size}'
        return f'{super().extra_repr()}, qk_dim={self.qk_dim}{gated}{near}'

    def head_parameters(self) -> HeadParameters:
        found = {**super().head_parameters(), 'query.weight': (0, self.qk_dim), 'key.weight': (0, self.qk_dim)}
        return found if self.gate is None else {**found, 'gate': (0, 1)}

    def _outputs(self, x: Tensor) -> Tensor:
        axes = self.tiles(x.shape[2:])
        if axes is not None:
            return self._neighbourhoods(x, axes)
        padded, sizes = self.window.pad(x), self._sizes(x)
        queries, tokens = _tokens(self._query_pixels(padded, sizes)), _tokens(padded)
        query, key = self._split_heads(self.query(queries)), self._split_heads(self.key(tokens))
        heads = self._attend_in_parts(query, key, tokens, self._position_bias(x.shape[2:]))
        return self._output_images(heads, sizes)

    def tiles(self, size: Sequence[int]) -> Optional[List[AxisTiles]]:
        """Returns the tiles along each axis of an image of ``size``; None where the whole is computed at once."""
        # The number of tiles would limit the sizes of an exported graph.
        if self.window_size is None or any(isinstance(pixels, torch.SymInt) for pixels in size):
            return None
        queries = [self.window.num_queries(axis, pixels) for axis, pixels in enumerate(size)]
        padded = [sum(self.window.padding_of(axis, pixels), pixels) for axis, pixels in enumerate(size)]
        numbers = zip(padded, queries, self.window.stride, self.window.anchor, self.window_size)
        axes = [AxisTiles(*of_axis) for of_axis in numbers]
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
        numbers = torch.cartesian_prod(*(torch.arange(tiles.number, device=x.device) for tiles in axes))
        of_axes = zip(axes, numbers.reshape(-1, len(axes)).unbind(1))
        seen = over_axes([tiles.seen(x.device)[number] for tiles, number in of_axes], torch.logical_and)
        seen = seen | ~seen.any(-1, keepdim=True)  # queries that fill up the last tile see all: no 0/0
        bias = self._position_scores([tiles.shifts(x.device) for tiles in axes])  # (N_h, t, keys)
        bias = bias.masked_fill(~seen[:, None], -math.inf)  # (tiles, N_h, t, keys)
        heads = self._attend_in_parts(self._split_heads(self.query(queries)), self._split_heads(keys), tokens, bias)
        return join_tiles(self._output_pixels(heads), axes)

    def _attend_in_parts(self, query: Tensor, key: Tensor, tokens: Tensor, bias: Tensor) -> Tensor:
        """Computes the heads of some images at a time on CPUs, whose caches do not hold the scores of all."""
        if query.device.type != 'cpu' or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self._attend(query, key, tokens, bias)  # for any number of images
        some = max(1, SCORES_AT_ONCE // bias.numel())
        parts = zip(query.split(some), key.split(some), tokens.split(some))
        return torch.cat([self._attend(*part, bias) for part in parts])

    def _attend(self, query: Tensor, key: Tensor, tokens: Tensor, bias: Tensor) -> Tensor:
        """Computes the heads, ``(…, N_h, Q, C)``, of the tokens ``(…, K, C)`` that they share as values."""
        if self.gate is None and query.device.type != 'cpu':
            values = tokens.unsqueeze(-3).expand(*key.shape[:-1], -1)
            return F.scaled_dot_product_attention(query, key, values, attn_mask=bias.to(query.dtype))
        probs = self._probs(query @ (key * self.qk_dim**-0.5).transpose(-2, -1), bias).to(tokens.dtype)
        heads = probs.flatten(-3, -2) @ tokens  # (…, N_h·Q, C), without a copy of the probabilities, which are many
        return heads.unflatten(-2, probs.shape[-3:-1])

    def _probs(self, products: Tensor, bias: Tensor) -> Tensor:
        """Returns the probabilities of q·k/√D_k and b_δ, at least float32; with a gate each has its own softmax."""
        if self.gate is None:
            return softmax(products + bias)
        share = at_least_float32(self.gate).sigmoid()[:, None, None]  # σ(λ), how much of each head is position
        return (1 - share) * self._content_probs(products, bias) + share * softmax(bias)

    def _content_probs(self, products: Tensor, bias: Tensor) -> Tensor:
        """Returns the probabilities without position, of the keys that a query sees: those without a bias of −∞."""
        return softmax(at_least_float32(products).masked_fill(bias == -math.inf, -math.inf))

    def _split_heads(self, x: Tensor) -> Tensor:
        """Splits ``(…, N, N_h·D_k)`` into ``(…, N_h, N, D_k)``."""
        return x.unflatten(-1, (self.num_heads, self.qk_dim)).transpose(-3, -2)

    def _query_pixels(self, padded: Tensor, sizes: Sequence[int]) -> Tensor:
        """Returns the pixels of the padded image where the queries are, ``(B, C, *sizes)``."""
        for axis, (first, stride, queries) in enumerate(zip(self.window.anchor, self.window.stride, sizes), start=2):
            padded = padded.narrow(axis, first, (queries - 1) * stride + 1)
            padded = padded[(slice(None),) * axis + (slice(None, None, stride),)]
        return padded

    def _position_scores(self, shifts: Sequence[Tensor]) -> Tensor:
        """Returns b_δ, given the shifts ``(Q, K)`` from queries to keys along each axis, ``(N_h, Q, K)``."""
        if isinstance(self.encoding, QuadraticEncoding):
            return over_axes([self.encoding.scores_along(axis, shift) for axis, shift in enumerate(shifts)])
        table = at_least_float32(self.encoding.weight[:, 0]).contiguous()
        axes = zip(shifts, table.shape[1:], table.stride()[1:])
        places = [(shift + n // 2).clamp(0, n - 1)[None] * step for shift, n, step in axes]
        return table.flatten(1)[:, over_axes(places)[0]]

    def _position_bias(self, size: Sequence[int]) -> Tensor:
        """Returns b_δ of every query and pixel of the padded image, −∞ outside the neighbourhood, ``(N_h, Q, K)``."""
        shifts = self.window.shifts_to_pixels(size, next(self.encoding.parameters()).device)
        bias = self._position_scores(shifts)
        if self.window_size is None:
            return bias
        near = [(shift.abs() <= n // 2)[None] for shift, n in zip(shifts, self.window_size)]
        return bias.masked_fill(~over_axes(near, torch.logical_and), -math.inf)

    def position_probs(self, size: Sequence[int]) -> Tensor:
        return self._on_pixels(softmax(self._position_bias(size)), size)[..., :-1]

    def attention_scores(self, x: Tensor) -> Tensor:
        """Returns the logarithms of the probabilities for images ``(B, C, *size)``, ``(B, N_h, Q, K + 1)``.

        A pixel and its copies in the padding are one key; zeros of the padding are the null key, the last.
        """
        probs = self._probs(self._products(x), self._position_bias(x.shape[2:]))
        return self._on_pixels(probs, x.shape[2:]).log()

    def content_scores(self, x: Tensor) -> Tensor:
        """Returns log softmax(q·k/√D_k) over the keys that a query sees, for the keys of :meth:`attention_scores`."""
        probs = self._content_probs(self._products(x), self._position_bias(x.shape[2:]))
        return self._on_pixels(probs, x.shape[2:]).log()

    def position_scores(self, x: Tensor) -> Tensor:
        scores = self._on_pixels(softmax(self._position_bias(x.shape[2:])), x.shape[2:]).log()
        return scores.expand(len(x), -1, -1, -1)

    def _products(self, x: Tensor) -> Tensor:
        """Returns q·k/√D_k of every query and every pixel of the padded image, ``(B, N_h, Q, K)``."""
        padded = self.window.pad(x)
        query = self.query(_tokens(self._query_pixels(padded, self._sizes(x))))
        return head_products(query, self.key(_tokens(padded)), self.num_heads)

    def _on_pixels(self, probs: Tensor, size: Sequence[int]) -> Tensor:
        """Returns probabilities for the padded image, ``(…, Q, padded)``, as those for its pixels and the null key."""
        # Padding holds copies of pixels: the number of the pixel at each place of the padded image, 0 for zeros.
        pixels = math.prod(size)
        number = torch.arange(1, pixels + 1, dtype=probs.dtype, device=probs.device)
        source = self.window.pad(number.reshape(1, 1, *size)).long().flatten()
        with_zeros = probs.new_zeros(*probs.shape[:-1], pixels + 1)
        return with_zeros.scatter_add(-1, source.expand_as(probs), probs).roll(-1, -1)


def _tokens(x: Tensor) -> Tensor:
    """Returns images ``(B, C, *size)`` as tokens ``(B, N, C)``."""
    return x.flatten(2).transpose(1, 2)
