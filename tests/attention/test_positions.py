"""Position encodings: probabilities against the equations in exact arithmetic, first values, tables for other grids."""

import math
from fractions import Fraction
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from attncnn_plugin.attention import (
    ContentAttention,
    GeneralizedQuadraticAttention,
    LearnedAttention,
    QuadraticAttention,
    tokens,
)
from attncnn_plugin.attention.positions import RelativeTables
from attncnn_plugin.attention.shifts import resize_shifts
from attncnn_plugin.pruning import prune_heads

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}

dtypes = st.sampled_from(list(TOLERANCE))
sizes = st.integers(1, 6)
centers = st.floats(-12, 12) | st.floats(-1e4, 1e4) | st.sampled_from([0.5, -0.5, 1.5, 2.5])
alphas = st.floats(0, 1e3) | st.floats(0, 4)


def softmax_probs(score, height, width):
    """Softmax over keys of ``score(δ1, δ2)``, a Fraction or float, from the definition: ``(H*W, H*W)`` in float64."""
    pixels = [(i, j) for i in range(height) for j in range(width)]
    rows = []
    for q1, q2 in pixels:
        scores = [score(k1 - q1, k2 - q2) for k1, k2 in pixels]
        best = max(scores)
        weights = [math.exp(float(s - best)) for s in scores]
        rows.append([w / sum(weights) for w in weights])
    return torch.tensor(rows, dtype=torch.float64)


def assert_probs(layer, scores, height, width):
    probs = layer.attention_probs((height, width))
    dtype = next(layer.parameters()).dtype
    assert probs.shape == (len(scores), height * width, height * width)
    assert probs.dtype == dtype
    for head, score in enumerate(scores):
        expected = softmax_probs(score, height, width)
        assert (probs[head].double() - expected).abs().max() <= TOLERANCE[dtype]


@given(dtypes, sizes, sizes, st.lists(st.tuples(centers, centers, alphas), min_size=1, max_size=3))
@example(torch.float32, 40, 1, [(30.4999, 0.0, 1e3)])  # two keys far from the query are almost equally near the target
@example(torch.float32, 2, 3, [(1e4, 0.5001, 1e3)])  # the same, with the target far outside the grid
@example(torch.float32, 6, 1, [(1e4, 0.0, 5e-5)])  # a wide head: its scores are far below those at the target
def test_quadratic_probs(dtype, height, width, heads):
    layer = QuadraticAttention(1, len(heads), dtype=dtype)
    encoding = layer.encoding
    with torch.no_grad():
        encoding.center.copy_(torch.tensor([head[:2] for head in heads]))
        encoding.sqrt_precision.copy_(torch.tensor([(2 * head[2]) ** 0.5 for head in heads]))

    def score(head):
        alpha = Fraction(encoding.sqrt_precision[head].item()) ** 2 / 2
        c1, c2 = (Fraction(c) for c in encoding.center[head].tolist())
        return lambda d1, d2: -alpha * ((d1 - c1) ** 2 + (d2 - c2) ** 2)  # C20, eq. 9

    assert_probs(layer, [score(head) for head in range(len(heads))], height, width)


@given(
    dtypes,
    sizes,
    sizes,
    st.lists(
        st.tuples(centers, centers, st.floats(0, 45), st.floats(0, 45), st.floats(0, 2 * math.pi)),
        min_size=1,
        max_size=2,
    ),
)
def test_generalized_probs(dtype, height, width, heads):
    # The products in Mᵀ(δ − δ0)·Mᵀ(δ + δ0 − 2Δ), computed in float64, can cancel.
    size = max(height, width)
    largest = max(max(s1, s2) ** 2 * size * (math.hypot(c1, c2) + size) for c1, c2, s1, s2, _ in heads)
    assume(largest * torch.finfo(torch.float64).eps <= 10 * TOLERANCE[dtype])
    layer = GeneralizedQuadraticAttention(1, len(heads), dtype=dtype)
    encoding = layer.encoding
    with torch.no_grad():
        encoding.center.copy_(torch.tensor([head[:2] for head in heads]))
        for head, (_, _, s1, s2, angle) in enumerate(heads):
            rotation = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
            encoding.sqrt_precision[head] = rotation @ torch.diag(torch.tensor([s1, s2]))

    def score(head):
        (m11, m12), (m21, m22) = (map(Fraction, row) for row in encoding.sqrt_precision[head].tolist())
        s11, s12, s22 = m11**2 + m12**2, m11 * m21 + m12 * m22, m21**2 + m22**2  # Σ⁻¹ = MMᵀ
        c1, c2 = (Fraction(c) for c in encoding.center[head].tolist())
        # C20, eq. 19
        return lambda d1, d2: -(s11 * (d1 - c1) ** 2 + 2 * s12 * (d1 - c1) * (d2 - c2) + s22 * (d2 - c2) ** 2) / 2

    assert_probs(layer, [score(head) for head in range(len(heads))], height, width)


