"""Position-only attention in the place of a convolution: images in, images out (Cordonnier et al. 2020, Theorem 1)."""

import math
from typing import Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention_layer import check_plain_linear
from .biased_attention import shared_heads
from .from_convolution import FromConvolution
from .grouped_linear import GroupedLinear
from .positions import GaussianHeads, QuadraticEncoding, WindowEncoding
from .precision import Device, Dtype, at_least_float32
from .prunable_heads import HeadParameters
from .softmax import softmax, without_subnormals
from .strides import regular, with_regular_gradient
from .window import Window

# Up to so many pairs of a query and a key one product of matrices is faster than one along each axis.
DENSE_PAIRS = 128**2


class ImageAttention(FromConvolution):
    """Attention with the inputs and outputs of a convolution: the base of that by positions and of that by content.

    The heads see the padded image; only the queries that the stride keeps are computed; the values of a head are the
    pixels themselves, and one linear layer maps the heads, as in C20, eq. 1 to 3.

    Args:
        in_channels (int): Channels C of the image.
        out_channels (int): Channels of the output.
        num_heads (int): Number of heads N_h.
        window (Window): Where the queries are, and how the image is padded.
        bias (bool): Whether the output has a bias. Defaults to True.
        groups (int): Groups of channels: an output reads the channels of its group alone. Defaults to 1.

    Attributes:
        value (nn.Linear | GroupedLinear): The channels of all heads to ``out_channels``, by groups.
    """

    window: Window

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_heads: int,
        window: Window,
        bias: bool = True,
        groups: int = 1,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.window = window
        self.value: Union[nn.Linear, GroupedLinear]
        if groups == 1:
            self.value = nn.Linear(num_heads * in_channels, out_channels, bias, device=device, dtype=dtype)
        else:
            self.value = GroupedLinear(in_channels, out_channels, num_heads, groups, bias, device=device, dtype=dtype)
        self._init_heads(num_heads)

    def extra_repr(self) -> str:
        groups = '' if self.groups == 1 else f', groups={self.groups}'
        return f'num_heads={self.num_heads}{groups}, window={self.window}'

    @property
    def groups(self) -> int:
        """Groups of channels."""
        return self.value.groups if isinstance(self.value, GroupedLinear) else 1

    def forward(self, input: Tensor) -> Tensor:  # the name of nn.Conv2d's
        """``(B, C, *size)`` or ``(C, *size)`` to the convolution's output.

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
        input = with_regular_gradient(input)
        return regular(self._outputs(input) if self.num_heads > 0 else self._without_heads(input))

    @property
    def padding_mode(self) -> str:
        return self.window.padding_mode

    def grid_of(self, x: Tensor) -> Tuple[int, int]:
        """Height and width of images, ``(B, C, H, W)``."""
        return x.shape[2], x.shape[3]

    def value_matrices(self) -> Tensor:
        if isinstance(self.value, GroupedLinear):
            return at_least_float32(self.value.head_matrices())
        check_plain_linear('value', self.value)
        return at_least_float32(self.value.weight.unflatten(1, (self.num_heads, self.in_channels)).transpose(0, 1))

    def head_parameters(self) -> HeadParameters:
        return {'value.weight': (1, self.in_channels // self.groups)}

    def _outputs(self, x: Tensor) -> Tensor:
        """``(B, C, *size)`` to the convolution's output."""
        raise NotImplementedError

    def _without_heads(self, x: Tensor) -> Tensor:
        """The bias of the output at every query."""
        sizes = [self.window.num_queries(axis, n) for axis, n in enumerate(x.shape[2:])]
        none = x.flatten(1)[:, :0].reshape(len(x), 0, math.prod(sizes), self.in_channels)  # of x: its gradient is 0
        return self._joined(none).unflatten(-1, sizes)

    def _joined(self, heads: Tensor) -> Tensor:
        """W^O W^V of the heads ``(…, N_h, Q, C)``, ``(…, out_channels, Q)``."""
        if not isinstance(self.value, GroupedLinear):
            heads = heads.transpose(-3, -2).flatten(-2)
        return self.value(heads).transpose(-2, -1)

    def _unpadded(self, probs: Tensor, size: Sequence[int]) -> Tensor:
        """Probabilities for the padded image as those for its pixels.

        Args:
            probs (Tensor): ``(…, Q, padded)``.
            size (Sequence[int]): Size of the image.

        Returns:
            Tensor: ``(…, Q, 1 + pixels)``, first what is given to the zeros of a padding.
        """
        # Padding holds copies of pixels: the number of the pixel at each place of the padded image, 0 for zeros.
        pixels = math.prod(size)
        number = torch.arange(1, pixels + 1, dtype=probs.dtype, device=probs.device)
        source = self.window.pad(number.reshape(1, 1, *size)).long().flatten()
        with_zeros = probs.new_zeros(*probs.shape[:-1], pixels + 1)
        return with_zeros.scatter_add(-1, source.expand_as(probs), probs)


