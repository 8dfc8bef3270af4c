"""Attention to convolution: exact for hard heads, least squares for soft ones, and bounds that bound."""

import pytest
import torch
import torch.nn.functional as F
from helpers.adapter import Adapter
from helpers.convolutions import convolutions
from helpers.grids import gaussian_layer, matrix, on_images, shift_operators
from helpers.layers import TOKENS, with_outputs
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import Conv2dSame
from torch import nn

from attncnn_plugin.attention import ContentAttention, LearnedAttention, QuadraticAttention
from attncnn_plugin.attention.images import QuadraticImageAttention, WindowImageAttention
from attncnn_plugin.attention.window import Window
from attncnn_plugin.convert import conv_to_mhsa, mhsa_to_conv

KINDS = ['quadratic', 'generalized', 'learned']
MODES = ['zeros', 'replicate', 'reflect', 'circular']


@given(
    st.data(),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([torch.float64, torch.float32]),
    st.integers(0, 2**31),
)
def test_hard_heads_are_their_convolution(data, kernel_size, num_heads, bias, dtype, seed):
    torch.manual_seed(seed)
    reach = [((k - 1) // 2, k // 2) for k in kernel_size]  # pixels before and after
    center = st.tuples(*(st.integers(-before, after) for before, after in reach))
    centers = data.draw(st.lists(center, min_size=num_heads, max_size=num_heads))
    layer = with_outputs(gaussian_layer(3, centers, dtype=dtype), 2, bias)
    expected = torch.zeros(2, 3, *kernel_size, dtype=dtype)
    for (row, column), value in zip(centers, layer.value.weight.detach().split(3, dim=1)):
        expected[:, :, row + reach[0][0], column + reach[1][0]] += value

    conv, fit = mhsa_to_conv(layer, kernel_size, size=data.draw(st.sampled_from([None, (6, 9)])))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert conv.weight.dtype == dtype and (conv.bias is None) == (not bias)
    assert (conv.weight - expected).abs().max() <= tolerance
    assert fit.bound <= 1e-10 and fit.residual.max() <= 1e-10
    shifts = torch.cartesian_prod(*(torch.arange(-before, after + 1) for before, after in reach))  # row by row
    hits = (shifts == torch.tensor(centers)[:, None]).all(-1)
    assert (fit.coefficients - hits.double()).abs().max() <= 1e-10

    x = torch.randn(2, 3, data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8)), dtype=dtype)
    padding = [n for pair in reversed(reach) for n in pair]
    reference = F.conv2d(F.pad(x, padding, mode='replicate'), expected, layer.value.bias)
    assert (conv(x) - reference).abs().max() <= tolerance
    assert (conv(x) - on_images(layer)(x)).abs().max() <= tolerance


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('kernel_size, size', [((3, 3), (5, 6)), ((2, 4), (4, 5)), ((1, 5), (3, 3))])
def test_least_squares_over_shifts(kind, kernel_size, size):
    layer = with_outputs(TOKENS[kind](4, 3, dtype=torch.float64), 2)
    conv, fit = mhsa_to_conv(layer, kernel_size, size)
    assert_least_squares(layer, conv, fit, layer.attention_probs(size).detach())
    assert conv.padding_mode == 'replicate' and fit.residual.min() > 1e-3


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize(
    'options, size',
    [
        (dict(kernel_size=3, padding=1, dtype=torch.float64), (7,)),
        (dict(kernel_size=(2, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2), dtype=torch.float64), (5, 6)),
        (dict(kernel_size=(2, 4), padding='same', dtype=torch.float64), (4, 5)),
        (dict(kernel_size=2, padding=1, dtype=torch.float64), (3, 2, 2)),
    ],
)
def test_least_squares_for_image_attention(options, size, mode):
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(size) - 1](4, 2, padding_mode=mode, **options)
    layer = QuadraticImageAttention(4, 2, 3, Window.of(conv), dtype=torch.float64)
    result, fit = mhsa_to_conv(layer, options['kernel_size'], size)
    assert Window.of(result) == Window.of(conv) and type(result) is type(conv)
    assert_least_squares(layer, result, fit, layer.attention_probs(size).detach())


