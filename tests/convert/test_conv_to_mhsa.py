"""Convolutions as attention over pixels, against torch's own convolutions."""

import copy
import dataclasses
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.convolutions import convolutions, joined, relative_error
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import Conv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d
from timm.layers.std_conv import StdConv2dSame
from torch import nn

from attncnn_plugin.attention import QuadraticAttention
from attncnn_plugin.convert import conv_to_mhsa, mhsa_to_conv


@given(convolutions())
def test_is_attention_and_equals_the_convolution(case):
    """The probabilities, the values and nothing else give the output; a query's probabilities add up to at most 1."""
    conv, shape = case
    x = torch.randn(shape, dtype=torch.float64)
    attention, expected = conv_to_mhsa(conv)[0], conv(x)
    assert attention(x).shape == expected.shape and relative_error(attention(x), expected) <= 1e-10
    single = conv_to_mhsa(copy.deepcopy(conv).float())[0]
    assert relative_error(single(x.float()).double(), expected) <= 1e-4
    assert attention.num_heads == len(attention.encoding.center) == conv.weight[0, 0].numel()
    probs = attention.attention_probs(shape[2:])
    assert probs.min() >= 0 and probs.sum(-1).max() <= 1 + 1e-12
    if conv.padding_mode != 'zeros':
        assert torch.allclose(probs.sum(-1), probs.new_ones(()))
    assert relative_error(joined(attention, probs, x), expected.flatten(2)) <= 1e-10
    soft = conv_to_mhsa(conv, alpha=0.5)[0]
    dense = joined(soft, soft.attention_probs(shape[2:]), x)
    assert relative_error(soft(x).flatten(2), dense) <= 1e-10


@pytest.mark.parametrize(
    'dtype, tolerance', [(torch.float32, 1e-4), (torch.float64, 1e-6), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)]
)
def test_large_grids_and_kernels(dtype, tolerance):
    """The maximum is not lost at the far end of the image, nor among 300 shifts, which bfloat16 cannot count to."""
    long = nn.Conv1d(1, 1, 300, padding='same', bias=False)
    with torch.no_grad():
        long.weight.copy_(torch.arange(300.0).sub(150).div(150).reshape(1, 1, 300))
    x = torch.randn(1, 1, 120)
    assert relative_error(conv_to_mhsa(copy.deepcopy(long).to(dtype))[0](x.to(dtype)).float(), long(x)) < tolerance
    conv = nn.Conv2d(2, 3, 3, padding=1)
    x = torch.randn(1, 2, 64, 80)
    assert relative_error(conv_to_mhsa(copy.deepcopy(conv).to(dtype))[0](x.to(dtype)).float(), conv(x)) < tolerance


def test_images_without_a_batch_and_batches_without_images():
    conv = nn.Conv2d(3, 4, 3)
    x = torch.randn(3, 6, 7)
    for attention in (conv_to_mhsa(conv)[0], conv_to_mhsa(conv, position='table')[0]):
        assert attention(x).shape == conv(x).shape and attention(x[None][:0]).shape == (0, 4, 4, 5)
    assert torch.allclose(conv_to_mhsa(conv)[0](x), conv(x), atol=1e-5)


def eq_9(conv, size, alpha):
    """C20's eq. 9 for a head at each position of an unpadded convolution: its probabilities, and the hard shifts."""
    pixels = torch.tensor(list(itertools.product(*map(range, size))))
    extents = [d * (k - 1) + 1 for d, k in zip(conv.dilation, conv.kernel_size)]
    first = torch.tensor(
        list(itertools.product(*[range(0, n - e + 1, s) for n, e, s in zip(size, extents, conv.stride)]))
    )
    probs = []
    for position in itertools.product(*map(range, conv.kernel_size)):
        target = first + torch.tensor(position) * torch.tensor(conv.dilation)
        distance = (pixels - target[:, None]).square().sum(-1).double()
        probs.append(torch.stack([torch.exp(-alpha * distance), (distance == 0).double()]))
    probs, shifts = torch.stack(probs, dim=1)
    return probs / probs.sum(-1, keepdim=True), shifts


