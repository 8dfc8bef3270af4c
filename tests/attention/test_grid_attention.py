"""Position-only layers: outputs and gradients by the equation, dropout, precision, hooks, errors."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import functional_call

from attncnn_plugin.attention import (
    ContentAttention,
    GeneralizedQuadraticAttention,
    LearnedAttention,
    QuadraticAttention,
)

LAYERS = {
    'quadratic': QuadraticAttention,
    'generalized': GeneralizedQuadraticAttention,
    'learned': LearnedAttention,
    'sinusoidal': lambda *args, **kwargs: LearnedAttention(*args, position='relative_sinusoidal', **kwargs),
    'vr': lambda *args, **kwargs: ContentAttention(*args, terms=('vr',), **kwargs),
}

sizes = st.integers(1, 9)


def attention_by_equation(layer, x):
    """concat_h(P_h X) W + b (C20, eq. 1–3) head by head."""
    batch, height, width, _ = x.shape
    probs = layer.attention_probs((height, width))
    heads = [(p @ x.flatten(1, 2)) for p in probs]
    return (torch.cat(heads, dim=-1) @ layer.value.weight.T + layer.value.bias).reshape(batch, height, width, -1)


@given(
    st.sampled_from(list(LAYERS)),
    st.sampled_from([torch.float64, torch.float32]),
    sizes,
    sizes,
    st.integers(1, 4),
    st.integers(1, 3),
    st.floats(0.1, 30),
    st.floats(0, 40),
    st.integers(0, 2**31),
)
def test_outputs_and_gradients(kind, dtype, height, width, num_heads, batch, spread, sharpness, seed):
    torch.manual_seed(seed)
    layer = LAYERS[kind](8, num_heads, out_dim=5, dtype=dtype)
    if kind == 'quadratic':
        with torch.no_grad():
            layer.encoding.center.mul_(spread)
            layer.encoding.sqrt_precision.mul_(sharpness)
    x = torch.randn(batch, height, width, 8, dtype=dtype, requires_grad=True)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5

    output, expected = layer(x), attention_by_equation(layer, x)
    assert (output - expected).abs().max() <= tolerance
    gradients, references = (torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()]) for y in (output, expected))
    for gradient, reference in zip(gradients, references):
        assert (gradient - reference).abs().max() <= 10 * tolerance * max(1, reference.abs().max())


@pytest.mark.parametrize('kind', LAYERS)
@pytest.mark.parametrize('size', [(3, 2), (1, 4)])
def test_gradients(kind, size):
    layer = LAYERS[kind](4, 2, dtype=torch.float64)
    x = torch.randn(2, *size, 4, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters())

    def run(x, *values):
        return functional_call(layer, dict(zip(names, values)), x)

    assert torch.autograd.gradcheck(run, (x, *parameters))


def test_attention_dropout_drops_probabilities():
    layer = QuadraticAttention(3, 2, attn_drop=0.5, bias=False, dtype=torch.float64)
    x = torch.randn(1, 4, 4, 3, dtype=torch.float64)
    mean = torch.stack([layer(x) for _ in range(4000)]).mean(0)
    assert not torch.equal(layer(x), layer(x))
    assert torch.allclose(mean, layer.eval()(x), atol=0.05)


@pytest.mark.parametrize('kind', LAYERS)
def test_scores_stay_float32_under_autocast(kind):
    layer = LAYERS[kind](8, 3)
    expected = layer.attention_probs((6, 7))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        probs = layer.attention_probs((6, 7))
        output = layer(torch.randn(2, 6, 7, 8))
    assert probs.dtype == torch.float32 and torch.equal(probs, expected)
    assert output.dtype == torch.bfloat16


@pytest.mark.parametrize('kind', LAYERS)
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_layers(kind, dtype):
    layer = LAYERS[kind](8, 3).to(dtype)
    assert layer.attention_probs((6, 7)).dtype == torch.float32
    x = torch.randn(2, 6, 7, 8)
    output = layer(x.to(dtype))
    assert output.dtype == dtype
    assert torch.allclose(output.float(), layer.float()(x), atol=0.05)


@pytest.mark.parametrize('kind', LAYERS)
def test_copies(kind):
    layer = LAYERS[kind](8, 3)
    x = torch.randn(2, 5, 4, 8)
    other = LAYERS[kind](8, 3)
    other.load_state_dict(layer.state_dict())
    for copied in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied(x), layer(x))


@pytest.mark.parametrize('kind', LAYERS)
def test_meta_device(kind):
    layer = LAYERS[kind](8, 3, device='meta')
    assert all(p.device.type == 'meta' for p in layer.parameters())
    assert layer(torch.randn(2, 5, 4, 8, device='meta')).shape == (2, 5, 4, 8)


@pytest.mark.parametrize(
    'make, message',
    [
        (lambda: QuadraticAttention(4, 0), 'num_heads=0'),
        (lambda: QuadraticAttention(4, 2, attn_drop=1.5), '1.5'),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
