"""Heads of CNNs whose convolutions became attention: layers of different grids, with fewer queries than keys."""

import pytest
import torch
from helpers.convolutions import joined
from torch import nn

from attncnn_plugin.analysis import (
    attention_probs_of,
    grids_of,
    head_centers,
    mean_attention_probs_of,
    model_reports,
    query_maps,
    query_of,
)
from attncnn_plugin.convert import conv_to_mhsa

SIZES = [(8, 10), (8, 10), (4, 5)]


def hybrid(content, **options):
    """Three layers at 8x10, 8x10 to 4x5, and 4x5 pixels."""
    convs = [nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1, stride=2), nn.Conv2d(6, 6, 3, padding=1)]
    layers = [conv_to_mhsa(conv, content=content, **options)[0] for conv in convs]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).eval()


@pytest.fixture
def images():
    return torch.randn(3, 3, 8, 10)


@pytest.mark.parametrize('content', [None, 'additive', 'gated'])
def test_reports_of_hard_heads(content, images):
    """Each layer on its own grid: a 3x3 convolution, head h at the h-th shift."""
    reports = model_reports(hybrid(content), images)
    expected = SIZES if content is None else [size for size in SIZES for _ in range(2)]
    assert [report.grid for report in reports] == expected
    for report in reports:
        shifts = [(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)]
        assert [head.nearest_shift for head in report.heads] == shifts and report.kind.kind == 'convolution'
        assert report.attention == ('images' if report.num_images and reports.index(report) % 2 else 'position')


@pytest.mark.parametrize('window_size', [None, 3])
@pytest.mark.parametrize('content', ['additive', 'gated'])
def test_maps_of_images(content, window_size, images):
    """The maps times the pixels are the heads that the layer puts out; means are means."""
    model = hybrid(content, alpha=2, window_size=window_size)
    for layer in (model[0], model[2], model[4]):
        nn.init.normal_(layer.query.weight)
    assert list(grids_of(model, images).values()) == SIZES
    probs = attention_probs_of(model, images)
    x = images
    for name, layer in model.named_children():
        if name in probs:
            assert torch.allclose(joined(layer, probs[name], x), layer(x).flatten(2), atol=1e-4)
        x = layer(x)
    for name, mean in mean_attention_probs_of(model, images, batch_size=2).items():
        assert torch.allclose(mean, probs[name].mean(0), atol=1e-6)


@pytest.mark.parametrize('content', [None, 'additive'])
def test_centers_and_queries(content, images):
    """Hard heads: the centre is the shift, from a query of the layer, and the map is the pixel there."""
    model = hybrid(content)
    means = {} if content is None else mean_attention_probs_of(model, images)
    for (name, size), padded in zip(grids_of(model, images).items(), SIZES):
        layer = model.get_submodule(name)
        assert size == padded
        for query in (None, (2, 2)):
            _, (row, column) = query_of(layer, size, query)
            maps = query_maps(layer, size, query, means.get(name))
            centers, widths = head_centers(layer, size, query, means.get(name))
            for head, (shift, keys) in enumerate(zip(layer.window.shifts().tolist(), maps)):
                assert keys[row + shift[0], column + shift[1]] > 0.999
                assert torch.allclose(centers[head], torch.tensor(shift).double(), atol=1e-3) and widths[head] < 0.05
    assert query_of(model[2], (8, 10), (3, 4)) == (7, (2, 4))  # 0, 2, 4 … are queries


def test_figures(images):
    pytest.importorskip('matplotlib')
    from attncnn_plugin import visualization

    model = hybrid('additive', alpha=2)
    probs, sizes = mean_attention_probs_of(model, images), grids_of(model, images)
    figure = visualization.plot_attention_centers(model, sizes, probs=probs)
    assert [axes.get_title() for axes in figure.axes] == ['0', '2', '4']
    maps = {name: query_maps(model.get_submodule(name), size, probs=probs[name]) for name, size in sizes.items()}
    queries = {name: query_of(model.get_submodule(name), size)[1] for name, size in sizes.items()}
    assert len(visualization.plot_attention_probs(maps, queries).axes) == 3 * 9 + 1