@given(
    dtypes,
    sizes,
    sizes,
    st.integers(1, 3),
    st.integers(1, 3),
    st.floats(0, 12),
    st.sampled_from([1, 2 * 9**3, tokens.PAIRS_AT_ONCE]),
    st.integers(0, 2**31),
)
def test_generalized_outputs_and_gradients(dtype, height, width, num_heads, batch, far, at_once, seed):
    """Against a dense softmax of C20's eq. 19 in float64, of one head at a time, some and all; of one pixel and row."""
    torch.manual_seed(seed)
    layer = GeneralizedQuadraticAttention(3, num_heads, dtype=dtype)
    with torch.no_grad():
        layer.encoding.center.mul_(far)
        layer.encoding.sqrt_precision.add_(torch.randn(num_heads, 2, 2), alpha=0.5)
    x = torch.randn(batch, height, width, 3, dtype=dtype, requires_grad=True)
    pixels = torch.cartesian_prod(torch.arange(height), torch.arange(width)).double().reshape(-1, 2)
    parameters = dict(layer.named_parameters(), x=x)
    wide = {name: value.detach().double().requires_grad_() for name, value in parameters.items()}
    offset = (pixels - pixels[:, None])[None] - wide['encoding.center'][:, None, None]
    probs = (-(offset @ wide['encoding.sqrt_precision'][:, None]).square().sum(-1) / 2).softmax(-1)
    heads = torch.einsum('hqk,bkd->bqhd', probs, wide['x'].flatten(1, 2)).flatten(2).unflatten(1, (height, width))
    with patch.object(tokens, 'PAIRS_AT_ONCE', at_once):
        outputs = layer(x), heads @ wide['value.weight'].T + wide['value.bias']
    both = (torch.autograd.grad(y.sin().sum(), own.values()) for y, own in zip(outputs, (parameters, wide)))
    for own, expected in zip(*((y, *found) for y, found in zip(outputs, both))):
        scale = max(1, expected.abs().max().item())
        assert (own - expected).abs().max() <= (1e-11 if dtype == torch.float64 else 1e-4) * scale


@given(dtypes, sizes, sizes, st.integers(0, 3), st.integers(1, 3), st.floats(0, 4), st.integers(0, 2**31))
def test_learned_probs(dtype, height, width, spare, num_heads, gain, seed):
    torch.manual_seed(seed)
    max_size = (height + spare, width + 2 * spare)
    layer = LearnedAttention(8, num_heads, max_size, dtype=dtype)
    encoding = layer.encoding
    with torch.no_grad():
        encoding.weight.mul_(gain)
    row, column = encoding.tables.row_table.tolist(), encoding.tables.column_table.tolist()

    def score(head):
        v = encoding.weight[head].tolist()

        def of_shift(d1, d2):  # vᵀr_δ with r_δ = [R[δ1]; C[δ2]]
            r = row[d1 + max_size[0] - 1] + column[d2 + max_size[1] - 1]
            return sum(a * b for a, b in zip(v, r))

        return of_shift

    assert_probs(layer, [score(head) for head in range(num_heads)], height, width)


