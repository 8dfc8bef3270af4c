"""The terms of scores that a page is made of, and how they are stored."""

import numpy as np
import pytest
import torch
from helpers.explorer_pages import unpack_data
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from attncnn_plugin.explorer.layer_grid import LayerGrid
from attncnn_plugin.explorer.position_terms import gaussian_shift_scores, position_term
from attncnn_plugin.explorer.stream import Quantized, pack
from attncnn_plugin.explorer.token_terms import quantize, token_scores, token_terms
from attncnn_plugin.layers import (
    ContentAttention,
    GaussianHeads,
    GeneralizedQuadraticAttention,
    GridBias,
    PatchAttention,
)
from attncnn_plugin.layers.shifts import at_grid_shifts

SIZE = (3, 5)
GRID = LayerGrid.of_tokens(SIZE)


def centered(scores):
    """Scores of mean 0 over the keys, float64."""
    return (scores.double() - scores.double().mean(-1, keepdim=True)).detach()


def content_layer(terms, dim=8, **kwargs):
    layer = ContentAttention(dim, 3, max_size=SIZE, terms=terms, **kwargs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def patch_layer(dim=8):
    layer = PatchAttention(dim, 3, GridBias(3, SIZE))
    torch.nn.init.normal_(layer.query.weight)
    torch.nn.init.normal_(layer.key.weight)
    return layer


def errors_of(layer, inputs, error):
    """The errors of all scores by tokens of a layer that are to have some error, ``(images, N_h, N, N)``."""
    errors = []
    for group in token_terms(layer, inputs, GRID):
        arrays = {name: torch.from_numpy(array.rounded) for name, array in group.quantized(error).items()}
        terms = {'matrices': 'encoded_products' if group.encodes else 'products', 'row_shifts': 'query_axes'}
        for image in range(group.images):
            x = inputs[len(errors)][None]
            own = layer.content_scores(x) if isinstance(layer, PatchAttention) else layer.attention_scores(x)
            found = [
                sum(token_scores(term, arrays, head, image, GRID) for array, term in terms.items() if array in arrays)
                for head in range(3)
            ]
            errors.append(centered(torch.stack(found)) - centered(own[0]))
    return torch.stack(errors)


LAYERS = {
    'qk': lambda dim: content_layer(['qk'], dim),
    'qr': lambda dim: content_layer(['qr'], dim),
    'all terms': lambda dim: content_layer(['qk', 'qr', 'uk', 'vr'], dim),
    'sinusoidal': lambda dim: content_layer(['qk', 'qr'], dim, position='relative_sinusoidal'),
    'absolute': lambda dim: content_layer(['qk', 'uk'], dim, position='absolute_learned'),
    'patches': patch_layer,
}


@pytest.mark.parametrize('name', LAYERS)
@pytest.mark.parametrize('dim, images, groups', [(8, 1, 1), (8, 3, 1), (40, 3, 3)])
def test_scores_by_tokens(name, dim, images, groups):
    """They are those of the layer, whether images share the matrices or, being few tokens of many channels, do not."""
    layer, inputs = LAYERS[name](dim), torch.randn(images, *SIZE, dim) + 1
    assert len(token_terms(layer, inputs, GRID)) == groups
    scale = layer.attention_scores(inputs).abs().max()
    assert errors_of(layer, inputs, 1e-7).abs().max() <= 1e-5 * scale


@pytest.mark.parametrize('error', [0.001, 0.02, 0.2])
@pytest.mark.parametrize('name', LAYERS)
def test_error_of_quantization(name, error):
    """Scores are as fine as they are to be, and no finer."""
    errors = [errors_of(LAYERS[name](8), torch.randn(3, *SIZE, 8), error) for _ in range(4)]
    rms = torch.stack(errors).square().mean().sqrt()
    assert 0.5 * error <= rms <= 1.2 * error


def test_tokens_that_are_all_the_same():
    layer, inputs = content_layer(['qk', 'qr']), torch.ones(2, *SIZE, 8)
    assert errors_of(layer, inputs, 1e-6).abs().max() <= 1e-4


@given(arrays(st.sampled_from([np.uint8, np.int16, np.float32, np.float64]), array_shapes(min_side=0, max_dims=4)))
def test_arrays_come_back(array):
    header = unpack_data(pack(dict(nested=[dict(array=array), 'ä', None, 1.5], second=array)))
    assert header['nested'][1:] == ['ä', None, 1.5]
    for found in (header['nested'][0]['array'], header['second']):
        assert found.dtype == array.dtype and found.shape == array.shape
        np.testing.assert_array_equal(found, array)


@given(
    st.integers(1, 4).flatmap(lambda n: arrays(np.float32, (n, 2, 3), elements=st.floats(-1000, 1000, width=32))),
    st.floats(0.0009765625, 8),
)
def test_quantized_numbers_come_back(values, step):
    steps = (step * np.arange(1, len(values) + 1)).astype(np.float32)
    found = unpack_data(pack(dict(numbers=Quantized(values, steps))))['numbers']
    assert (np.abs(found - values) <= 0.501 * steps[:, None, None] + 1e-3).all()
    np.testing.assert_allclose(found, Quantized(values, steps).rounded, rtol=1e-6)
    np.testing.assert_allclose(found / steps[:, None, None], np.round(found / steps[:, None, None]), atol=1e-3)


def test_numbers_too_large_for_their_steps_take_larger_ones():
    values = torch.tensor([[[1.0, -1e6]], [[1.0, 2.0]]])
    array = quantize(values, torch.tensor([1e-3, 1e-3], dtype=torch.float64))
    found = unpack_data(pack(dict(numbers=array)))['numbers']
    np.testing.assert_allclose(found, values, rtol=1e-6, atol=0.2)
    assert (np.abs(found[1] - values[1].numpy()) <= 1e-3).all()


def test_layer_without_scores_of_content_takes_no_bits():
    layer = patch_layer()
    torch.nn.init.zeros_(layer.query.weight)
    arrays = token_terms(layer, torch.randn(2, *SIZE, 8), GRID)[0].quantized(1e-3)
    assert all((array.whole == 0).all() for array in arrays.values())


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_scores_by_position(height, width, heads, by_shift):
    size = height, width
    if by_shift:
        scores = at_grid_shifts(torch.randn(heads, 2 * height - 1, 2 * width - 1) * 3, size)
    else:
        rows, columns = torch.randn(heads, height, height) * 3, torch.randn(heads, width, width) * 3
        scores = (rows[:, :, None, :, None] + columns[:, None, :, None]).flatten(3).flatten(1, 2)
    term = position_term(scores, size)
    if not by_shift:
        assert term.name == 'axes'
    for head in range(heads):
        assert (term.scores(head, LayerGrid.of_tokens(size)).softmax(-1) - scores[head].softmax(-1)).abs().max() <= 1e-6


def test_scores_by_position_without_a_rule():
    """The better one of both terms, whose error is measured."""
    scores = torch.randn(2, 15, 15)
    rows, columns = torch.randn(3, 3), torch.randn(5, 5)
    scores = scores * 1e-3 + (rows[:, None, :, None] + columns[:, None]).flatten(2).flatten(0, 1)
    assert position_term(scores, SIZE).name == 'axes'
    table = torch.randn(2, 5, 9) * 3
    assert position_term(torch.randn(2, 15, 15) * 1e-3 + at_grid_shifts(table, SIZE), SIZE).name == 'shifts'


def test_gaussian_heads_by_shift():
    layer = GeneralizedQuadraticAttention(8, 3)
    found = gaussian_shift_scores(layer.gaussian_heads(), SIZE)
    assert (found - layer.encoding.shift_scores(SIZE)).abs().max() <= 1e-12
    heads = GaussianHeads(torch.tensor([[1e6, -2.0]]), torch.eye(2)[None])  # the best shift is (2, -2)
    found = gaussian_shift_scores(heads, SIZE)[0]
    assert (
        found[-1, 2] == 0 and found[-1, 3] == pytest.approx(-0.5) and found[-2, 2] == pytest.approx(2 - 1e6, rel=1e-5)
    )
