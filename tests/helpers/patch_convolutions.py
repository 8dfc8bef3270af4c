"""Random convolutions that can become attention over patches."""

import torch
from hypothesis import strategies as st
from torch import nn


@st.composite
def patch_convolutions(draw):
    """A convolution of one output patch for each patch, the patch size, and the shape of an image."""
    groups, patch, stride, kernel, dilation, padding = draw(st.integers(1, 2)), [], [], [], [], []
    same = draw(st.booleans())
    for _ in range(2):
        stride.append(1 if same else draw(st.integers(1, 2)))
        patch.append(stride[-1] * draw(st.integers(1, 3)))
        dilation.append(draw(st.integers(1, 3)))
        kernel.append(draw(st.integers(1, 7)))
        extent = dilation[-1] * (kernel[-1] - 1) + 1
        if not same and extent % 2 == 0 and stride[-1] == 1:
            kernel[-1] += 1  # an even window cannot be padded alike on both sides
            extent = dilation[-1] * (kernel[-1] - 1) + 1
            if extent % 2 == 0:
                dilation[-1] *= 2
                extent = dilation[-1] * (kernel[-1] - 1) + 1
        padding.append(-(-(extent - stride[-1]) // 2) if extent > stride[-1] else 0)
        if extent < stride[-1]:
            kernel[-1], dilation[-1] = stride[-1], 1
    conv = nn.Conv2d(
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
        kernel,
        stride=stride,
        dilation=dilation,
        padding='same' if same else tuple(padding),
        groups=groups,
        bias=draw(st.booleans()),
        dtype=torch.float64,
    )
    torch.manual_seed(draw(st.integers(0, 2**16)))
    conv.reset_parameters()
    return conv, tuple(patch), (1, conv.in_channels, *(p * draw(st.integers(1, 4)) for p in patch))


def fits(conv, shape):
    """Whether an image of a shape is not smaller than the window; torch refuses it otherwise."""
    return all(
        n + 2 * (p if conv.padding != 'same' else d * (k - 1)) >= d * (k - 1) + 1
        for n, p, d, k in zip(
            shape[2:], conv.padding if conv.padding != 'same' else (0, 0), conv.dilation, conv.kernel_size
        )
    )
