"""Attention over a grid of tokens: outputs and gradients by the equations of C20, dropout, heads, errors."""

import copy
import itertools

import pytest
import torch
from helpers.layers import TOKENS
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from attncnn_plugin.attention import ContentAttention, QuadraticAttention

POSITION_ONLY = [kind for kind in TOKENS if 'content' not in kind]


def output_by_equation(layer, x, probs):
    """concat_h(P_h X) W + b (C20, eq. 1–3) head by head, of P ``(B or 1, N_h, H*W, H*W)``."""
    tokens = x.flatten(1, 2)
    heads = torch.cat([probs[:, h] @ tokens for h in range(layer.num_heads)], dim=-1)
    return (heads @ layer.value.weight.T + layer.value.bias).unflatten(1, x.shape[1:3])


@given(
    st.sampled_from(POSITION_ONLY),
    st.sampled_from([torch.float64, torch.float32]),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.floats(0.1, 30),
    st.floats(0, 40),
    st.integers(0, 2**31),
)
def test_position_only(kind, dtype, height, width, num_heads, batch, spread, sharpness, seed):
    """The probabilities are compared with the equations in ``test_positions.py``."""
    torch.manual_seed(seed)
    layer = TOKENS[kind](8, num_heads, dtype=dtype)
    if kind == 'quadratic':
        with torch.no_grad():
            layer.encoding.center.mul_(spread)
            layer.encoding.sqrt_precision.mul_(sharpness)
    x = torch.randn(batch, height, width, 8, dtype=dtype, requires_grad=True)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5

    output, expected = layer(x), output_by_equation(layer, x, layer.attention_probs((height, width))[None])
    assert (output - expected).abs().max() <= tolerance
    gradients, references = (torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()]) for y in (output, expected))
    for gradient, reference in zip(gradients, references):
        assert (gradient - reference).abs().max() <= 10 * tolerance * max(1, reference.abs().max())


def scores_by_equation(layer, x):
    """Eq. 8 by content and by position, one query and one key at a time, ``(B, N_h, H*W, H*W)`` each, in float64."""
    layer, x = copy.deepcopy(layer).double(), x.double()
    batch, height, width, dim = x.shape
    pixels = list(itertools.product(range(height), range(width)))
    by_content, by_position = (x.new_zeros(batch, layer.num_heads, len(pixels), len(pixels)) for _ in range(2))
    for h in range(layer.num_heads):
        part = slice(h * dim, (h + 1) * dim)
        for (q, (q1, q2)), (k, (k1, k2)) in itertools.product(enumerate(pixels), repeat=2):
            query = x[:, q1, q2] @ layer.query.weight[part].T + layer.query.bias[part]
            key = x[:, k1, k2] @ layer.key.weight[part].T + layer.key.bias[part]
            by_content[:, h, q, k] = (query * key).sum(-1) / dim**0.5
            rows, columns = (
                table[shift + len(table) // 2]  # shift 0 is in the middle
                for table, shift in ((layer.tables.row_table, k1 - q1), (layer.tables.column_table, k2 - q2))
            )
            by_position[:, h, q, k] = query @ torch.cat([rows, columns]) / dim**0.5
    return by_content, by_position


@given(
    st.sampled_from([torch.float64, torch.float32]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(0, 2**31),
)
def test_content(dtype, height, width, batch, seed):
    torch.manual_seed(seed)
    layer = ContentAttention(4, 2, (5, 4), dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    x = torch.randn(batch, height, width, 4, dtype=dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    with torch.no_grad():
        parts = scores_by_equation(layer, x)
        for scores, expected in (
            (layer.attention_scores(x), sum(parts)),
            (layer.content_scores(x), parts[0]),
            (layer.position_scores(x), parts[1]),
        ):
            assert scores.shape == expected.shape
            assert (scores.softmax(-1) - expected.softmax(-1)).abs().max() <= 10 * tolerance
        assert layer.position_probs((height, width)) is None and not layer.has_position_scores
        output = output_by_equation(copy.deepcopy(layer).double(), x.double(), sum(parts).softmax(-1))
        assert (layer(x) - output).abs().max() <= 20 * tolerance


@pytest.mark.parametrize('kind', TOKENS)
@pytest.mark.parametrize('size', [(3, 2), (1, 3)])
def test_gradients(kind, size):
    layer = TOKENS[kind](4, 2, dtype=torch.float64)
    x = torch.randn(2, *size, 4, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters())

    def run(x, *values):
        return functional_call(layer, dict(zip(names, values)), x)

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=x.numel() > 32)
    # None may be unused, b_k neither, which changes nothing: training on several devices waits for each gradient.
    torch.autograd.grad(layer(x).sum(), parameters)


@pytest.mark.parametrize('kind', ['quadratic', 'content'])
def test_attention_dropout_drops_probabilities(kind):
    layer = TOKENS[kind](4, 2, attn_drop=0.5, dtype=torch.float64)
    x = torch.randn(1, 3, 3, 4, dtype=torch.float64)
    mean = torch.stack([layer(x) for _ in range(500)]).mean(0)
    assert not torch.equal(layer(x), layer(x))
    assert torch.allclose(mean, layer.eval()(x), atol=0.08)


def test_scores_stay_float32_under_autocast():
    """The projections are autocast's own; what is made of them is not rounded any further."""
    layer, x = ContentAttention(8, 3), torch.randn(2, 6, 7, 8)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        scores, query, key = layer.attention_scores(x), layer.query(x), layer.key(x)
    assert scores.dtype == torch.float32 and query.dtype == torch.bfloat16
    layer.query.register_forward_hook(lambda *_: query.float())
    layer.key.register_forward_hook(lambda *_: key.float())
    assert torch.allclose(scores, layer.attention_scores(x), atol=1e-5)


@pytest.mark.parametrize('kind', TOKENS)
def test_value_matrices(kind):
    layer = TOKENS[kind](8, 3, dtype=torch.float64)
    layer.value = nn.Linear(24, 5).double()
    x = torch.randn(2, 4, 3, 8, dtype=torch.float64)
    probs = layer.attention_scores(x).softmax(-1) if layer.depends_on_content else layer.attention_probs((4, 3))[None]
    probs, matrices = probs.expand(2, -1, -1, -1), layer.value_matrices()
    assert matrices.shape == (3, 5, 8)
    output = torch.einsum('bhqk,bkd,hod->bqo', probs, x.flatten(1, 2), matrices) + layer.value.bias
    assert (layer(x).flatten(1, 2) - output).abs().max() <= 1e-12
    layer.value = nn.Sequential(layer.value)
    with pytest.raises(RuntimeError, match='value is a Sequential'):
        layer.value_matrices()


def test_shapes_of_the_released_code():
    """Of C20's network with content: 200 and 200 channels of r_δ for 400 of a token, and biases."""
    layer = ContentAttention(400, 9, device='meta')
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        'query.weight': (3600, 400),
        'query.bias': (3600,),
        'key.weight': (3600, 400),
        'key.bias': (3600,),
        'tables.row_table': (31, 200),
        'tables.column_table': (31, 200),
        'value.weight': (400, 3600),
        'value.bias': (400,),
    }


@pytest.mark.parametrize(
    'make, message',
    [
        (lambda: QuadraticAttention(4, 0), 'num_heads=0'),
        (lambda: ContentAttention(5, 2), 'dim=5 must be even'),
        (lambda: ContentAttention(4, 2).attention_probs((3, 3)), 'dim=4, num_heads=2.* depend on the input'),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
