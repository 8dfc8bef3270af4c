"""Rows, then columns, then the map of the heads, as one function: derivatives, and maps that are more than a weight."""

import pytest
import torch
from helpers.adapter import Adapter
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import parametrizations

from attncnn_plugin.layers import GeneralizedQuadraticAttention, QuadraticAttention
from attncnn_plugin.layers.linear import LinearMap
from attncnn_plugin.layers.separable import attend_separable


def inputs(batch=2, height=3, width=4, heads=2, dim=3, out_dim=2, dtype=torch.float64):
    shapes = [
        (batch, height, width, dim),
        (heads, height, height),
        (heads, width, width),
        (out_dim, heads * dim),
        (out_dim,),
    ]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def attend(x, rows, columns, weight, bias=None):
    return attend_separable(x, rows, columns, LinearMap(weight, bias))


def by_einsum(x, rows, columns, weight, bias):
    """Σ_h Σ_k1 Σ_k2 P1 P2 X V + b at once."""
    value = weight.unflatten(1, (len(rows), -1))
    return torch.einsum('hik,hjl,bkld,ohd->bijo', rows, columns, x, value) + bias


@given(st.sampled_from([torch.float64, torch.float32]), *[st.integers(1, 5)] * 6, st.integers(0, 2**31))
def test_by_the_equation(dtype, batch, height, width, heads, dim, out_dim, seed):
    torch.manual_seed(seed)
    tensors = inputs(batch, height, width, heads, dim, out_dim, dtype)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    output, expected = attend(*tensors), by_einsum(*tensors)
    scale = max(1, expected.abs().max())
    assert (output - expected).abs().max() <= tolerance * scale
    with torch.no_grad():
        assert (attend(*tensors) - expected).abs().max() <= tolerance * scale
    weight = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad((result * weight).sum(), tensors) for result in (output, expected))
    for gradient, reference in zip(ours, theirs):
        assert (gradient - reference).abs().max() <= 10 * tolerance * max(1, reference.abs().max())


def test_second_derivatives():
    tensors = inputs()
    assert torch.autograd.gradcheck(attend, tensors)
    assert torch.autograd.gradgradcheck(attend, tensors)


def test_without_a_bias_and_with_few_gradients():
    x, rows, columns, weight, bias = inputs()
    for needed in ([x], [rows], [weight], [x, columns]):
        tensors = [t if any(t is n for n in needed) else t.detach() for t in (x, rows, columns, weight)]
        ours = torch.autograd.grad(attend(*tensors).sin().sum(), needed)
        theirs = torch.autograd.grad(by_einsum(*tensors, 0 * bias.detach()).sin().sum(), needed)
        for gradient, reference in zip(ours, theirs):
            assert (gradient - reference).abs().max() <= 1e-12


def test_autocast():
    tensors = inputs(dim=32, dtype=torch.float32)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        output = attend(*tensors)
    assert output.dtype == torch.bfloat16
    assert torch.allclose(output.float(), by_einsum(*tensors), atol=0.05 * by_einsum(*tensors).abs().max().item())
    output.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 and t.grad.isfinite().all() for t in tensors)


@pytest.mark.parametrize('kind', [QuadraticAttention, GeneralizedQuadraticAttention])
@pytest.mark.parametrize('wrap', [Adapter, parametrizations.weight_norm])
def test_what_stands_in_for_the_map_is_called(kind, wrap):
    layer = kind(4, 3).eval()
    layer.value = wrap(layer.value)
    x = torch.randn(2, 9, 8, 4)
    with torch.no_grad():
        fast = layer(x)
        layer.attn_impl = 'dense'
        assert torch.allclose(fast, layer(x), atol=1e-5)


@pytest.mark.parametrize('kind', [QuadraticAttention, GeneralizedQuadraticAttention])
def test_hooks_of_the_map_see_the_heads(kind):
    layer = kind(4, 3).eval()
    seen = []
    layer.value.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.randn(2, 9, 8, 4)
    with torch.no_grad():
        layer(x)
        layer.attn_impl = 'dense'
        layer(x)
    assert seen[0].shape == (2, 9, 8, 12) and torch.allclose(seen[0], seen[1], atol=1e-5)


def test_only_the_input_is_kept_for_the_backward_pass():
    layer = QuadraticAttention(16, 9)
    x = torch.randn(2, 8, 8, 16, requires_grad=True)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        layer(x)
    assert sum(size >= x.numel() for size in sizes) <= 2  # x, and the weight of the map


def test_float64_stays_float64_under_autocast():
    tensors = inputs()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert (attend(*tensors) - by_einsum(*tensors)).abs().max() <= 1e-10


def test_gradients_of_single_images():
    x, *others = inputs(batch=3)
    gradient = torch.func.grad(lambda image: attend(image[None], *others).sin().sum())
    expected = torch.autograd.grad(by_einsum(x, *others).sin().sum(), x)[0]
    assert (torch.func.vmap(gradient)(x) - expected).abs().max() <= 1e-10


@pytest.mark.filterwarnings('ignore')
def test_traced():
    layer = QuadraticAttention(4, 3)
    x = torch.randn(2, 9, 8, 4)
    assert torch.allclose(torch.jit.trace(layer, x)(x), layer(x), atol=1e-6)


def test_a_backward_hook_and_a_forward_of_its_own_are_called():
    layer = QuadraticAttention(4, 3)
    x = torch.randn(2, 9, 8, 4)
    seen = []
    layer.value.register_full_backward_hook(lambda *args: seen.append(args))
    layer(x).sum().backward()
    assert seen
    layer = QuadraticAttention(4, 3)
    layer.value.forward = torch.zeros_like
    assert not layer(x).any()
