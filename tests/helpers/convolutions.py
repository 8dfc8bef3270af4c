"""Random convolutions of every kind, for the tests."""

import torch
from hypothesis import strategies as st
from torch import nn

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@st.composite
def convolutions(draw, ndims=(1, 2, 3)):
    """A convolution in float64, and the shape of an image for it."""
    ndim = draw(st.sampled_from(ndims))
    sizes = {1: 12, 2: 9, 3: 5}[ndim]

    def per_axis(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(ndim))

    groups = draw(st.integers(1, 3))
    kernel_size, dilation = per_axis(1, 4 if ndim < 3 else 3), per_axis(1, 3 if ndim < 3 else 2)
    kind = draw(st.sampled_from(['valid', 'same', 'numbers', 'number']))
    stride = (1,) * ndim if kind == 'same' else per_axis(1, 3)
    padding = {'numbers': per_axis(0, 4), 'number': draw(st.integers(0, 3))}.get(kind, kind)
    # The image must hold the window, and reflection and wrapping no more than the image.
    extent = [d * (k - 1) + 1 for d, k in zip(dilation, kernel_size)]
    size = tuple(draw(st.integers(max(n, 6), max(n, 6) + sizes - 3)) for n in extent)
    conv = CONVOLUTIONS[ndim](
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
        kernel_size,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(['zeros', 'replicate', 'reflect', 'circular'])),
        dtype=torch.float64,
    )
    torch.manual_seed(draw(st.integers(0, 2**16)))
    conv.reset_parameters()
    return conv, (draw(st.integers(1, 2)), conv.in_channels, *size)


def relative_error(actual, expected):
    return (actual - expected).norm() / expected.norm().clamp(min=1e-6)


def is_regular(x):
    """Whether a new tensor has the strides of ``x``, contiguous or with the channels last."""
    formats = {torch.contiguous_format, CHANNELS_LAST.get(x.ndim, torch.contiguous_format)}
    return x.stride() in [torch.empty(x.shape, memory_format=of).stride() for of in formats]


def joined(layer, probs, x):
    """Σ_h W_h (P_h x) + b, ``(B, out_channels, Q)``, of probabilities ``([B,] N_h, Q, K)`` and pixels."""
    matrices = layer.value_matrices().to(x.dtype)
    probs = probs.expand(len(x), *probs.shape[-3:])
    output = torch.einsum('hoc,bhqk,bck->boq', matrices, probs, x.flatten(2))
    return output if layer.value.bias is None else output + layer.value.bias[:, None]


@st.composite
def content_settings(draw, conv):
    """Content and a neighbourhood that holds the kernel of a convolution."""
    reach = [-(-d * (k - 1) // 2) for d, k in zip(conv.dilation, conv.kernel_size)]
    window_size = draw(st.none() | st.just([2 * (n + draw(st.integers(0, 2))) + 1 for n in reach]))
    content = draw(st.sampled_from(['additive', 'gated']))
    return dict(content=content, window_size=window_size, qk_dim=draw(st.integers(1, 5)))


def randomize(attention, seed=0):
    """Heads anywhere, of any width, that look at content."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            if name == 'encoding.center':
                parameter.add_(torch.randn(parameter.shape, generator=generator))
            elif not name.startswith('value.'):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