class PositionImageAttention(ImageAttention):
    """The base of attention in the place of a convolution that depends on position alone."""

    def _padded_probs(self, size: Sequence[int]) -> Tensor:
        """The probabilities of every query for every pixel of the padded image, ``(N_h, Q, K)``."""
        raise NotImplementedError

    def position_probs(self, size: Sequence[int]) -> Tensor:
        """The probabilities of every kept query for every pixel of an image of ``size``.

        With zero padding what a query gives to the padding is lost, and its probabilities add up to less than 1.

        Returns:
            Tensor: ``(N_h, Q, K)``, queries and pixels row-major, at least float32.
        """
        return self._unpadded(self._padded_probs(size), size)[..., 1:]


class QuadraticImageAttention(PositionImageAttention):
    """Hard or soft heads with the quadratic encoding, −α‖δ − Δ‖² (C20, eq. 9), one axis after the other.

    The arguments are those of :class:`ImageAttention`.

    Attributes:
        encoding (QuadraticEncoding): Centres and widths, at least float32: bfloat16 has no integer 257.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_heads: int,
        window: Window,
        bias: bool = True,
        groups: int = 1,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(in_channels, out_channels, num_heads, window, bias, groups, device=device, dtype=dtype)
        dtype = torch.promote_types(self.value.weight.dtype, torch.float32)
        self.encoding = QuadraticEncoding(num_heads, window.ndim, device=device, dtype=dtype)

    def gaussian_heads(self) -> GaussianHeads:
        return self.encoding.gaussian_heads()

    def head_parameters(self) -> HeadParameters:
        of_positions = {'encoding.center': (0, 1), 'encoding.sqrt_precision': (0, 1)}
        return {**super().head_parameters(), **of_positions}

    def axis_probs(self, size: Sequence[int]) -> Tuple[Tensor, ...]:
        """The factors of the probabilities, ``(N_h, Q, K)`` for each axis, K being the padded pixels."""
        probs = []
        for axis, pixels in enumerate(size):
            before, after = self.window.padding_of(axis, pixels)
            device = self.encoding.center.device
            queries = self.window.queries(axis, pixels, device)
            keys = torch.arange(-before, pixels + after, device=device)
            probs.append(softmax(self.encoding.scores_along(axis, keys[None, :] - queries[:, None])))
        return tuple(probs)

    def _outputs(self, x: Tensor) -> Tensor:
        probs, x = self._of_values(x)
        sizes = [factor.shape[1] for factor in probs]
        if math.prod(sizes) * math.prod(x.shape[2:]) > DENSE_PAIRS:
            output = self._joined(self._along_axes(probs, x))
        else:
            tokens = x.flatten(2).transpose(1, 2)
            output = self._joined(shared_heads(_kronecker(probs), tokens, channels_first=self.groups > 1))
        return output.unflatten(2, sizes)  # (B, out_channels, *out)

    def _of_values(self, x: Tensor) -> Tuple[Tuple[Tensor, ...], Tensor]:
        """The factors of the probabilities of the pixels that have a value, and these pixels."""
        probs = self.axis_probs(x.shape[2:])
        if self.window.padding_mode == 'zeros':  # they have no value
            starts = [self.window.padding_of(axis, n)[0] for axis, n in enumerate(x.shape[2:])]
            probs = tuple(factor.narrow(2, start, n) for factor, start, n in zip(probs, starts, x.shape[2:]))
        else:
            x = self.window.pad(x)
        return probs, x

    def _along_axes(self, probs: Sequence[Tensor], x: Tensor) -> Tensor:
        """The heads ``(B, N_h, Q, C)``, one axis after the other."""
        x = x[:, None]  # (B, 1, C, *padded)
        for axis, factor in enumerate(probs, start=3):
            x = torch.einsum('hqk,bhc...k->bhc...q', factor.to(x.dtype), x.movedim(axis, -1)).movedim(-1, axis)
        return x.flatten(3).transpose(2, 3)

    def _padded_probs(self, size: Sequence[int]) -> Tensor:
        return _kronecker(self.axis_probs(size))


def _kronecker(factors: Sequence[Tensor]) -> Tensor:
    """The Kronecker product of probabilities ``(N_h, Q, K)`` along each axis."""
    product = factors[0]
    for factor in factors[1:]:
        product = torch.einsum('hqk,hrl->hqrkl', product, factor).flatten(3, 4).flatten(1, 2)
    return without_subnormals(product)


class WindowImageAttention(PositionImageAttention):
    """Heads with any distribution over the pixels of the window.

    The arguments are those of :class:`ImageAttention`.

    Attributes:
        encoding (WindowEncoding): A score for each pixel of the window, at least float32.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_heads: int,
        window: Window,
        bias: bool = True,
        groups: int = 1,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(in_channels, out_channels, num_heads, window, bias, groups, device=device, dtype=dtype)
        dtype = torch.promote_types(self.value.weight.dtype, torch.float32)
        self.encoding = WindowEncoding(num_heads, window.kernel_size, device=device, dtype=dtype)

    def head_parameters(self) -> HeadParameters:
        return {**super().head_parameters(), 'encoding.weight': (0, 1)}

    def _outputs(self, x: Tensor) -> Tensor:
        # A head looks at its window alone, with the same probabilities everywhere.
        x = self.window.pad(x)
        batch, channels = x.shape[:2]
        convolve = (F.conv1d, F.conv2d, F.conv3d)[self.window.ndim - 1]
        probs = self.encoding().to(x.dtype)[:, None]
        heads = convolve(x.flatten(0, 1)[:, None], probs, stride=self.window.stride, dilation=self.window.dilation)
        sizes = heads.shape[2:]
        heads = heads.flatten(2).unflatten(0, (batch, channels)).permute(0, 2, 3, 1)
        return self._joined(heads).unflatten(2, sizes)

    def _padded_probs(self, size: Sequence[int]) -> Tensor:
        weight = self.encoding()  # (N_h, *kernel)
        device = weight.device
        queries = [self.window.queries(axis, n, device) for axis, n in enumerate(size)]
        paddings = [self.window.padding_of(axis, n) for axis, n in enumerate(size)]
        padded = [n + before + after for n, (before, after) in zip(size, paddings)]
        before = torch.tensor([before for before, _ in paddings], device=device)
        query = torch.cartesian_prod(*queries).reshape(-1, self.window.ndim)
        key = query[:, None] + self.window.shifts().to(device) + before  # (Q, K, ndim), in the padded image
        index = torch.zeros_like(key[..., 0])
        for axis, n in enumerate(padded):
            index = index * n + key[..., axis]
        probs = weight.new_zeros(self.num_heads, len(query), math.prod(padded))
        return probs.scatter(
            2, index.expand(self.num_heads, -1, -1), weight.flatten(1)[:, None].expand(-1, len(query), -1)
        )