def test_initial_values():
    torch.manual_seed(0)
    quadratic = QuadraticAttention(2, 4000).encoding
    assert abs(quadratic.sqrt_precision.mean() - 1) < 1e-3 and abs(quadratic.sqrt_precision.std() - 0.01) < 1e-3
    assert abs(quadratic.center.std() - 2) < 0.05 and quadratic.center.mean().abs() < 0.1
    generalized = GeneralizedQuadraticAttention(2, 4000).encoding
    assert abs(generalized.center.std() - 2) < 0.05
    assert torch.allclose(generalized.sqrt_precision.mean(0), torch.eye(2), atol=1e-3)
    assert abs(generalized.sqrt_precision.std(0).mean() - 0.01) < 1e-3
    learned = LearnedAttention(400, 9).encoding
    assert abs(learned.tables.row_table.std() - 1) < 0.05
    assert 800**-0.5 < learned.weight.abs().max() <= 400**-0.5  # of two nn.Linear(400, 9)


@pytest.mark.parametrize('kind', [LearnedAttention, ContentAttention])
def test_grid_larger_than_the_tables(kind):
    layer = kind(4, 2, (6, 5))
    assert layer(torch.randn(1, 6, 5, 4)).shape == (1, 6, 5, 4)
    with pytest.raises(ValueError, match='7x5 tokens is larger than the 6x5'):
        layer(torch.randn(1, 7, 5, 4))


def test_tables_of_a_checkpoint_are_resized():
    small, large = LearnedAttention(4, 2, (4, 3)), LearnedAttention(4, 2, (8, 6))
    with torch.no_grad():  # a function that interpolation keeps
        small.encoding.tables.row_table.copy_(torch.linspace(-1, 1, 7)[:, None].expand(-1, 4))
    large.load_state_dict(small.state_dict())
    resized = large.encoding.tables.row_table
    assert torch.equal(resized[6:9], small.encoding.tables.row_table[2:5])  # shifts −1, 0 and 1
    assert torch.allclose(resized[[0, -1]], small.encoding.tables.row_table[[0, -1]], atol=1e-6)
    assert torch.all(resized.diff(dim=0) > 0)
    again, x = LearnedAttention(4, 2, (4, 3)), torch.randn(1, 4, 3, 4)
    again.load_state_dict(large.state_dict())
    assert torch.allclose(large(x), again(x), atol=1e-6)
    assert torch.allclose(large.attention_probs((2, 2)), small.attention_probs((2, 2)), atol=1e-6)
    again.load_state_dict(small.state_dict())
    assert torch.equal(again.encoding.tables.row_table, small.encoding.tables.row_table)
    with pytest.raises(RuntimeError, match='size mismatch for encoding.tables.row_table'):
        LearnedAttention(6, 2, (4, 3)).load_state_dict(small.state_dict())
    state = small.state_dict()
    state['encoding.tables.row_table'] = state['encoding.tables.row_table'][:6]  # no shift 0 in the middle
    with pytest.raises(RuntimeError, match='size mismatch for encoding.tables.row_table'):
        large.load_state_dict(state)


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 2**31))
def test_resized_tables(source, target, seed):
    table = torch.randn(2 * source - 1, 3, generator=torch.Generator().manual_seed(seed))
    resized = resize_shifts(table, 2 * target - 1)
    assert resized.shape == (2 * target - 1, 3)
    assert torch.equal(resized[target - 1], table[source - 1])
    assert torch.allclose(resized.flip(0), resize_shifts(table.flip(0), 2 * target - 1), atol=1e-5)
    if target <= source:  # as a layer takes them for a smaller grid
        assert torch.equal(resized, table[source - target : source + target - 1])
    else:
        assert torch.allclose(resized[[0, -1]], table[[0, -1]], atol=1e-4)


@pytest.mark.parametrize(
    'make, message',
    [
        *((lambda dim=dim: RelativeTables(dim, (1, 1)), f'dim={dim} must be even') for dim in (0, 3)),
        (lambda: LearnedAttention(4, 2, max_size=16), 'max_size=16 must be the height and the width'),
        (lambda: LearnedAttention(4, 2, max_size=(0, 1)), r'max_size=\(0, 1\)'),
        (lambda: LearnedAttention(4, 2, max_size=(1, 0)), r'max_size=\(1, 0\)'),
        *(
            (lambda heads=heads: prune_heads(QuadraticAttention(4, 3), {'': heads}), 'different heads from 0 to 2')
            for heads in ([3], [-1], [0, 0])
        ),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