@given(convolutions(ndims=(1, 2)), st.sampled_from([0.2, 1.0, 6.0, 46.0]))
def test_heads_of_a_given_width(case, alpha):
    """The layer is eq. 9's, and no probability is further from the convolution's than the report says."""
    conv, shape = case
    x = torch.randn(shape, dtype=torch.float64)
    attention, report = conv_to_mhsa(conv, alpha=alpha)
    assert torch.allclose(attention.encoding.sqrt_precision.square() / 2, torch.tensor(alpha).double())
    amounts = [n for pair in reversed(attention.window.padding) for n in pair]
    padded = F.pad(x, amounts, mode={'zeros': 'constant'}.get(conv.padding_mode, conv.padding_mode))
    probs, shifts = eq_9(conv, padded.shape[2:], alpha)
    dense = torch.zeros(len(probs), conv.out_channels, conv.in_channels, dtype=torch.float64)
    each = conv.in_channels // conv.groups
    for o in range(conv.out_channels):
        group = o // (conv.out_channels // conv.groups)
        dense[:, o, group * each : (group + 1) * each] = conv.weight[o].detach().flatten(1).T
    output = torch.einsum('hqk,hoi,bik->boq', probs, dense, padded.flatten(2))
    if conv.bias is not None:
        output = output + conv.bias[:, None]
    assert relative_error(attention(x).flatten(2), output) <= 1e-10
    assert (probs - shifts).abs().max() <= report.deviation * (1 + 1e-9)


@pytest.mark.parametrize('groups, scale', [(1, 1e-200), (2, 1e200)])
def test_errors_are_relative(groups, scale):
    """To the kernel, whatever its scale: the reported one, and the bound of the way back."""
    conv = nn.Conv2d(4, 6, (3, 2), groups=groups, dtype=torch.float64)
    unscaled = conv_to_mhsa(conv, alpha=3)
    conv.weight.data *= scale
    scaled = conv_to_mhsa(conv, alpha=3)
    assert scaled[1].relative_error == pytest.approx(unscaled[1].relative_error, rel=1e-12)
    bounds = [mhsa_to_conv(layer, (3, 2))[1].bound for layer, _ in (unscaled, scaled)]
    assert bounds[1] / scale == pytest.approx(bounds[0], rel=1e-12)


def test_kernel_of_zeros():
    conv, x = nn.Conv2d(2, 3, 3), torch.randn(1, 2, 5, 5)
    nn.init.zeros_(conv.weight)
    attention, report = conv_to_mhsa(conv)
    assert str(conv_to_mhsa(nn.Conv2d(2, 3, 3))[1]) == str(report) == 'error 0'
    assert dataclasses.astuple(report) == (0.0, 0.0)
    torch.testing.assert_close(attention(x), conv(x))


@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_weights_that_are_not_finite(value):
    conv = nn.Conv2d(1, 1, 3)
    conv.weight.data[0, 0, 1, 1] = value
    with pytest.raises(ValueError, match='not finite'):
        conv_to_mhsa(conv)


def test_table_of_the_documentation():
    """Shares of other pixels and relative errors of every α, to the digits given."""
    page = (Path(__file__).parents[2] / 'docs/convert.md').read_text()
    rows = re.findall(r'^\| ([\d.]+)(?: \(.*?\))? \| (\S+) \| (\S+) \| [\d.]+, [\d.]+ \|$', page, re.MULTILINE)
    assert len(rows) == 6
    conv = nn.Conv2d(16, 16, 3, padding=1)
    for alpha, share, error in rows:
        report = conv_to_mhsa(conv, alpha=float(alpha))[1]
        assert [report.deviation, report.relative_error] == pytest.approx([float(share), float(error)], rel=0.15), alpha


@pytest.mark.parametrize('alpha', [0.5, 6.0, 46.0])
@pytest.mark.parametrize('options', [{}, dict(groups=2), dict(dilation=(1, 2), kernel_size=(2, 3))])
def test_reported_errors_are_reached(alpha, options):
    """In the middle of a large image, and not exceeded at its border, where fewer pixels share the attention."""
    options = {'kernel_size': 3, **options}
    conv = nn.Conv2d(2, 4, padding='same', bias=False, dtype=torch.float64, **options)
    attention, report = conv_to_mhsa(conv, alpha=alpha)
    impulses = torch.zeros(2, 2, 31, 31, dtype=torch.float64)
    impulses[[0, 1], [0, 1], 15, 15] = 1  # the answers are the kernels
    error = relative_error(attention(impulses), conv(impulses)).item()
    assert error == pytest.approx(report.relative_error, rel=1e-6, abs=1e-15)
    probs, shifts = eq_9(conv, (21, 21), alpha)
    others = (probs * (1 - shifts)).sum(-1)  # 1 − P[q, q + Δ], which would cancel
    assert others.max().item() == pytest.approx(report.deviation, rel=1e-6)
    if alpha == 46:
        assert math.exp(-46) < report.deviation < 5 * math.exp(-46)
    assert others[:, 0].max() <= report.deviation * (1 + 1e-9)


