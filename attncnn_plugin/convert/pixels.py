"""A convolution as attention over pixels (Cordonnier et al. 2020 (C20), Theorem 1).

With content, heads begin with W^Q = 0 (Li et al. 2021); the gate is that of d'Ascoli et al. 2021 ("Transformed CNNs").
"""

import copy
import math
import zlib
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from typing import Any, Dict, Mapping, Optional, Tuple, cast

import torch
from torch import Tensor

from ..attention.images import (
    SHARED_GATE,
    ContentImageAttention,
    ImageAttention,
    QuadraticImageAttention,
    WindowImageAttention,
)
from ..attention.positions import QuadraticEncoding
from ..attention.state_dicts import StateDict
from ..attention.strides import is_channels_last, with_new_strides
from ..attention.window import Sizes, Window, check_choice, per_axis, shown
from .convolutions import Computed, Convolution, block_norms, computed, copy_with, moved_copy

# e^−800 is 0 in float64 and float32 alike, so that a head sees one pixel and nothing of its neighbours.
HARD_ALPHA = 800.0
# A wider head sees more of every other pixel than a shift can, and a larger α than HARD_ALPHA changes nothing.
ALPHA_RANGE = (0.1, 1e6)
HARD_GATE = 40.0  # λ; σ(40) is 1 in float64
LEAST_QK_DIM = 8
NEGLIGIBLE = 40.0  # e^−40 is below the rounding error of float64


@dataclass(frozen=True)
class ConversionReport:
    """How far attention over pixels is from the convolution that it replaces.

    Attributes:
        relative_error (float): ‖M − M'‖/‖M‖ in the Frobenius norm, 0 for a kernel of zeros. M is the kernel of the
            convolution. M' is that of the attention as its parameters are stored, which has all pixels that a head sees
            in an image without end.
        deviation (float): The largest share of a head that goes to other pixels than its own, at any pixel of any
            image.
    """

    relative_error: float
    deviation: float

    def __str__(self) -> str:
        return f'error {self.relative_error:.3g}'


