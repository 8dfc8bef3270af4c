"""Convolutions as attention over pixels, against torch's own convolutions."""

import copy

import pytest
import torch
from helpers.convolutions import convolutions, relative_error
from hypothesis import given
from timm.layers import Conv2dSame
from torch import nn

from attncnn_plugin.convert import conv_to_mhsa
from attncnn_plugin.layers import QuadraticAttention


@given(convolutions())
def test_equals_the_convolution(case):
    conv, shape = case
    x = torch.randn(shape, dtype=torch.float64)
    attention = conv_to_mhsa(conv)[0]
    assert attention(x).shape == conv(x).shape
    assert relative_error(attention(x), conv(x)) <= 1e-10
    single = copy.deepcopy(conv).float()
    assert relative_error(conv_to_mhsa(single)[0](x.float()).double(), conv(x)) <= 1e-4
    assert attention.num_heads == len(attention.encoding.center) == conv.weight[0, 0].numel()


@given(convolutions())
def test_is_attention(case):
    """The probabilities, the values and nothing else give the output; a query's probabilities add up to at most 1."""
    conv, shape = case
    x = torch.randn(shape, dtype=torch.float64)
    attention = conv_to_mhsa(conv)[0]
    probs = attention.attention_probs(shape[2:])
    assert probs.min() >= 0 and probs.sum(-1).max() <= 1 + 1e-12
    if conv.padding_mode != 'zeros':
        assert torch.allclose(probs.sum(-1), probs.new_ones(()))
    heads = torch.einsum('hqk,bck->bqhc', probs, x.flatten(2)).flatten(2)
    dense = attention.value(heads).transpose(1, 2).unflatten(2, conv(x).shape[2:])
    assert relative_error(dense, conv(x)) <= 1e-10


@pytest.mark.parametrize('dtype, tolerance', [(torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
def test_half_precision(dtype, tolerance):
    conv = nn.Conv2d(4, 6, 5, padding='same', dilation=3, padding_mode='circular')
    x = torch.randn(2, 4, 40, 30)
    half = conv_to_mhsa(copy.deepcopy(conv).to(dtype))[0]
    assert half.encoding.scores_along(0, torch.zeros(1, 1)).dtype == torch.float32
    output = half(x.to(dtype))
    assert output.dtype == dtype and relative_error(output.float(), conv(x)) < tolerance


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
def test_large_grids_and_kernels(dtype):
    """The maximum is not lost at the far end of the image, nor among 300 shifts, which bfloat16 cannot count to."""
    long = nn.Conv1d(1, 1, 300, padding='same', bias=False)
    with torch.no_grad():
        long.weight.copy_(torch.arange(300.0).sub(150).div(150).reshape(1, 1, 300))
    x = torch.randn(1, 1, 120)
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-6, torch.bfloat16: 4e-2}[dtype]
    assert relative_error(conv_to_mhsa(copy.deepcopy(long).to(dtype))[0](x.to(dtype)).float(), long(x)) < tolerance
    conv = nn.Conv2d(2, 3, 3, padding=1)
    x = torch.randn(1, 2, 64, 80)
    assert relative_error(conv_to_mhsa(copy.deepcopy(conv).to(dtype))[0](x.to(dtype)).float(), conv(x)) < tolerance


def test_images_without_a_batch_and_batches_without_images():
    conv = nn.Conv2d(3, 4, 3)
    x = torch.randn(3, 6, 7)
    for attention in (conv_to_mhsa(conv)[0], conv_to_mhsa(conv, num_heads=9)[0], conv_to_mhsa(conv, num_heads=5)[0]):
        assert attention(x).shape == conv(x).shape and attention(x[None][:0]).shape == (0, 4, 4, 5)
    assert torch.allclose(conv_to_mhsa(conv)[0](x), conv(x), atol=1e-5)


def test_parametrized_convolutions():
    """By their weights as they are."""
    conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    x = torch.randn(1, 3, 6, 7)
    assert torch.allclose(conv_to_mhsa(conv)[0](x), conv(x), atol=1e-5)


def test_soft_heads_are_seen():
    """Too small a width leaves e^−α at the neighbours: what the tests above must find."""
    conv = nn.Conv2d(2, 2, 3, padding=1).double()
    x = torch.randn(1, 2, 8, 8).double()
    attention = conv_to_mhsa(conv)[0]
    with torch.no_grad():
        attention.encoding.sqrt_precision.fill_((2 * 10.0) ** 0.5)  # α = 10
    assert 1e-6 < relative_error(attention(x), conv(x)) < 1e-3


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


def test_trains_like_any_layer():
    conv = nn.Conv2d(2, 3, 3, padding=1).eval()
    attention = conv_to_mhsa(conv)[0]
    assert not attention.training
    x = torch.randn(1, 2, 5, 5)
    (gradient,) = torch.autograd.grad(attention(x).square().sum(), attention.value.weight)
    (expected,) = torch.autograd.grad(conv(x).square().sum(), conv.weight)
    assert torch.allclose(gradient, expected.flatten(2).transpose(1, 2).flatten(1), atol=1e-4)
    other = conv_to_mhsa(nn.Conv2d(2, 3, 3, padding=1))[0]
    other.load_state_dict(attention.state_dict())
    assert torch.equal(other(x), attention(x))


class StandardizedConv2d(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight / weight.std(), bias)


@pytest.mark.parametrize(
    'conv, message',
    [
        (nn.ConvTranspose2d(1, 1, 3), 'conv is a ConvTranspose2d, but only nn.Conv1d'),
        (nn.Linear(1, 1), 'conv is a Linear'),
        (nn.LazyConv2d(1, 3), 'without weights yet'),
        (StandardizedConv2d(1, 1, 3), 'conv is a StandardizedConv2d, whose own _conv_forward can be anything'),
        (Conv2dSame(1, 1, 3, stride=2), 'conv is a Conv2dSame, whose own forward can be anything'),
        (nn.utils.spectral_norm(nn.Conv2d(2, 2, 3)), 'forward hooks, which change what it computes'),
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
