"""Attention by content and position against C20's eq. 3 and eq. 8, written out."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import functional_call

from attncnn_plugin.attention import ContentAttention, content_attention, parts
from attncnn_plugin.attention.content_scores import TERMS

SUBSETS = [c for n in range(1, 5) for c in itertools.combinations(TERMS, n)]


def shift_vectors(layer, height, width):
    """R and C by shift, from their definition: vectors of tables, or sines and cosines."""
    if layer.tables.kind == 'learned':
        tables = layer.tables.row_table, layer.tables.column_table
        return tuple(
            {shift: table[shift + len(table) // 2] for shift in range(-n, n + 1)}
            for n, table in zip((height - 1, width - 1), tables)
        )
    waves = layer.tables.dim // 4  # of half of r_δ
    frequencies = [10000 ** (-i / waves) for i in range(waves)]
    return tuple(
        {
            shift: torch.tensor([f(shift * w) for f in (math.sin, math.cos) for w in frequencies], dtype=torch.float64)
            for shift in range(1 - n, n)
        }
        for n in (height, width)
    )


def scores_by_equation(layer, x):
    """Eq. 8 (eq. 3 for an absolute encoding), one query and one key at a time, ``(B, N_h, H*W, H*W)``."""
    layer = copy.deepcopy(layer).double()
    x = x.double()
    batch, height, width, _ = x.shape
    pixels = list(itertools.product(range(height), range(width)))
    if layer.absolute is not None:
        x = layer.absolute(torch.zeros_like(x)) + x
    if layer.tables is not None:
        rows, columns = shift_vectors(layer, height, width)
    dim = layer.dim
    scores = x.new_zeros(batch, layer.num_heads, len(pixels), len(pixels))
    for h in range(layer.num_heads):
        part = slice(h * dim, (h + 1) * dim)

        def project(linear, token):
            y = token @ linear.weight[part].T
            return y if linear.bias is None else y + linear.bias[part]

        for (q, (q1, q2)), (k, (k1, k2)) in itertools.product(enumerate(pixels), repeat=2):
            query = project(layer.query, x[:, q1, q2]) if layer.query is not None else None
            key = project(layer.key, x[:, k1, k2]) if layer.key is not None else None
            score = scores[:, h, q, k]
            if layer.tables is not None:
                r = torch.cat([rows[k1 - q1], columns[k2 - q2]])  # r_δ, the same for all terms
            if 'qk' in layer.terms:
                score += (query * key).sum(-1) / dim**0.5
            if 'qr' in layer.terms:
                score += query @ r / dim**0.5
            if 'uk' in layer.terms:
                score += key @ layer.key_bias[h] / dim**0.5
            if 'vr' in layer.terms:
                score += layer.position_bias[h] @ r
    return scores


def assert_by_equation(layer, x):
    with torch.no_grad():
        expected = scores_by_equation(layer, x)
        tolerance = 1e-12 if x.dtype == torch.float64 else 1e-5
        assert (layer.attention_scores(x) - expected).abs().max() <= tolerance * max(1, expected.abs().max())
        heads = expected.softmax(-1) @ x.double().flatten(1, 2)[:, None]
        value = copy.deepcopy(layer.value).double()
        output = value(heads.transpose(1, 2).flatten(2)).reshape(x.shape)
        assert (layer(x) - output).abs().max() <= 10 * tolerance


@pytest.mark.parametrize('terms', SUBSETS, ids='-'.join)
def test_terms(terms):
    if terms == ('vr',):
        pytest.skip('see test_vr_alone_is_the_learned_encoding')
    layer = ContentAttention(4, 2, (4, 5), terms=terms, dtype=torch.float64)
    assert_by_equation(layer, torch.randn(2, 3, 4, 4, dtype=torch.float64))


@given(
    st.sampled_from([torch.float64, torch.float32]),
    st.sampled_from([None, *SUBSETS[4:]]),
    st.sampled_from(['relative_learned', 'relative_sinusoidal', 'absolute_learned', 'absolute_sinusoidal']),
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 2**31),
)
def test_any_position_and_grid(dtype, terms, position, qk_bias, height, width, seed):
    torch.manual_seed(seed)
    if position.startswith('absolute'):
        terms = None
    layer = ContentAttention(4, 2, (5, 4), terms=terms, position=position, qk_bias=qk_bias, dtype=dtype)
    assert_by_equation(layer, torch.randn(1, height, width, 4, dtype=dtype))


@pytest.mark.parametrize(
    'position, terms',
    [
        *(('relative_learned', terms) for terms in SUBSETS),
        ('relative_sinusoidal', ('qk', 'qr')),
        ('absolute_learned', ('qk', 'uk')),
        ('absolute_sinusoidal', ('qk',)),
    ],
)
def test_gradients(position, terms):
    layer = ContentAttention(4, 2, (3, 2), terms=terms, position=position, dtype=torch.float64)
    x = torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters())

    def run(x, *values):
        return functional_call(layer, dict(zip(names, values)), x)

    assert torch.autograd.gradcheck(run, (x, *parameters))


@pytest.mark.parametrize('images', [1, 2, 5])
@pytest.mark.parametrize('position, terms', [('relative_learned', None), ('relative_generalized', ('qk', 'vr'))])
@pytest.mark.parametrize('head_dim', [None, 3])
def test_images_of_a_part(images, position, terms, head_dim, monkeypatch):
    """Outputs and gradients do not depend on how many images are computed at a time."""
    layer = ContentAttention(4, 2, (4, 5), terms, position, head_dim=head_dim, dtype=torch.float64)
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(parts, 'SCORES_AT_ONCE', images * 2 * 12**2)
    calls = []
    monkeypatch.setattr(
        content_attention,
        'attend_dense',
        lambda *args, dense=content_attention.attend_dense: calls.append(len(args[0])) or dense(*args),
    )
    output = layer(x)
    assert calls == {1: [1] * 5, 2: [2, 2, 1], 5: [5]}[images]
    values = x.flatten(1, 2)[:, None]
    if head_dim is not None:
        values = layer.value_proj(x.flatten(1, 2)).unflatten(-1, (2, 3)).transpose(1, 2)
    heads = layer.attention_scores(x).softmax(-1) @ values
    expected = layer.value(heads.transpose(1, 2).flatten(2)).reshape(x.shape)
    assert (output - expected).abs().max() <= 1e-12
    learned = [x, *layer.parameters()]
    gradients = (torch.autograd.grad(y.sin().sum(), learned, allow_unused=True) for y in (output, expected))
    for ours, dense in zip(*gradients):
        assert ours is dense is None or (ours - (0 if dense is None else dense)).abs().max() <= 1e-11


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


@pytest.mark.parametrize('grid', [(4, 4), (2, 1)])
def test_all_parameters_have_gradients(grid):
    """Training on several devices waits for each of them, also for b_k, which changes nothing."""
    layer = ContentAttention(4, 2, (4, 4), terms=TERMS)
    layer(torch.randn(2, *grid, 4)).sin().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert layer.key.bias.grad.abs().max() <= 1e-6 < layer.query.bias.grad.abs().max()


def test_state_dicts_of_another_structure_are_refused():
    with_bias = ContentAttention(8, 2)
    without = ContentAttention(8, 2, qk_bias=False)
    with pytest.raises(RuntimeError, match='query has no bias in the state dict: build the layer with qk_bias=False'):
        with_bias.load_state_dict(without.state_dict(), strict=False)
    with pytest.raises(RuntimeError, match='query has a bias in the state dict: build the layer with qk_bias=True'):
        without.load_state_dict(with_bias.state_dict(), strict=False)
    summed = {name: p for name, p in without.state_dict().items() if 'table' not in name}
    summed.update({f'tables.{axis}_table': torch.zeros(31, 8) for axis in ('row', 'column')})  # r_δ = R[δ1] + C[δ2]
    with pytest.raises(RuntimeError, match=r'tables\.row_table .* vectors of 8 channels.* the sum R\[δ1\] \+ C\[δ2\]'):
        without.load_state_dict(summed)


def test_only_the_parameters_of_the_terms_exist():
    names = {
        terms: {n.split('.')[0] for n, _ in ContentAttention(4, 2, terms=terms).named_parameters()} for terms in SUBSETS
    }
    assert names[('qk', 'qr')] == {'query', 'key', 'tables', 'value'}
    assert names[('qr',)] == {'query', 'tables', 'value'}
    assert names[('uk',)] == {'key', 'key_bias', 'value'}
    assert names[('vr',)] == {'position_bias', 'tables', 'value'}
    assert names[TERMS] == {'query', 'key', 'tables', 'key_bias', 'position_bias', 'value'}


def test_scores_stay_float32_under_autocast():
    layer = ContentAttention(16, 3, (6, 6), terms=TERMS)
    x = torch.randn(2, 6, 6, 16)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        scores = layer.attention_scores(x)
        query = layer.query(x)
        output = layer(x)
    assert scores.dtype == torch.float32 and output.dtype == torch.bfloat16
    # The projections are autocast's own; what is made of them is not rounded any further.
    layer.query.weight.requires_grad_(False).zero_()
    layer.query.bias = None
    with torch.autocast('cpu', dtype=torch.bfloat16):
        positions_and_keys = layer.attention_scores(x)
        keys = layer.key(x).float().reshape(2, 36, 3, 16).permute(0, 2, 3, 1)
    row, column = layer.axis_scores((6, 6))
    exact = (row[:, :, None, :, None] + column[:, None, :, None, :]).reshape(3, 36, 36)
    exact = exact + (layer.key_bias[:, None] @ keys) / 4
    assert torch.allclose(positions_and_keys, exact, atol=1e-5)
    assert query.dtype == torch.bfloat16


def test_probabilities_of_content_need_the_input():
    with pytest.raises(ValueError, match='depend on the input'):
        ContentAttention(4, 2).attention_probs((3, 3))


@pytest.mark.parametrize(
    'kwargs, message',
    [
        (dict(terms=()), r'terms=\(\) must be'),
        (dict(terms='qk'), "terms='qk' must be"),
        (dict(terms=('qk', 'kq')), r"terms=\('qk', 'kq'\) must be"),
        (dict(terms=('qk', 'qk')), 'each once'),
        (dict(terms=('qk', 'qr'), position='absolute_learned'), r"one or more of \('qk', 'uk'\)"),
        (dict(position='rotary'), "position='rotary' is unknown"),
        (dict(dim=5), 'position_dim=5 must be even'),
        (dict(dim=6, position='relative_sinusoidal'), 'position_dim=6 must be a multiple of 4'),
    ],
)
def test_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ContentAttention(**{'dim': 4, 'num_heads': 2, **kwargs})