def assert_least_squares(layer, conv, fit, probs):
    operators = shift_operators(conv, fit.size)
    # gelsd: the smallest solution where shifts coincide on a small grid
    solution = torch.linalg.lstsq(operators.flatten(1).T, probs.flatten(1).T, driver='gelsd').solution.T
    assert (fit.coefficients - solution).abs().max() <= 1e-10
    error = (probs - torch.einsum('hk,kqp->hqp', solution, operators)).flatten(1).norm(dim=1)
    assert (fit.residual - error / probs.flatten(1).norm(dim=1)).abs().max() <= 1e-10
    value = layer.value.weight.unflatten(1, (layer.num_heads, -1))  # (C_out, N_h, C_in)
    kernel = torch.einsum('hk,ohi->oik', solution, value)
    assert (conv.weight.flatten(2) - kernel).abs().max() <= 1e-10


@given(convolutions())
def test_round_trip_of_convolutions(case):
    conv, _ = case
    # So large that one window at least is inside, at any stride.
    size = [max(6, s + d * (k - 1) + 1) for s, d, k in zip(conv.stride, conv.dilation, conv.kernel_size)]
    result, fit = mhsa_to_conv(conv_to_mhsa(conv)[0], conv.kernel_size, size)
    assert type(result) is type(conv) and result.groups == conv.groups
    assert (result.weight - conv.weight).abs().max() <= 1e-10
    assert fit.bound <= 1e-10
    x = torch.randn(2, conv.in_channels, *(n + 3 for n in size), dtype=torch.float64)
    expected = conv(x)
    assert result(x).shape == expected.shape and (result(x) - expected).abs().max() <= 1e-10


@pytest.mark.parametrize('stride', [1, 2, 3])
def test_padding_that_depends_on_the_image(stride):
    conv = Conv2dSame(2, 4, (3, 4), stride, dilation=2, groups=2).double()
    result, fit = mhsa_to_conv(conv_to_mhsa(conv)[0], (3, 4), size=(14, 13))
    assert type(result) is Conv2dSame and (result.weight - conv.weight).abs().max() <= 1e-10 and fit.bound <= 1e-10
    for size in ((14, 13), (9, 8)):
        x = torch.randn(1, 2, *size).double()
        assert (result(x) - conv(x)).abs().max() <= 1e-10


def test_default_size_holds_a_window_at_any_stride():
    conv = nn.Conv2d(1, 1, (3, 6), stride=(19, 20), padding=(1, 0), dtype=torch.float64)
    result, fit = mhsa_to_conv(conv_to_mhsa(conv)[0], (3, 6))
    assert fit.bound <= 1e-10 and (result.weight - conv.weight).abs().max() <= 1e-10


