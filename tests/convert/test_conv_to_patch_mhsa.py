"""Convolutions on the image as attention over patches (L21, Theorem 1), by wide heads and by narrow ones."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers.convolutions import relative_error
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attncnn_plugin.convert import conv_to_patch_mhsa, min_heads
from attncnn_plugin.convert.patch_convolutions import PatchConversionReport, choose_head_dims


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


@given(patch_convolutions(), st.sampled_from([None, 'exact']), st.integers(1, 5))
def test_equals_the_convolution(case, head_dim, qk_dim):
    conv, patch, shape = case
    module, report = conv_to_patch_mhsa(conv, patch, head_dim, qk_dim)
    attention = module.attention
    widths = choose_head_dims(conv, patch, 'exact') if head_dim == 'exact' else (attention.dim,) * report.num_heads
    assert report.head_dims == attention.head_dims == widths and max(widths) <= attention.dim
    assert attention.query.weight.shape == (attention.num_heads * qk_dim, attention.dim)
    assert not attention.query.weight.any() and attention.key.weight.any()  # were both zero, neither would learn
    sizes = zip(shape[2:], conv.padding, conv.dilation, conv.kernel_size)
    if conv.padding != 'same' and any(n + 2 * p <= d * (k - 1) for n, p, d, k in sizes):
        return  # torch refuses an image smaller than the window
    x = torch.randn(shape, dtype=torch.float64)
    expected = conv(x)
    assert module(x).shape == expected.shape
    assert relative_error(module(x), expected) <= 1e-10
    assert relative_error(module.float()(x.float()).double(), expected) <= 1e-4


@pytest.mark.parametrize('kernel, patch', [(3, 4), (5, 16), (7, 4), (9, 4), (11, 4), (5, 1), (9, 2), (1, 4)])
def test_number_of_heads(kernel, patch):
    module, report = conv_to_patch_mhsa(nn.Conv2d(1, 1, kernel, padding=kernel // 2), patch)
    reach = math.ceil((kernel - 1) / (2 * patch))
    assert module.attention.num_heads == report.num_heads == (2 * reach + 1) ** 2 == min_heads(kernel, patch)
    assert report.shifts == tuple(itertools.product(range(-reach, reach + 1), repeat=2))


def test_report():
    """W^Q, W^K, W^V and W^O of 4 heads as wide as the 2·2·2 entries of a patch, 4 entries of b each, and 3·4 biases."""
    _, report = conv_to_patch_mhsa(nn.Conv2d(2, 3, 2, padding='same'), 2)
    after = 4 * 3 * 8 * 8 + 4 * 8 * 12 + 4 * 4 + 12
    assert report == PatchConversionReport(4, ((0, 0), (0, 1), (1, 0), (1, 1)), (8,) * 4, 27, after)
    assert str(report) == (
        'num_heads=4 of 8 channels: exact, a head for each shift from (0, 0) to (1, 1); 27 parameters became 1,180'
    )


@pytest.mark.parametrize(
    'kernel, total', [(3, 972), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(5, 1200), (7, 1452)])]
)
def test_exact_widths_are_the_ranks(kernel, total):
    """The ranks of L21's matrices W^V W^O for 3 channels and patches of 16 pixels, by numpy."""
    conv = nn.Conv2d(3, 3, kernel, padding=kernel // 2, dtype=torch.float64)
    widths = choose_head_dims(conv, (16, 16), 'exact')
    assert sum(widths) == total
    full = conv_to_patch_mhsa(conv, 16)[0].attention.value_matrices()
    assert tuple(np.linalg.matrix_rank(matrix.detach().numpy()) for matrix in full) == widths


def test_exact_widths_are_enough_but_can_be_more():
    """An even kernel with dilation on patches of 3×3 pixels, against the ranks by numpy."""
    conv = nn.Conv2d(1, 1, 2, padding='same', dilation=2, dtype=torch.float64)
    full = conv_to_patch_mhsa(conv, 3)[0].attention.value_matrices().detach().numpy()
    assert np.linalg.matrix_rank(full).tolist() == [1, 2, 1, 2, 6, 2, 1, 2, 1]
    assert choose_head_dims(conv, (3, 3), 'exact') == (1, 3, 1, 3, 9, 3, 1, 3, 1)
    assert choose_head_dims(nn.Conv2d(3, 1, 3, padding=1), (16, 16), 'exact')[4] == 256  # fewer are written than read


def test_construction_of_the_paper_fails_at_the_border():
    """Without the null key a head that finds no key at its shift spreads over the whole image."""
    conv = nn.Conv2d(2, 2, 3, padding=1).double()
    module = conv_to_patch_mhsa(conv, 4)[0]
    x = torch.randn(1, 2, 16, 16).double()
    module.attention.position.null_key = False
    error = (module(x) - conv(x)).abs()
    assert error[..., 4:-4, 4:-4].max() < 1e-12
    assert error[..., 0, :].min() > 1e-4 and error[..., :, -1].max() > 1e-2


@pytest.mark.parametrize(
    'conv, options, message',
    [
        (dict(stride=2), dict(patch_size=3), 'stride=2 of conv does not divide patch_size=3'),
        (dict(padding=0), {}, 'padding of 0 and 0 pixels around a window of 3 with stride 1'),
        (dict(padding=2), {}, 'padding of 2 and 2 pixels'),
        (dict(padding_mode='reflect'), {}, "padding_mode='reflect'"),
        ({}, dict(patch_size=4.0), 'patch_size=4.0 must be a positive integer, or one for each of 2 axes'),
        ({}, dict(head_dim='narrow'), "head_dim='narrow' is unknown: choose 'exact'"),
        ({}, dict(qk_dim=0), 'qk_dim=0 must be at least 1'),
    ],
)
def test_what_cannot_be_converted(conv, options, message):
    with pytest.raises(ValueError, match=message):
        conv_to_patch_mhsa(nn.Conv2d(1, 1, 3, **{'padding': 1, **conv}), **{'patch_size': 4, **options})


def test_wrong_images_and_modules():
    with pytest.raises(TypeError, match='only nn.Conv2d can become attention over patches'):
        conv_to_patch_mhsa(nn.ConvTranspose2d(1, 1, 3), 2)
    module = conv_to_patch_mhsa(nn.Conv2d(3, 3, 3, padding=1), 4)[0]
    with pytest.raises(ValueError, match=r'image of 6x8 pixels cannot be cut into patches of 4x4'):
        module(torch.zeros(1, 3, 6, 8))
    with pytest.raises(ValueError, match=r'\(B, 3, H, W\) or \(3, H, W\) is expected'):
        module(torch.zeros(1, 2, 8, 8))
    assert module(torch.zeros(3, 8, 8)).shape == (3, 8, 8)
    assert module(torch.zeros(0, 3, 8, 8)).shape == (0, 3, 8, 8)


@pytest.mark.parametrize('channels', [(2, 6), (6, 2)])
@pytest.mark.parametrize('least, widths', [(1, (2, 8, 32)), (5, (5, 8, 32)), (1000, None)])
def test_exact_heads_are_as_wide_as_what_is_read_or_written(channels, least, widths):
    """Two channels of a pixel in the corner, of 4 along a side and of the 16 of a patch; a patch is enough."""
    found = choose_head_dims(nn.Conv2d(*channels, 3, padding=1), (4, 4), 'exact', least)
    corner, side, patch = widths or (16 * channels[0],) * 3
    assert found == (corner, side, corner, side, patch, side, corner, side, corner)
