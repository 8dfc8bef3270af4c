"""Content with quadratic positions (C20, eq. 8 with the r_δ of eq. 9 and 19), written out."""

import copy
import itertools
import math
import pickle
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import functional_call

from attncnn_plugin.analysis import attention_maps, head_centers
from attncnn_plugin.attention import ContentAttention, GeneralizedQuadraticAttention, QuadraticAttention

KINDS = ['relative_quadratic', 'relative_generalized']


def v_times_r(layer, head, d1, d2):
    """v·r_δ of a head, from its parameters, in Python's floats."""
    encoding = layer.encoding
    e1, e2 = d1 - encoding.center[head, 0].item(), d2 - encoding.center[head, 1].item()
    if layer.position == 'relative_quadratic':
        return -(encoding.sqrt_precision[head].item() ** 2) / 2 * (e1**2 + e2**2)
    (a, b), (c, d) = encoding.sqrt_precision[head].tolist()
    return -((a * e1 + c * e2) ** 2 + (b * e1 + d * e2) ** 2) / 2


def parts_by_equation(layer, x):
    """The scores by content and those by position, ``(B, N_h, H*W, H*W)`` each, one query and one key at a time."""
    layer, x = copy.deepcopy(layer).double(), x.double()
    batch, height, width, _ = x.shape
    pixels = list(itertools.product(range(height), range(width)))
    content, position = (x.new_zeros(batch, layer.num_heads, len(pixels), len(pixels)) for _ in range(2))
    size = layer.qk_dim
    for h in range(layer.num_heads):
        part = slice(h * size, (h + 1) * size)
        for (q, (q1, q2)), (k, (k1, k2)) in itertools.product(enumerate(pixels), repeat=2):
            key = x[:, k1, k2] @ layer.key.weight[part].T + layer.key.bias[part]
            if 'qk' in layer.terms:
                query = x[:, q1, q2] @ layer.query.weight[part].T + layer.query.bias[part]
                content[:, h, q, k] += (query * key).sum(-1) / math.sqrt(size)
            if 'uk' in layer.terms:
                content[:, h, q, k] += key @ layer.key_bias[h] / math.sqrt(size)
            if layer.encoding is not None:
                position[:, h, q, k] = v_times_r(layer, h, k1 - q1, k2 - q2)
            else:
                rows, columns = layer.tables.row_table, layer.tables.column_table
                r = torch.cat([rows[k1 - q1 + len(rows) // 2], columns[k2 - q2 + len(columns) // 2]])
                position[:, h, q, k] = layer.position_bias[h] @ r
    return content, position


def probs_by_equation(layer, x):
    return sum(parts_by_equation(layer, x)).softmax(-1)


def output_by_equation(layer, x):
    probs, tokens = probs_by_equation(layer, x), x.double().flatten(1, 2)
    heads = []
    for h in range(layer.num_heads):
        values = tokens
        if layer.value_proj is not None:
            values = tokens @ layer.value_proj.weight.double()[h * layer.head_dim : (h + 1) * layer.head_dim].T
        heads.append(probs[:, h] @ values)
    value = copy.deepcopy(layer.value).double()
    return value(torch.cat(heads, dim=-1)).reshape(*x.shape[:3], -1)


@given(
    st.sampled_from([torch.float64, torch.float32]),
    st.sampled_from([*KINDS, 'relative_learned']),
    st.sampled_from([('qk', 'vr'), ('uk', 'vr'), ('qk', 'uk', 'vr')]),
    st.sampled_from([dict(), dict(head_dim=3), dict(qk_dim=3), dict(head_dim=3, qk_dim=2)]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 2**31),
)
def test_outputs(dtype, position, terms, widths, height, width, seed):
    torch.manual_seed(seed)
    layer = ContentAttention(4, 2, (5, 4), terms, position, **widths, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    x = torch.randn(2, height, width, 4, dtype=dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    with torch.no_grad():
        expected, output = probs_by_equation(layer, x), output_by_equation(layer, x)
        assert (layer.attention_scores(x).softmax(-1) - expected).abs().max() <= tolerance
        content, by_position = (scores.softmax(-1) for scores in parts_by_equation(layer, x))
        assert (layer.content_scores(x).softmax(-1) - content).abs().max() <= tolerance
        assert (layer.position_scores(x).softmax(-1) - by_position).abs().max() <= tolerance
        assert (layer.position_probs((height, width)) - by_position[0]).abs().max() <= tolerance
        assert (layer(x) - output).abs().max() <= 20 * tolerance


@pytest.mark.parametrize('position', KINDS)
@pytest.mark.parametrize('size', [(3, 2), (4, 5)])
def test_gradients(position, size):
    layer = ContentAttention(4, 2, position=position, dtype=torch.float64)
    x = torch.randn(1, *size, 4, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters())

    def run(x, *values):
        return functional_call(layer, dict(zip(names, values)), x)

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)
    gradients = torch.autograd.grad(layer(x).sin().sum(), parameters)  # each has one
    assert all(gradient.abs().sum() > 0 for name, gradient in zip(names, gradients) if name != 'key.bias')


@pytest.mark.parametrize('position, alone', list(zip(KINDS, [QuadraticAttention, GeneralizedQuadraticAttention])))
def test_without_content_it_is_the_layer_by_position_alone(position, alone):
    content, alone = ContentAttention(4, 3, position=position), alone(4, 3)
    content.query.weight.data.zero_()
    content.query.bias.data.zero_()
    content.encoding.load_state_dict(alone.encoding.state_dict())
    content.value.load_state_dict(alone.value.state_dict())
    x = torch.randn(2, 5, 6, 4)
    assert torch.allclose(content(x), alone(x), atol=1e-6)
    assert torch.allclose(content.position_probs((5, 6)), alone.attention_probs((5, 6)), atol=1e-7)
    for ours, theirs in zip(content.gaussian_heads(), alone.gaussian_heads()):
        assert torch.equal(ours, theirs)
    maps = [attention_maps(layer, size=(5, 6), part='position')[''] for layer in (content, alone)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*map(head_centers, maps)))
    assert torch.allclose(maps[0].probs.double(), maps[1].probs, atol=1e-6)


def test_dropout_is_of_the_probabilities():
    layer = ContentAttention(3, 2, position='relative_quadratic', attn_drop=0.5, bias=False).double()
    x = torch.randn(1, 3, 3, 3, dtype=torch.float64)
    mean = torch.stack([layer(x) for _ in range(3000)]).mean(0)
    assert not torch.equal(layer(x), layer(x))
    assert torch.allclose(mean, layer.eval()(x), atol=0.08)


@pytest.mark.parametrize('position', KINDS)
def test_precision(position):
    layer = ContentAttention(8, 3, position=position)
    x = torch.randn(2, 6, 7, 8)
    expected = layer(x)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        output, scores = layer(x), layer.attention_scores(x)
    assert output.dtype == torch.bfloat16 and scores.dtype == torch.float32
    assert torch.allclose(output.float(), expected, atol=0.05)
    output = copy.deepcopy(layer).to(torch.bfloat16)(x.bfloat16())
    assert output.dtype == torch.bfloat16 and torch.allclose(output.float(), expected, atol=0.1)


@pytest.mark.parametrize('position', KINDS)
def test_pruned_and_loaded(position):
    layer = ContentAttention(8, 3, position=position)
    x = torch.randn(2, 5, 4, 8)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        layer.value.weight[:, 8:16] = 0
        expected = layer(x)
        layer.prune_heads([1])
        assert torch.allclose(layer(x), expected, atol=1e-6)
        fresh = ContentAttention(8, 3, position=position)
        fresh.load_state_dict(layer.state_dict())
        for other in (fresh, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(other(x), layer(x))
        layer.prune_heads([0, 1], allow_empty=True)
        assert torch.allclose(layer(x), layer.value.bias.expand(2, 5, 4, -1))


@pytest.mark.parametrize(
    'kwargs, message',
    [
        (dict(terms=('qk', 'qr')), "must have 'vr' and not 'qr' for position='relative_quadratic'"),
        (dict(terms=('qk',)), "must have 'vr' and not 'qr'"),
        (dict(position='relative_generalized', terms=('vr',)), 'use GeneralizedQuadraticAttention'),
        (dict(position_dim=4), 'position_dim=4 is the length of learned and sinusoidal vectors'),
        (dict(center_std=-1.0), 'center_std=-1.0 must be'),
    ],
)
def test_errors(kwargs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ContentAttention(4, 2, **{'position': 'relative_quadratic', **kwargs})