@torch.no_grad()
def conv_to_mhsa(
    conv: Convolution,
    *,
    alpha: Optional[float] = None,
    content: Optional[str] = None,
    position: str = 'gaussian',
    window_size: Optional[Sizes] = None,
    qk_dim: Optional[int] = None,
    generator: Optional[torch.Generator] = None,
) -> Tuple[ImageAttention, ConversionReport]:
    """Turns a convolution into multi-head self-attention that takes the same images and computes the same outputs.

    There is one head for each kernel position, and the attention is the convolution, exactly (C20, Theorem 1): head h
    is a hard quadratic head with its centre at the h-th shift, and its slice of the value matrix is the kernel's h-th
    slice. With ``content`` W^Q starts at 0, so that the attention begins as the convolution all the same.

    With the default ``alpha`` the gradients of centres, widths and scores by content are exactly 0. For attention that
    keeps learning, give a smaller one, about 6. Its heads see a little of their neighbours, which the report states.
    Weight decay would move centres all the same: leave it off ``encoding``.

    One NaN or infinite pixel makes all outputs of its image NaN. With ``position='table'`` it makes only those NaN
    whose window has it, as of the convolution.

    Args:
        conv (nn.Conv1d | nn.Conv2d | nn.Conv3d): A convolution with any options, or of a class of its own that computes
            one, such as those with ``'SAME'`` padding or weight standardization. Its device, dtype, mode and
            ``requires_grad`` are those of the result; float16 and bfloat16 layers compute their scores in float32.
        alpha (float, optional): Width α of the heads (C20, eq. 9), from 0.1 to 1e6. Defaults to 800, no error at all;
            46 is below the rounding error of float64 (C20's remark on Lemma 2).
        content (str, optional): How scores by content come in, ``'additive'`` or ``'gated'``, see
            :class:`~attncnn_plugin.attention.ContentImageAttention`. λ starts at 40, no content at all, with the
            default ``alpha``, and at 4, 2% of the probabilities, with another. Defaults to None, only positions.
        position (str): ``'gaussian'``, heads −α‖δ − Δ‖², or ``'table'``, a score for each shift of the kernel,
            without content. Defaults to ``'gaussian'``.
        window_size (int | Sequence[int], optional): With content, the size of the neighbourhood of a query that its
            keys are in, odd, for all axes or for each: time and memory then grow linearly with the number of pixels.
            Defaults to None, the whole image.
        qk_dim (int, optional): With content, channels D_k of a head's queries and keys. Defaults to the channels
            divided by the heads, at least 8.
        generator (torch.Generator, optional): With content, for the random W^K, on the CPU. Defaults to PyTorch's own.

    Raises:
        TypeError: ``conv`` is not one of these, has no weights yet, or not real ones, or it computes something else
            than its attributes describe.
        ValueError: ``alpha`` is not from 0.1 to 1e6; a weight is not finite, or not there (on the meta device); an
            unknown ``content`` or ``position``; a ``window_size`` that is not odd or does not hold the kernel; an
            argument of content without it.

    Examples:
        >>> conv = torch.nn.Conv2d(3, 8, kernel_size=3, padding=1)
        >>> attention, report = conv_to_mhsa(conv)
        >>> attention.num_heads, report.relative_error
        (9, 0.0)
        >>> images = torch.randn(2, 3, 10, 12)
        >>> torch.allclose(attention(images), conv(images), atol=1e-5)
        True

        Heads that can learn:

        >>> attention, report = conv_to_mhsa(conv, alpha=6)
        >>> round(report.deviation, 4), bool(report.relative_error < 0.02)
        (0.0098, True)
    """
    plain = computed(conv)
    settings = check_settings(plain, alpha, content, position, window_size, qk_dim)
    if plain.weight.is_meta:
        raise ValueError('conv is on the meta device, without values: load its weights, or build it on another device')
    attention = new_attention(conv, plain, settings)
    if attention.value.bias is not None:
        attention.value.bias.copy_(cast(Tensor, plain.bias))
    share, width = 1.0, HARD_ALPHA if alpha is None else alpha  # of the probabilities by position
    if settings.get('window_size') is not None:  # δ of what heads see
        pixels = replace(plain.window, kernel_size=settings['window_size'], dilation=(1,) * plain.window.ndim).shifts()
    else:
        pixels = plain.window.shifts() if position == 'table' else pixels_around(plain.window, width)
    if isinstance(attention, ContentImageAttention):
        limit, key = plain.in_channels**-0.5, attention.key.weight
        drawn = torch.empty(key.shape, dtype=torch.float32, device='cpu')  # where the generator is
        key.copy_(drawn.uniform_(-limit, limit, generator=generator))
        attention.query.weight.zero_()
        if attention.gate is not None:
            attention.gate.fill_(HARD_GATE if alpha is None else SHARED_GATE)
            share = attention.gate[0].double().sigmoid().item()
    return attention, _place_heads(attention, plain, width, pixels, share)


