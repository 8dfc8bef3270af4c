"""Generalized heads mixed along rows and columns: probabilities against the dense ones, the choice, its limits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attncnn_plugin.layers import GeneralizedQuadraticAttention, grid_attention
from attncnn_plugin.layers.low_rank_heads import (
    COST_OF_SMALL,
    TOLERANCE,
    DenseHead,
    LowRankHead,
    ScoredHead,
    cheapest_heads,
)


def set_head(layer, head, center, widths, angle):
    """Σ of standard deviations ``widths`` along two axes that are rotated by ``angle``."""
    rotation = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    with torch.no_grad():
        layer.encoding.center[head] = torch.tensor(center)
        layer.encoding.sqrt_precision[head] = rotation @ torch.diag(1 / torch.tensor(widths))


def probs_of(head, height, width, dtype):
    """P of a head, column by column: what it makes of the images with one pixel set."""
    pixels = height * width
    images = torch.eye(pixels, dtype=dtype).reshape(pixels, height, width, 1)
    return head.mix(images).reshape(pixels, pixels).T


def reference(layer, height, width):
    """P by a softmax over δᵀΣ⁻¹δ written out, in float64."""
    precision = layer.encoding.sqrt_precision.double() @ layer.encoding.sqrt_precision.double().mT
    position = torch.cartesian_prod(torch.arange(height), torch.arange(width)).double()
    shift = position[None] - position[:, None]  # δ = k − q, (q, k, 2)
    offset = shift - layer.encoding.center.double()[:, None, None]
    return (-torch.einsum('hqki,hij,hqkj->hqk', offset, precision, offset) / 2).softmax(-1)


@given(
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(2, 14),
    st.integers(2, 14),
    st.floats(-6, 6),
    st.floats(-6, 6),
    st.floats(0.4, 8),
    st.floats(1, 10),
    st.floats(0, math.pi),
)
def test_probabilities(dtype, height, width, row, column, narrow, ratio, angle):
    layer = GeneralizedQuadraticAttention(1, 1, dtype=dtype).eval()
    set_head(layer, 0, (row, column), (narrow, narrow * ratio), angle)
    expected = reference(layer, height, width)
    for head in cheapest_heads(layer.encoding.shift_scores((height, width)), (height, width), dtype):
        error = (probs_of(head, height, width, dtype)[None] - expected).abs().max()
        # 10 ε for the sums of the mixing, on top of what was measured of the factors.
        assert error <= TOLERANCE[dtype] + 10 * torch.finfo(dtype).eps, type(head)
        if isinstance(head, LowRankHead):
            rank = len(head.rows) // height
            assert COST_OF_SMALL * rank * (height + width) <= height * width


@given(st.integers(3, 14), st.integers(3, 14), st.floats(0.4, 8), st.floats(1, 10), st.floats(0, math.pi))
def test_fewer_terms_are_not_exact_or_more_not_cheaper(height, width, narrow, ratio, angle):
    layer = GeneralizedQuadraticAttention(1, 1)
    set_head(layer, 0, (0.5, -1.0), (narrow, narrow * ratio), angle)
    scores = layer.encoding.shift_scores((height, width)).detach()
    (head,) = cheapest_heads(scores, (height, width), torch.float32)
    is_dense = isinstance(head, DenseHead)
    rest = int(height * width / (COST_OF_SMALL * (height + width))) if is_dense else len(head.rows) // height - 1

    def seen(table):  # by every query, (q, k)
        queries = [(height - 1 - i, width - 1 - j) for i in range(height) for j in range(width)]
        return torch.stack([table[i : i + height, j : j + width].flatten() for i, j in queries])

    full = scores[0].exp()
    left, singular, right = torch.linalg.svd(full)
    for rank in range(1, rest + 1):
        error = seen(full - (left[:, :rank] * singular[:rank]) @ right[:rank]).abs() / seen(full).sum(1, keepdim=True)
        assert error.max() > 0.9 * TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    'center, widths, kind',
    [
        ((1.0, -2.0), (1.0, 1.0), LowRankHead),
        ((0.0, 0.0), (2.0, 2.5), LowRankHead),
        ((60.0, 0.0), (2.0, 2.5), ScoredHead),  # so far outside that G is 0 in float32 for every key of some queries
        ((0.0, 0.0), (0.05, 300.0), DenseHead),  # a stripe one pixel wide: as many terms as pixels
    ],
)
def test_what_is_chosen(center, widths, kind):
    layer = GeneralizedQuadraticAttention(3, 1).eval()
    set_head(layer, 0, center, widths, 0.6)
    (head,) = cheapest_heads(layer.encoding.shift_scores((24, 20)), (24, 20), torch.float32)
    assert type(head) is kind
    error = (probs_of(head, 24, 20, torch.float32)[None] - reference(layer, 24, 20)).abs().max()
    assert error <= 2e-6


@given(
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(0, 2**31),
)
def test_layer_is_the_dense_one(dtype, height, width, batch, seed):
    torch.manual_seed(seed)
    layer = GeneralizedQuadraticAttention(5, 3, out_dim=4, dtype=dtype).eval()
    with torch.no_grad():
        layer.encoding.sqrt_precision.add_(0.3 * torch.randn_like(layer.encoding.sqrt_precision))
    x = torch.randn(batch, height, width, 5, dtype=dtype)
    with torch.no_grad():
        fast = layer(x)
    layer.attn_impl = 'dense'
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert (fast - layer(x)).abs().max() <= tolerance * max(1, fast.abs().max())


@pytest.mark.parametrize('tokens_at_once', [1, 1024])
def test_gradients_of_what_still_learns(tokens_at_once, monkeypatch):
    """With the heads frozen, gradients of the input and of the map go through the fast path, image by image or not."""
    monkeypatch.setattr(grid_attention, 'TOKENS_AT_ONCE', tokens_at_once)
    layer = GeneralizedQuadraticAttention(5, 3, dtype=torch.float64).eval()
    layer.encoding.requires_grad_(False)
    x = torch.randn(2, 24, 20, 5, dtype=torch.float64, requires_grad=True)
    assert any(isinstance(head, LowRankHead) for head in layer._cheapest_heads((24, 20), torch.float64))
    fast = torch.autograd.grad(layer(x).sin().sum(), [x, layer.value.weight, layer.value.bias])
    layer.attn_impl = 'dense'
    dense = torch.autograd.grad(layer(x).sin().sum(), [x, layer.value.weight, layer.value.bias])
    for ours, expected in zip(fast, dense):
        assert (ours - expected).abs().max() <= 1e-10


def test_a_module_in_place_of_the_map_sees_all_images(monkeypatch):
    monkeypatch.setattr(grid_attention, 'TOKENS_AT_ONCE', 1)
    layer = GeneralizedQuadraticAttention(5, 3).eval().requires_grad_(False)
    x, seen = torch.randn(2, 12, 11, 5), []
    expected = layer(x)
    layer.value.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape))
    assert torch.allclose(layer(x), expected, atol=1e-6)
    assert seen == [(2, 12, 11, 15)]


def test_heads_that_learn_have_gradients():
    layer = GeneralizedQuadraticAttention(5, 3).eval()
    layer(torch.randn(1, 12, 12, 5)).sum().backward()
    assert all(p.grad is not None for p in layer.encoding.parameters())


def test_not_a_number_stays_one():
    layer = GeneralizedQuadraticAttention(5, 3).eval()
    nn.init.constant_(layer.encoding.center, float('nan'))
    with torch.no_grad():
        assert layer(torch.randn(1, 12, 12, 5)).isnan().all()


@pytest.mark.parametrize('device, batch', [('meta', 2), ('cpu', 0)])
def test_no_values_to_choose_by_and_no_images(device, batch):
    layer = GeneralizedQuadraticAttention(5, 3, device=device).eval()
    with torch.no_grad():
        assert layer(torch.randn(batch, 16, 16, 5, device=device)).shape == (batch, 16, 16, 5)
