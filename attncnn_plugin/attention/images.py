"""Attention with a convolution's inputs and outputs, by position (Cordonnier et al. 2020 (C20), Theorem 1) and content.

That by content and position is of d'Ascoli et al. 2021 ("Transformed CNNs").
"""

import math
import operator
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention_layer import AttentionLayer, HeadParameters, check_plain_linear, head_products
from .neighbourhoods import AxisTiles, join_tiles, tile_keys, tile_queries
from .positions import QuadraticEncoding, WindowEncoding
from .precision import at_least_float32, full_precision
from .shifts import over_axes
from .softmax import softmax, without_subnormals
from .state_dicts import EXTRA_STATE, StateDict, StructureError, read_extra_state, write_extra_state
from .strides import is_channels_last, is_exporting, with_new_strides, with_regular_gradient
from .window import CONVOLVE, Window

# Up to so many pairs of a query and a key one product of matrices is faster than one along each axis: for 7×7 pixels
# of 64 channels 1.6 to 2.7 times.
DENSE_PAIRS = 128**2
SHARED_GATE = 4.0  # λ of heads that content and position share: σ(λ) is 0.98
# On CPUs so many scores at once stay in the cache: all images at once take 1.1 to 2.4 times as long, at 14×14 pixels.
SCORES_AT_ONCE = 2**19