@given(
    st.sampled_from([*KINDS, 'image']),
    st.sampled_from(MODES),
    st.integers(1, 3),
    st.integers(0, 2**31),
)
def test_bounds_hold_and_are_reached_by_one_head(kind, mode, num_heads, seed):
    torch.manual_seed(seed)
    size = (6, 5)
    if kind == 'image':
        window = Window.of(nn.Conv2d(4, 3, 3, padding=1, padding_mode=mode))
        layer = QuadraticImageAttention(4, 3, num_heads, window, dtype=torch.float64)
        conv, fit = mhsa_to_conv(layer, 3, size)
        error = matrix(layer, 4, size) - matrix(conv, 4, size)
    else:
        layer = with_outputs(TOKENS[kind](4, num_heads, dtype=torch.float64), 3)
        conv, fit = mhsa_to_conv(layer, 3, size)
        error = matrix(on_images(layer), 4, size) - matrix(conv, 4, size)  # (C_out, Q, C_in, pixels)

    # max ‖Σ_k M_k x_k‖₂ over ‖x_k‖₂ ≤ 1 for each query: the best x for a direction u of the output, and u again.
    u = torch.randn(8, 3, error.shape[1], dtype=torch.float64)
    for _ in range(50):
        x = F.normalize(torch.einsum('noq,oqik->niqk', u, error), dim=1)
        output = torch.einsum('oqik,niqk->noq', error, x)
        u = F.normalize(output, dim=1)
    reached = output.norm(dim=1)  # the largest error of each query
    assert reached.max() <= fit.bound * (1 + 1e-10) + 1e-12
    # One head: the bound is the largest error. Several: it does not see that their errors can cancel, by any amount.
    if num_heads == 1:
        assert reached.max() >= 0.999 * fit.bound - 1e-12
    # ... and of a whole output, on random inputs
    x = F.normalize(torch.randn(16, 4, *size, dtype=torch.float64), dim=1)
    with torch.no_grad():
        output = layer(x) if kind == 'image' else on_images(layer)(x)
        assert (output - conv(x)).norm(dim=1).max() <= fit.bound + 1e-12


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_and_mode_are_those_of_the_layer(dtype):
    layer = gaussian_layer(4, [(0, 1), (-1, 0)], attn_drop=0.5, dtype=dtype).eval()
    conv, fit = mhsa_to_conv(layer, 3)
    assert conv.weight.dtype == conv.bias.dtype == dtype and not conv.training and conv.weight.requires_grad
    assert fit.coefficients.dtype == torch.float64 and fit.size == (16, 16) and layer.value.weight.dtype == dtype
    x = torch.randn(1, 4, 6, 6, dtype=dtype)  # 4 * 9 products for each output
    assert (conv(x) - on_images(layer)(x)).float().abs().max() <= 4 * 9 * torch.finfo(dtype).eps
    assert mhsa_to_conv(layer.train(), 3)[0].training


quadratic = QuadraticAttention(4, 2)
strided = conv_to_mhsa(nn.Conv2d(2, 2, 3, stride=2, padding=1))[0]
adapted = QuadraticAttention(4, 2)
adapted.value = Adapter(adapted.value)
reflecting = conv_to_mhsa(nn.Conv2d(2, 2, 5, padding=2, padding_mode='reflect'))[0]
adapted_groups = conv_to_mhsa(nn.Conv2d(2, 2, 3, padding=1, groups=2))[0]
adapted_groups.value = nn.Sequential(adapted_groups.value)


@pytest.mark.parametrize(
    'arguments, error, message',
    [
        ((nn.Linear(2, 2), 3), TypeError, 'layer is a Linear'),
        ((ContentAttention(4, 2), 3), ValueError, r'ContentAttention\(.*depend on the input'),
        ((quadratic, 0), ValueError, 'kernel_size=0'),
        ((quadratic, 3, (8,)), ValueError, r'size=\(8,\)'),
        ((reflecting, 5, (8, 2)), RuntimeError, 'Padding size should be less than'),
        ((LearnedAttention(4, 2, max_size=(8, 8)), 3, 9), ValueError, '9x9 tokens is larger than the 8x8'),
        ((strided, 5), ValueError, r'kernel_size=5 must be that of the window of layer, \(3, 3\)'),
        (
            (WindowImageAttention(1, 1, 1, Window((2,), (2,), (1,), ((0, 1),), 'zeros')), 2),
            ValueError,
            r'padded by \(\(0, 1\),\) with stride \(2,\)',
        ),
        ((adapted, 3), RuntimeError, 'value is a Adapter'),
        ((adapted_groups, 3), RuntimeError, 'value is a Sequential'),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        mhsa_to_conv(*arguments)


def test_a_head_that_sees_only_padding():
    layer, _ = conv_to_mhsa(nn.Conv2d(2, 3, 3, padding=1).double())
    with torch.no_grad():
        layer.encoding.center[0] = -20
    assert mhsa_to_conv(layer, 3, size=(1, 1))[1].residual.isfinite().all()