def check_settings(
    conv: Computed,
    alpha: Optional[float] = None,
    content: Optional[str] = None,
    position: str = 'gaussian',
    window_size: Optional[Sizes] = None,
    qk_dim: Optional[int] = None,
) -> Dict[str, Any]:
    """Returns the arguments of :func:`conv_to_mhsa` as plain values, with their defaults for a convolution.

    Raises:
        ValueError: See :func:`conv_to_mhsa`.
    """
    window = conv.window
    check_choice('position', position, ('gaussian', 'table'))
    check_choice('content', content, (None, 'additive', 'gated'))
    settings: Dict[str, Any] = {'position': position}
    if alpha is not None:
        if isinstance(alpha, bool) or not isinstance(alpha, Real) or not ALPHA_RANGE[0] <= alpha <= ALPHA_RANGE[1]:
            raise ValueError(
                f'alpha={shown(alpha)} must be a number from {ALPHA_RANGE[0]} to {ALPHA_RANGE[1]:g}: 46 or more for an '
                'exact convolution, about 6 for heads that learn'
            )
        settings['alpha'] = float(alpha)
    if content is None:
        if window_size is not None or qk_dim is not None:
            given = f'window_size={shown(window_size)}' if qk_dim is None else f'qk_dim={shown(qk_dim)}'
            raise ValueError(f"{given} is for attention by content: add content='additive' or 'gated'")
        return settings
    if position == 'table':
        raise ValueError(f"position='table' is for attention without content: leave it out, or content={content!r}")
    if qk_dim is None:
        qk_dim = max(LEAST_QK_DIM, math.ceil(conv.in_channels / math.prod(window.kernel_size)))
    if not isinstance(qk_dim, Integral) or isinstance(qk_dim, bool) or qk_dim < 1:
        raise ValueError(f'qk_dim={shown(qk_dim)} must be a number of channels, at least 1')
    least = tuple((2 * window.shifts().abs().amax(0) + 1).tolist())
    size = None if window_size is None else per_axis('window_size', window_size, window.ndim)
    if size is not None and any(n % 2 == 0 or n < m for n, m in zip(size, least)):
        raise ValueError(
            f'window_size={window_size} must be odd, and at least {least} for the shifts of a kernel of '
            f'{window.kernel_size} with dilation {window.dilation}'
        )
    return {**settings, 'content': content, 'window_size': size, 'qk_dim': int(qk_dim)}


@dataclass(frozen=True, eq=False)
class OwnConvolution:
    """The convolution that a layer was made from: it converts state dicts of it, and the layer back to it.

    Attributes:
        conv (nn.Module): The convolution, of its own class and with all that it has. Its weight and bias are on the
            meta device where the attention computes with them as they are, not standardized for instance.
    """

    conv: Any

    def back(self, attention: ImageAttention, kernel: Computed) -> Tuple[Any, float]:
        """Returns the convolution with a new kernel, and the largest error of an output for pixels of norm 1.

        Its device, dtype, mode and ``requires_grad`` are those of the layer. A class that computes its weights, such as
        standardized ones, still has those of the conversion: the error is how far their kernel is from the new one.
        """
        like, new = kernel.weight, {id(self.conv.weight): kernel.weight, id(self.conv.bias): kernel.bias}

        def renewed(x: Tensor) -> Tensor:
            value = new.get(id(x)) if x.is_meta else None
            copied = moved_copy(x, like.device, like.dtype)
            return copied if value is None else torch.empty_like(copied, device=like.device).copy_(value)  # its strides

        conv = copy_with(self.conv, renewed).train(attention.training)
        lost, found = 0.0, computed(conv)
        for key, own in attention.value.named_parameters(recurse=False):
            conv.get_parameter(key).requires_grad_(own.requires_grad)
        if not found.own:
            lost = block_norms((found.weight - kernel.weight).double().flatten(2), kernel.groups).sum().item()
            if found.bias is not None and kernel.bias is not None:
                lost += (found.bias - kernel.bias).abs().max().item()
        return conv, lost

    def __call__(self, attention: ImageAttention, entries: StateDict, name: str) -> StateDict:
        """Converts a state dict of the convolution; raises ``ValueError`` or ``RuntimeError`` for another's."""
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # W^K is the same on every rank
        conv = copy.deepcopy(self.conv)
        conv.load_state_dict(entries, assign=True)
        converted = conv_to_mhsa(conv, **attention.settings, generator=generator)[0]
        attention.from_conv = converted.from_conv
        return converted.state_dict()