class ImageAttention(AttentionLayer):
    """Base class of attention with the inputs and outputs of a convolution.

    Keys are the pixels of the padded image, queries those that the stride keeps. A head sums up pixels by its
    probabilities, and one linear layer, W^V W^O of all heads, maps the sums to the output (C20, eq. 1 and 4). The extra
    state in its state dict says what kind of attention it is. The layer also loads state dicts of its convolution.

    Args:
        in_channels (int): Channels C of the image.
        out_channels (int): Channels of the output.
        num_heads (int): Number of heads N_h.
        window (Window): Where the queries are, and how the image is padded.
        bias (bool): Whether the output has a bias. Defaults to True.
        groups (int): Groups of channels: an output reads only the channels of its group. Defaults to 1.
        **dd: ``device`` and ``dtype`` of the parameters, as of ``nn.Linear``.

    Attributes:
        value (nn.Linear | GroupedLinear): W^V W^O, from the channels of all heads to ``out_channels``, by groups.
        encoding (QuadraticEncoding | WindowEncoding): The scores by position, at least float32.
        settings (dict[str, Any]): Arguments of :func:`~attncnn_plugin.convert.conv_to_mhsa` for such a layer.
        from_conv (callable | None): Converts a state dict of the convolution that the layer was made from, given the
            layer, the state dict and the layer's name; it raises ``ValueError`` or ``RuntimeError`` for another's.
        layout (Tensor): Has the memory format of the convolution's weight, which ``.to(memory_format=…)`` changes.
    """

    position: str
    window: Window
    encoding: Any
    from_conv: Optional[Callable[['ImageAttention', StateDict, str], StateDict]] = None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_heads: int,
        window: Window,
        bias: bool = True,
        groups: int = 1,
        **dd: Any,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.window = window
        self.settings: Dict[str, Any] = {'position': self.position}
        if groups == 1:
            self.value = nn.Linear(num_heads * in_channels, out_channels, bias, **dd)
        else:
            self.value = GroupedLinear(in_channels, out_channels, num_heads, groups, bias, **dd)
        self.num_heads = self.built_heads = num_heads
        entries = in_channels // groups * math.prod(window.kernel_size)  # one entry has no format
        layout = self.value.weight.new_zeros(1, min(2, entries), *[1] * window.ndim)
        self.register_buffer('layout', layout, persistent=False)
        dd['dtype'] = torch.promote_types(layout.dtype, torch.float32)  # bfloat16 cannot hold 257
        if self.position == 'gaussian':
            self.encoding = QuadraticEncoding(num_heads, window.ndim, **dd)
        else:
            self.encoding = WindowEncoding(num_heads, window.kernel_size, **dd)

    def extra_repr(self) -> str:
        return f'num_heads={self.num_heads}, groups={self.groups}, window={self.window}, {self.settings}'

    def forward(self, input: Tensor) -> Tensor:  # the name of nn.Conv2d's
        """Maps ``(B, C, *size)`` or ``(C, *size)`` to the convolution's output.

        Raises:
            ValueError: The image does not have the convolution's axes and channels, or is smaller than its window.
        """
        ndim = self.window.ndim
        if input.ndim not in (ndim + 1, ndim + 2) or input.shape[-ndim - 1] != self.in_channels:
            raise ValueError(
                f'the input has shape {tuple(input.shape)}, but {self.in_channels} channels and {ndim} axes of pixels '
                'are expected, with or without a batch'
            )
        if input.ndim == ndim + 1:
            return self.forward(input[None])[0]
        output = self._outputs(with_regular_gradient(input))
        # As a convolution: channels last if its weight is, or its input and the padding keeps that.
        kept = ('zeros',) if ndim == 1 else ('zeros', 'replicate', 'reflect')
        of_input = is_channels_last(input) and self.window.padding_mode in kept
        return with_new_strides(output, of_input or is_channels_last(self.layout))

    def heads(self, x: Tensor) -> Tensor:
        """Computes P_h X of each head, the sums of pixels by its probabilities, ``(B, N_h, Q, C)``."""
        raise NotImplementedError

    def _outputs(self, x: Tensor) -> Tensor:
        """Maps ``(B, C, *size)`` to the convolution's output."""
        return self._output_pixels(self.heads(x)).transpose(-2, -1).unflatten(-1, self._sizes(x))

    def _output_pixels(self, heads: Tensor) -> Tensor:
        """Maps the heads by W^V W^O, ``(…, N_h, Q, C)`` to ``(…, Q, out_channels)``."""
        return self.value(heads if self.groups > 1 else heads.transpose(-3, -2).flatten(-2))

    def _sizes(self, x: Tensor) -> List[int]:
        """Returns the number of queries along each axis of images."""
        return [self.window.num_queries(axis, n) for axis, n in enumerate(x.shape[2:])]

    def position_probs(self, size: Sequence[int]) -> Tensor:
        """Returns :meth:`AttentionLayer.position_probs`; those of zeros around the image are left out."""
        pixels = at_least_float32(self.value.weight.new_ones(math.prod(size)).diag()).reshape(-1, 1, *size)
        with full_precision(pixels.device.type):
            heads = self.heads(pixels)  # (K, N_h, Q, 1), an image for each pixel, which is 1 there and 0 elsewhere
        return without_subnormals(heads.squeeze(-1).permute(1, 2, 0))

    # What other code reads of a convolution.
    kernel_size, stride, dilation, padding_mode = (
        property(operator.attrgetter(f'window.{name}'))
        for name in ('kernel_size', 'stride', 'dilation', 'padding_mode')
    )

    def __getattr__(self, name: str) -> Any:
        if name == 'padding':  # no property: nn.Module would replace the AttributeError that says why there is none
            return self.window.padding_argument
        if name in ('weight', 'bias'):
            raise AttributeError(
                f'attention instead of a convolution has no {name!r}, but value.{name}, of all its heads: what needs a '
                'kernel, such as fusing batch norms, comes before convs_to_attention or after attention_to_convs'
            )
        return super().__getattr__(name)

    def grid_of(self, x: Tensor) -> Tuple[int, ...]:
        """Returns the size of images, height and width of ``(B, C, H, W)``, or of one image."""
        return tuple(x.shape[-self.window.ndim :])

    def value_matrices(self) -> Tensor:
        check_plain_linear('value', self.value, GroupedLinear)
        slices = self.value.weight.unflatten(1, (self.num_heads, self.in_channels // self.groups)).transpose(1, 2)
        blocks = [torch.block_diag(*of_head.chunk(self.groups)) for of_head in slices.unbind(-1)]
        return at_least_float32(torch.stack(blocks))

    def head_parameters(self) -> HeadParameters:
        return {'value.weight': (1, self.in_channels // self.groups), **super().head_parameters()}

    def get_extra_state(self) -> Tensor:
        """Returns how the layer was built, as far as shapes do not say, as JSON in bytes."""
        return write_extra_state({'num_heads': self.built_heads, **self.settings})

    def set_extra_state(self, state: Tensor) -> None:
        """Does nothing: :meth:`structure_in` has read it."""

    def structure_in(self, state_dict: StateDict, prefix: str) -> Any:
        """Returns the number of heads in a state dict; for a convolution's, all that it was built with."""
        if _is_convolution(state_dict, prefix):
            return None if self.num_heads == self.built_heads else self.built_heads
        own = {'num_heads': self.built_heads, **self.settings}
        loaded = read_extra_state(state_dict, prefix) or own
        # α may differ: it is where a conversion starts the widths.
        other = [name for name in {**own, **loaded} if name != 'alpha' and loaded.get(name) != own.get(name)]
        if other:
            words = (', '.join(f'{name}={x.get(name)}' for name in other) for x in (loaded, own))
            raise StructureError(
                f'{prefix.rstrip(".")} has {" in the state dict, but ".join(words)} in the model: build it alike, or '
                'turn it back by attention_to_convs and call attncnn_plugin.follow_state_dict(model, state_dict)'
            )
        return super().structure_in(state_dict, prefix)

    def convert_state_dict(self, state_dict: StateDict, prefix: str) -> None:
        """Converts the entries of a convolution."""
        if not _is_convolution(state_dict, prefix):
            return
        name = prefix.rstrip('.')
        if self.from_conv is None:
            raise StructureError(
                f'{name} is attention that was not made from a convolution, and the state dict has a convolution: '
                'convert a model that has loaded it, with convs_to_attention'
            )
        entries = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        # Without the parameters themselves, which PyTorch would freeze or not as those of the convolution.
        entries = {key: value.detach() if isinstance(value, Tensor) else value for key, value in entries.items()}
        try:
            converted = self.from_conv(self, entries, name)
        except (RuntimeError, ValueError) as error:
            raise StructureError(f'the convolution {name} of the state dict cannot be converted: {error}') from error
        for key in entries:
            del state_dict[prefix + key]
        state_dict.update({prefix + key: value for key, value in converted.items()})


def _is_convolution(state_dict: StateDict, prefix: str) -> bool:
    return f'{prefix}weight' in state_dict and prefix + EXTRA_STATE not in state_dict


class QuadraticImageAttention(ImageAttention):
    """Heads with the quadratic encoding, −α‖δ − Δ‖² (C20, eq. 9); arguments as of :class:`ImageAttention`."""

    position = 'gaussian'

    def heads(self, x: Tensor) -> Tensor:
        shifts = self.window.shifts_to_pixels(x.shape[2:], self.encoding.center.device)
        # The factors of the probabilities, (N_h, Q, K) for each axis, K being the padded pixels.
        probs = [softmax(self.encoding.scores_along(axis, shift)) for axis, shift in enumerate(shifts)]
        if self.window.padding_mode == 'zeros':  # the sums do not need the probabilities of zeros
            starts = [self.window.padding_of(axis, n)[0] for axis, n in enumerate(x.shape[2:])]
            probs = [factor.narrow(2, start, n) for factor, start, n in zip(probs, starts, x.shape[2:])]
        else:
            x = self.window.pad(x)
        if not is_exporting() and math.prod([factor[0].numel() for factor in probs]) <= DENSE_PAIRS:
            dense = without_subnormals(over_axes(probs, torch.mul)).to(x.dtype).transpose(0, 1)  # (Q, N_h, K)
            heads = dense.flatten(0, 1) @ x.flatten(2).transpose(1, 2)  # one product, as the heads share their values
            return heads.unflatten(1, dense.shape[:2]).transpose(1, 2)
        x = x[:, None]  # (B, 1, C, *padded)
        for axis, factor in enumerate(probs, start=3):
            x = torch.einsum('hqk,bhc...k->bhc...q', factor.to(x.dtype), x.movedim(axis, -1)).movedim(-1, axis)
        return x.flatten(3).transpose(2, 3)


class WindowImageAttention(ImageAttention):
    """Heads with any distribution over the pixels of the window; arguments as of :class:`ImageAttention`."""

    position = 'table'

    def heads(self, x: Tensor) -> Tensor:
        # A head looks only at its window, with the same probabilities everywhere.
        x = self.window.pad(x)
        images, probs, window = x.flatten(0, 1)[:, None], self.encoding().to(x.dtype)[:, None], self.window
        heads = CONVOLVE[window.ndim - 1](images, probs, stride=window.stride, dilation=window.dilation)
        return heads.flatten(2).unflatten(0, x.shape[:2]).permute(0, 2, 3, 1)


class ContentImageAttention(ImageAttention):
    """Attention with the inputs and outputs of a convolution whose probabilities depend on content and position.

    Queries are the output pixels, keys the pixels of the padded image. The scores are q·k/√D_k + b_δ with b_δ =
    −α‖δ − Δ‖² (C20, eq. 9); with a gate the probabilities are (1 − σ(λ))·softmax(q·k/√D_k) + σ(λ)·softmax(b_δ), as
    those of ConViT. Queries and keys have no biases, so that the zeros of a padding are keys without content and
    without value. W^Q starts at 0: then heads look at their shifts whatever the image is, as those of Li et al. 2021.

    Args:
        in_channels, out_channels, num_heads, window, bias, groups: As of :class:`ImageAttention`.
        qk_dim (int): Channels D_k of a head's queries and keys.
        gated (bool): Whether there is a gate. Defaults to False.
        window_size (Sequence[int], optional): Size of the neighbourhood of a query that its keys are in, an odd number
            of pixels for each axis (Ramachandran et al. 2019). Time and memory then grow linearly with the number of
            pixels. Defaults to None, the whole image.

    Attributes:
        query, key (nn.Linear): W^Q and W^K, C to N_h·D_k.
        gate (Parameter | None): λ, ``(N_h,)``, at least float32.
    """

    position = 'gaussian'
    depends_on_content = True

    def __init__(
        self,
        *args: Any,
        qk_dim: int,
        gated: bool = False,
        window_size: Optional[Sequence[int]] = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.window_size = None if window_size is None else list(window_size)  # as JSON has it
        self.qk_dim = qk_dim
        self.settings.update(content='gated' if gated else 'additive', window_size=self.window_size, qk_dim=qk_dim)
        dd: Any = dict(device=self.value.weight.device, dtype=self.value.weight.dtype)
        self.query = nn.Linear(self.in_channels, self.num_heads * qk_dim, bias=False, **dd)
        self.key = nn.Linear(self.in_channels, self.num_heads * qk_dim, bias=False, **dd)
        nn.init.zeros_(self.query.weight)
        gate = next(self.encoding.parameters()).new_full((self.num_heads,), SHARED_GATE)
        self.register_parameter('gate', nn.Parameter(gate) if gated else None)

    def head_parameters(self) -> HeadParameters:
        found = {**super().head_parameters(), 'query.weight': (0, self.qk_dim), 'key.weight': (0, self.qk_dim)}
        return found if self.gate is None else {**found, 'gate': (0, 1)}

    def _outputs(self, x: Tensor) -> Tensor:
        axes = self.tiles(x.shape[2:])
        return super()._outputs(x) if axes is None else self._neighbourhoods(x, axes)

    def heads(self, x: Tensor) -> Tensor:
        padded = self.window.pad(x)
        queries, tokens = _tokens(self._query_pixels(padded, self._sizes(x))), _tokens(padded)
        query, key = self._split_heads(self.query(queries)), self._split_heads(self.key(tokens))
        return self._attend_in_parts(query, key, tokens, self._position_bias(x.shape[2:]))

    def tiles(self, size: Sequence[int]) -> Optional[List[AxisTiles]]:
        """Returns the tiles along each axis of an image of ``size``; None if the whole image is computed at once."""
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
        return over_axes([self.encoding.scores_along(axis, shift) for axis, shift in enumerate(shifts)])

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


class GroupedLinear(nn.Linear):
    """A linear map of the channels of all heads, where an output reads only the channels of its group.

    Arguments are those of :class:`ImageAttention`. The weight is ``(out_channels, N_h·C/groups)``, head after head.
    """

    def __init__(self, in_channels: int, out_channels: int, num_heads: int, groups: int, bias: bool, **dd: Any) -> None:
        super().__init__(num_heads * (in_channels // groups), out_channels, bias, **dd)
        self.groups, self.in_channels = groups, in_channels

    def forward(self, heads: Tensor) -> Tensor:
        """Maps ``(…, N_h, Q, C)`` to ``(…, Q, out_channels)``."""
        heads = heads.movedim(-1, -3).unflatten(-3, (self.groups, -1)).flatten(-3, -2)  # (…, groups, C/groups·N_h, Q)
        weight = self.weight.unflatten(0, (self.groups, -1)).unflatten(2, (-1, self.in_channels // self.groups))
        weight = weight.transpose(-2, -1).flatten(-2)  # (groups, out_channels/groups, C/groups·N_h)
        output = (weight.to(heads.dtype) @ heads).flatten(-3, -2).transpose(-2, -1)
        return output if self.bias is None else output + self.bias.to(output.dtype)