@pytest.mark.parametrize('alpha', [0.5, 6.0])
def test_reported_errors_with_a_gate(alpha):
    """What a head gives by content is lost: its own pixel has the gate's share of the probability by position."""
    conv = nn.Conv2d(2, 4, 3, padding=1, bias=False, dtype=torch.float64)
    attention, report = conv_to_mhsa(conv, alpha=alpha, content='gated')
    probs, shifts = eq_9(conv, (31, 31), alpha)
    shifts, probs = shifts[:, 480], probs[:, 480] * attention.gate[0].sigmoid()  # of the pixel in the middle
    assert ((1 - probs) * shifts).sum(-1).max().item() == pytest.approx(report.deviation, rel=1e-6)
    difference = (probs - shifts).T @ conv.weight.flatten(2).flatten(0, 1).T  # of the kernels, as large as the image
    assert (difference.norm() / conv.weight.norm()).item() == pytest.approx(report.relative_error, rel=1e-6)


def test_soft_heads_learn_where_to_look_and_hard_ones_do_not():
    conv = nn.Conv2d(2, 2, 3, padding=1)
    x = torch.randn(1, 2, 8, 8)
    for alpha, learns in ((None, False), (6, True)):
        attention, report = conv_to_mhsa(conv, alpha=alpha)
        loss = attention(x).square().sum()
        center, width = torch.autograd.grad(loss, [attention.encoding.center, attention.encoding.sqrt_precision])
        for gradient in (center, width):
            assert (gradient != 0).all() if learns else (gradient == 0).all()
        assert (report.relative_error > 1e-3) == learns


def test_construction_of_the_paper_fails_at_the_border():
    """C20's heads on the image itself, without its padding: zeros there become the nearest pixels."""
    conv = nn.Conv2d(2, 2, 3, padding=1).double()
    attention = conv_to_mhsa(conv)[0]
    literal = QuadraticAttention(2, 9, dtype=torch.float64)
    literal.encoding.load_state_dict(attention.encoding.state_dict())
    literal.value.load_state_dict(attention.value.state_dict())
    x = torch.randn(1, 2, 6, 6).double()
    output = literal(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    error = (output - conv(x)).abs()
    assert error[..., 1:-1, 1:-1].max() < 1e-12
    assert error[..., 0, :].max() > 1e-2 and error[..., :, -1].max() > 1e-2
    # That is replicate padding, exactly.
    conv.padding_mode = 'replicate'
    conv._reversed_padding_repeated_twice = [1] * 4
    assert relative_error(output, conv(x)) < 1e-12


@pytest.mark.parametrize('kind', [StdConv2d, StdConv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, Conv2dSame])
@pytest.mark.parametrize('stride, groups, bias', [(1, 1, True), (2, 2, False), (3, 4, True)])
@pytest.mark.parametrize('content', [None, 'additive', 'gated'])
def test_convolutions_of_timm(kind, stride, groups, bias, content):
    """Padding by the image's size, and standardized weights."""
    conv = kind(4, 8, 3, stride=stride, dilation=2, groups=groups, bias=bias).double()
    if hasattr(conv, 'gain'):
        nn.init.normal_(conv.gain)
    attention, report = conv_to_mhsa(conv, content=content)
    assert report.relative_error == 0
    for size in ((9, 12), (10, 11)):
        x = torch.randn(2, 4, *size).double()
        assert relative_error(attention(x), conv(x)) <= 1e-10


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(alpha='hard'), "alpha='hard' must be a number from 0.1 to 1e\\+06"),
        (dict(alpha=True), 'alpha=True must be'),
        (dict(alpha=0), 'alpha=0 must be'),
        (dict(alpha=math.nan), 'alpha=nan must be'),
        (dict(alpha=1e9), 'alpha=1000000000.0 must be'),
        (dict(content='both'), r"content='both' is unknown: choose one of \(None, 'additive', 'gated'\)"),
        (dict(position='table', content='gated'), "position='table' is for attention without content"),
        (dict(position='learned'), r"position='learned' is unknown: choose one of \('gaussian', 'table'\)"),
        (dict(window_size=3), "window_size=3 is for attention by content: add content='additive'"),
        (dict(qk_dim=3), 'qk_dim=3 is for attention by content'),
        (dict(content='gated', qk_dim=0), 'qk_dim=0 must be a number of channels, at least 1'),
        (dict(content='gated', qk_dim=2.5), 'qk_dim=2.5 must be a number of channels'),
        (dict(content='gated', window_size=4), r'window_size=4 must be odd, and at least \(5, 5\) for the shifts'),
        (dict(content='gated', window_size=3), r'window_size=3 must be odd, and at least \(5, 5\) for the shifts'),
        (dict(content='gated', window_size=(5, 5, 5)), r'window_size=\(5, 5, 5\) must be a positive integer, or one'),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        conv_to_mhsa(nn.Conv2d(1, 1, 3, dilation=2), **options)