def new_attention(conv: Any, plain: Computed, settings: Mapping[str, Any]) -> ImageAttention:
    """Builds attention that can replace a convolution that computes ``plain``; its values are yet to be set.

    The settings are those of :func:`check_settings`.
    """
    arguments = plain.in_channels, len(plain.weight), math.prod(plain.window.kernel_size), plain.window
    # On the meta device, so that no random numbers are drawn.
    options: Any = dict(bias=plain.bias is not None, groups=plain.groups, device='meta', dtype=plain.weight.dtype)
    kind: Any = QuadraticImageAttention if settings['position'] == 'gaussian' else WindowImageAttention
    if 'content' in settings:
        kind = partial(ContentImageAttention, gated=settings['content'] == 'gated')
        options.update({name: settings[name] for name in ('window_size', 'qk_dim')})
    attention: ImageAttention = kind(*arguments, **options)
    attention.to_empty(device=plain.weight.device)
    if 'alpha' in settings:
        attention.settings['alpha'] = settings['alpha']
    own = {id(parameter) for parameter in (conv.weight, conv.bias) if plain.own}
    kept = copy_with(conv, lambda x: x.detach().to('meta') if id(x) in own else x.detach().clone())
    attention.from_conv = OwnConvolution(kept)
    sources = [conv.weight, *(parameter for name, parameter in conv.named_parameters() if name != 'bias')]
    attention.requires_grad_(any(source.requires_grad for source in sources)).train(conv.training)
    attention.layout = with_new_strides(torch.zeros_like(attention.layout), is_channels_last(conv.weight))
    if attention.value.bias is not None:
        attention.value.bias.requires_grad_(conv.bias.requires_grad)
    return attention


def _place_heads(attention: Any, conv: Computed, alpha: float, pixels: Tensor, share: float) -> ConversionReport:
    """Sets where heads look, at pixels at δ, ``(S, ndim)``, by a ``share`` of the probabilities, and their values.

    In an image that ends somewhere the own pixel of a head gets more: an image without end is the worst case (C20,
    Lemma 2). What is not by position counts as lost.
    """
    encoding, shifts = attention.encoding, conv.window.shifts()  # Δ of head h: f(h) of the theorem
    distance = (pixels - shifts[:, None]).square().sum(-1)  # ‖δ − Δ‖², (K, S)
    if not conv.weight.isfinite().all():
        raise ValueError('the weights of conv hold values that are not finite, but a kernel needs finite ones')
    # W^(h) is the kernel's slice at the h-th position; an output has them head after head.
    attention.value.weight.copy_(conv.weight.flatten(2).transpose(1, 2).flatten(1))
    if isinstance(encoding, QuadraticEncoding):
        encoding.center.copy_(shifts)
        encoding.sqrt_precision.fill_(math.sqrt(2 * alpha))
        alpha = encoding.sqrt_precision[0].double().square().item() / 2  # as stored
    else:
        encoding.weight.copy_((-alpha * distance).reshape(encoding.weight.shape))
    others = share * (-alpha * distance.double()).softmax(-1).masked_fill(distance == 0, 0)
    deviations = others.sum(-1, keepdim=True) + (1 - share)  # not 1/Z − 1, which would cancel
    differences, deviation = torch.where(distance == 0, -deviations, others), deviations.max().item()  # P_h − e_Δ
    matrix = conv.weight.detach().cpu().double().flatten(2).flatten(0, 1).T  # M, (K, C_out·C_in/groups)
    matrix = matrix / matrix.abs().max().clamp(min=torch.finfo(matrix.dtype).tiny)
    matrix = torch.linalg.qr(matrix.T, mode='r').R.T  # K×K at most, with the same norms
    total = matrix.norm()
    error = ((differences.T @ matrix).norm() / total).item() if total > 0 else 0.0  # ‖Σ_h (P_h − e_h) ⊗ W_h‖/‖M‖
    return ConversionReport(error, deviation)


def pixels_around(window: Window, alpha: float) -> Tensor:
    """Returns δ of all pixels, ``(S, ndim)``, that heads of width α at a window's shifts see in an endless image."""
    shifts = window.shifts()
    reach = math.ceil(math.sqrt(NEGLIGIBLE / alpha))
    ends = zip((shifts[0] - reach).tolist(), (shifts[-1] + reach).tolist())
    axes = [torch.arange(first, last + 1, device='cpu') for first, last in ends]
    return torch.cartesian_prod(*axes).reshape(-1, window.ndim)
