"""Attention over patches that is a convolution on the image (L21, Theorem 1), by wide heads and by narrow ones."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers.convolutions import relative_error
from helpers.layers import with_outputs
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attncnn_plugin.attention import GridBias, PatchAttention
from attncnn_plugin.attention.patches import image_to_patches, patches_to_image
from attncnn_plugin.convert import min_heads
from attncnn_plugin.convert.patch_convolutions import attend_like_convolution, choose_head_dims, patch_shifts

DOUBLE = dict(dtype=torch.float64)


def attention_like(conv, patch, head_dim=None, grid=(4, 4), **options):
    """Attention over patches that is the convolution."""
    shifts = patch_shifts(conv.kernel_size, patch)
    options.update(head_dim=choose_head_dims(conv, patch, head_dim), **DOUBLE)
    attention = PatchAttention(
        conv.in_channels * patch**2, len(shifts), GridBias(len(shifts), grid, **DOUBLE), **options
    )
    with_outputs(attention, conv.out_channels * patch**2)
    attend_like_convolution(attention, conv, patch, attn_bias=40.0)
    return attention


def on_images(attention, patch):
    size = (patch, patch)
    return lambda image: patches_to_image(attention(image_to_patches(image, size)), size)


@st.composite
def convolutions(draw):
    """A convolution, the patch size, and the grid of an image."""
    channels, kernel_size, grid = ((draw(st.integers(1, most)), draw(st.integers(1, most))) for most in (3, 7, 4))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    return nn.Conv2d(*channels, kernel_size, padding='same', **DOUBLE), draw(st.integers(1, 5)), grid


@given(convolutions(), st.sampled_from([None, 'exact']), st.integers(1, 5))
def test_equals_the_convolution(case, head_dim, qk_dim):
    conv, patch, grid = case
    attention = attention_like(conv, patch, head_dim, grid, qk_dim=qk_dim)
    assert attention.num_heads == min_heads(conv.kernel_size, patch) and max(attention.head_dims) <= attention.dim
    assert attention.query.weight.shape == (attention.num_heads * qk_dim, attention.dim)
    assert not attention.query.weight.any() and attention.key.weight.any()  # were both zero, neither would learn
    x = torch.randn(1, conv.in_channels, *(n * patch for n in grid), **DOUBLE)
    assert relative_error(on_images(attention, patch)(x), conv(x)) <= 1e-10
    assert relative_error(on_images(attention.float(), patch)(x.float()).double(), conv(x)) <= 1e-4


@pytest.mark.parametrize('kernel, patch', [(3, 4), (5, 16), (7, 4), (9, 4), (11, 4), (5, 1), (9, 2), (1, 4)])
def test_number_of_heads(kernel, patch):
    reach = math.ceil((kernel - 1) / (2 * patch))
    assert min_heads(kernel, patch) == (2 * reach + 1) ** 2
    assert patch_shifts(kernel, patch) == tuple(itertools.product(range(-reach, reach + 1), repeat=2))


@pytest.mark.parametrize(
    'kernel, total', [(3, 972), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(5, 1200), (7, 1452)])]
)
def test_exact_widths_are_the_ranks(kernel, total):
    """The ranks of L21's matrices W^V W^O for 3 channels and patches of 16 pixels, by numpy."""
    conv = nn.Conv2d(3, 3, kernel, padding=kernel // 2, **DOUBLE)
    widths = choose_head_dims(conv, 16, 'exact')
    assert sum(widths) == total
    different = [0, 1, 4] if kernel == 3 else range(9)  # a corner, an edge and the middle; the others take seconds
    full = attention_like(conv, 16, qk_dim=1).value_matrices().detach().numpy()
    assert [np.linalg.matrix_rank(full[head]) for head in different] == [widths[head] for head in different]


def test_construction_of_the_paper_fails_at_the_border():
    """Without the null key a head that finds no key at its shift spreads over the whole image."""
    conv = nn.Conv2d(2, 2, 3, padding=1, **DOUBLE)
    attention, x = attention_like(conv, 4), torch.randn(1, 2, 16, 16, **DOUBLE)
    attention.position.null_key = False
    error = (on_images(attention, 4)(x) - conv(x)).abs()
    assert error[..., 4:-4, 4:-4].max() < 1e-12
    assert error[..., 0, :].min() > 1e-4 and error[..., :, -1].max() > 1e-2


def test_wrong_arguments():
    conv = nn.Conv2d(1, 1, 3, padding=1)
    for options, message in (
        (dict(head_dim='narrow'), r"head_dim='narrow' is unknown: choose one of \(None, 'exact'\)"),
        (dict(patch_size=4.0), 'patch_size=4.0 must be a positive integer, or one for each of 2 axes'),
    ):
        with pytest.raises(ValueError, match=message):
            choose_head_dims(conv, **{'patch_size': 4, **options})


@pytest.mark.parametrize('least, widths', [(1, (2, 8, 32)), (5, (5, 8, 32)), (1000, (32, 32, 32))])
def test_exact_heads_are_as_wide_as_what_is_read(least, widths):
    """Two channels of a pixel in the corner, of 4 along a side and of the 16 of a patch; a patch is enough."""
    corner, side, patch = widths
    found = choose_head_dims(nn.Conv2d(2, 2, 3, padding=1), 4, 'exact', least)
    assert found == (corner, side, corner, side, patch, side, corner, side, corner)