def test_a_table_for_each_position():
    """With a head for each kernel position, a table is those of heads of the same width."""
    conv, x = nn.Conv2d(3, 4, 3, padding=1).double(), torch.randn(1, 3, 8, 8).double()
    attention, report = conv_to_mhsa(conv, position='table')
    assert report.relative_error == 0 and relative_error(attention(x), conv(x)) <= 1e-10
    soft, report = conv_to_mhsa(conv, position='table', alpha=2)
    assert 0.3 < report.deviation < 0.4 and relative_error(soft(x), conv(x)) > 1e-3
    neighbours = conv_to_mhsa(conv, content='additive', alpha=2, window_size=3)[0]
    inside = (..., slice(1, -1), slice(1, -1))  # a head of the table sees the 3x3 window alone
    assert torch.allclose(soft(x)[inside], neighbours(x)[inside])


def test_what_is_kept():
    """Frozen layers stay frozen, and W^K is drawn from the generator that is given."""
    conv = nn.Conv2d(2, 2, 3).requires_grad_(False).eval()
    attention = conv_to_mhsa(conv, content='gated', generator=torch.Generator().manual_seed(3))[0]
    assert not attention.training and not any(parameter.requires_grad for parameter in attention.parameters())
    again = conv_to_mhsa(conv, content='gated', generator=torch.Generator().manual_seed(3))[0]
    assert torch.equal(attention.key.weight, again.key.weight) and attention.key.weight.std() > 0.1


@pytest.mark.parametrize(
    'conv, message',
    [
        (nn.ConvTranspose2d(1, 1, 3), 'conv is a ConvTranspose2d, but only nn.Conv1d'),
        (nn.Linear(1, 1), 'conv is a Linear'),
        (nn.LazyConv2d(1, 3), 'without weights yet'),
        (nn.utils.spectral_norm(StdConv2d(2, 2, 3)), 'with forward hooks, such as old-style weight normalization'),
        (nn.utils.spectral_norm(nn.Conv2d(2, 2, 3)), 'with forward hooks, such as old-style weight normalization'),
        (nn.Conv2d(1, 1, 3, dtype=torch.complex64), 'torch.complex64, but attention needs real'),
    ],
)
def test_what_cannot_be_converted(conv, message):
    with pytest.raises(TypeError, match=message):
        conv_to_mhsa(conv)


def test_wrong_images():
    attention = conv_to_mhsa(nn.Conv2d(3, 1, 3))[0]
    with pytest.raises(ValueError, match=r'shape \(1, 4, 8, 8\), but 3 channels and 2 axes'):
        attention(torch.zeros(1, 4, 8, 8))
    with pytest.raises(ValueError, match=r'2 pixels along axis 0, padded by 0 and 0, is smaller than the window of 3'):
        attention(torch.zeros(1, 3, 2, 8))


def test_no_padding_where_windows_are_smaller_than_the_stride():
    conv, x = Conv2dSame(3, 4, 2, stride=3), torch.randn(2, 3, 9, 8)
    assert relative_error(conv_to_mhsa(conv)[0](x), conv(x)) < 1e-6


@pytest.mark.parametrize('channels, qk_dim', [(2, 8), (90, 10)])
def test_queries_have_their_share_of_the_channels(channels, qk_dim):
    assert conv_to_mhsa(nn.Conv2d(channels, 2, 3), content='additive')[0].qk_dim == qk_dim
