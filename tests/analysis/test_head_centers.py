"""Centres and widths of heads."""

import math

import pytest
import torch
from helpers.small import model_with_head, small_cmhsa, small_timm

from attncnn_plugin.analysis import (
    attention_layers,
    head_centers,
    query_maps,
)
from attncnn_plugin.analysis.head_centers import query_index


@pytest.mark.parametrize(
    'name, factor, width',
    [
        ('sa_quadratic_cifar', 0.5, 2.0),
        ('sa_generalized_cifar', [[0.5, 0.0], [0.0, 0.25]], math.sqrt((4 + 16) / 2)),
        ('sa_quadratic_cifar', 0.0, 1000.0),
        ('sa_generalized_cifar', [[1.0, 1.0], [1.0, 1.0]], math.sqrt((1e6 + 0.25) / 2)),
    ],
)
def test_centres_and_widths_of_gaussian_heads(name, factor, width):
    layer = model_with_head((1.0, -2.0), name, factor).blocks[0].attn
    centers, widths = head_centers(layer, (6, 4))
    assert centers[0].tolist() == [1, -2] and widths[0].item() == pytest.approx(width)
    assert torch.allclose(centers, layer.encoding.center.double())


def test_centres_and_widths_of_other_heads():
    probs = torch.zeros(2, 15, 15)
    probs[:, :, 0] = 1
    probs[0, 7] = 0
    probs[0, 7, 2 * 5 + 1], probs[0, 7, 2 * 5 + 3] = 0.1, 0.3  # of 0.4: the rest is outside of the grid
    layer = small_timm('sa_learned_content_cifar').blocks[0].attn
    centers, widths = head_centers(layer, (3, 5), probs=probs)  # of the query in row 1, column 2
    assert torch.allclose(centers, torch.tensor([[1, 0.5], [-1, -2]], dtype=torch.float64), atol=1e-6)
    assert torch.allclose(widths, torch.tensor([math.sqrt(0.75 / 2), 0], dtype=torch.float64), atol=1e-6)
    centers, _ = head_centers(layer, (3, 5), query=(2, 4), probs=probs)
    assert centers[0].tolist() == [-2, -4]
    with pytest.raises(ValueError, match="position='relative_learned', depends on position alone: give probs"):
        head_centers(layer, (3, 5))


def test_queries_outside_of_the_grid():
    assert query_index((1, 2), (3, 5)) == 7 and query_index(None, (3, 5)) == 7
    for query in ((3, 0), (0, 5), (-1, 0)):
        with pytest.raises(ValueError, match='row from 0 to 2 and a column from 0 to 4'):
            query_index(query, (3, 5))


def test_maps_of_a_query_are_rows_of_the_probabilities():
    models = [small_timm(f'sa_{kind}_cifar') for kind in ('quadratic', 'generalized', 'learned')] + [
        small_timm('sa_learned_content_cifar', position='relative_quadratic'),
        small_cmhsa('attn'),
    ]
    for model in models:
        for layer in attention_layers(model).values():
            expected = layer.position_probs((6, 5)).detach()[:, 2 * 5 + 4].unflatten(1, (6, 5))
            assert torch.allclose(query_maps(layer, (6, 5), (2, 4)).float(), expected, atol=1e-6)


def test_queries_that_give_nothing_to_the_grid():
    """They have no centre, which (0, 0) would be."""
    probs = torch.full((2, 15, 15), 1 / 15)
    probs[0, 7] = 0
    layer = small_timm('sa_learned_content_cifar').blocks[0].attn
    centers, widths = head_centers(layer, (3, 5), probs=probs)
    assert centers[0].isnan().all() and widths[0].isnan()
    assert centers[1].abs().max() < 1e-6 and widths[1] > 1
