"""Figures that need a model and images alone: the numbers that are drawn, against maps and rollout."""

import math
from itertools import combinations, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.small import small_timm, trained_like
from helpers.vits import SIZE, output_of, small_vit
from matplotlib.figure import Figure
from matplotlib.text import Text

from attncnn_plugin import attention_maps, rollout
from attncnn_plugin.analysis import mean_attention
from attncnn_plugin.pruning import head_ablation, prune_heads
from attncnn_plugin.visualization import plot_attention, plot_head_ablation, plot_heads
from attncnn_plugin.visualization.style import draw_attention, image_of


def drawn(figure):
    """By title, the array of each map, the first with a title."""
    found = {}
    for axes in figure.axes:
        if axes.images:
            found.setdefault(axes.get_title(), np.asarray(axes.images[0].get_array()))
    return found


def relative(probs):
    return (probs / probs.mean()).clamp(min=1e-9).numpy()


@pytest.mark.parametrize(
    'name',
    [
        'vit_tiny_patch16_224',
        'beit_base_patch16_224',
        'transformers.ViT',
        'torchvision.VisionTransformer',
        'DeiT3',
        'sa_quadratic_cifar',
    ],
)
def test_attention_of_each_head_their_mean_and_the_rollout(name):
    torch.manual_seed(0)
    own = name.startswith('sa_')
    model = trained_like(small_timm(name)) if own else small_vit(name)
    images = torch.randn(2, 3, *((16, 16) if own else (SIZE, SIZE)))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    figure = plot_attention(model, images)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    maps, reached = attention_maps(model, images), rollout(model, images)
    last, (height, width) = list(maps.values())[-1], reached.shape[1:]
    prefix = last.shape[-1] - height * width
    assert prefix == (0 if own else 1)
    of_class = not own and not name.startswith('beit')  # whose output is the mean over its patches
    rows = (last[:, :, 0] if of_class else last[:, :, prefix:].mean(2))[..., prefix:].unflatten(-1, (height, width))
    panels = drawn(figure)
    for head in range(3):
        np.testing.assert_allclose(panels[f'head {head}'], relative(rows[0, head]), rtol=1e-4)
    (mean,) = [panel for title, panel in panels.items() if title.endswith('mean of heads')]
    np.testing.assert_allclose(mean, relative(rows[0].mean(0)), rtol=1e-4)
    np.testing.assert_allclose(panels['rollout'], relative(reached[0]), rtol=1e-4)
    assert panels['image 0'].shape == (*images.shape[2:], 3) and panels['image 0'].min() == 0
    (bar,) = [axes for axes in figure.axes if axes.get_ylabel() == '× uniform attention']
    assert [label.get_text() for label in bar.get_yticklabels()] == ['1/10', '1', '10', '100']
    norms = {
        (own.norm.vmin, own.norm.vmax, round(float(own.norm(1.0)), 6))
        for axes in figure.axes[:-1]
        for own in axes.images[:1]
        if not axes.get_title().startswith('image')
    }
    assert norms == {(0.1, 100.0, round(1 / 3, 6))}
    (query,) = [text.get_text() for text in figure.findobj(Text) if text.get_text().startswith('Where ')]
    assert ('class token' in query) == of_class


@pytest.mark.parametrize('number', [1, 2])
def test_titles_are_inside_of_the_figure(number):
    figure = plot_attention(small_vit('vit_tiny_patch16_224'), torch.randn(number, 3, SIZE, SIZE))
    image_of(figure)  # places them
    for axes in figure.axes:
        assert axes.title.get_window_extent().y1 < figure.bbox.height


def test_swin_has_no_rollout_and_many_heads_wrap():
    torch.manual_seed(0)
    model = small_vit('swin_tiny_patch4_window7_224', num_heads=(3, 12), embed_dim=24)
    images = torch.randn(1, 3, SIZE, SIZE)
    figure = plot_attention(model, images, list(attention_maps(model, images))[-2:])
    assert 'rollout' not in drawn(figure)
    assert len([axes for axes in figure.axes if axes.get_title().startswith('head ')]) == 2 * 12
    wide = small_vit('vit_tiny_patch16_224', embed_dim=56, num_heads=14)
    places = [axes.get_subplotspec() for axes in plot_attention(wide, images).axes[:-1]]  # photo, rollout, mean, heads
    assert [(own.rowspan.start, own.colspan.start) for own in places] == [divmod(place, 5) for place in range(17)]
    black = plot_attention(small_vit('vit_tiny_patch16_224'), torch.zeros(1, 3, SIZE, SIZE))
    assert black.axes[0].get_subplotspec().get_gridspec().get_geometry() == (2, 3) and not drawn(black)['image 0'].any()


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'swin_tiny_patch4_window7_224', 'sa_quadratic_cifar'])
def test_all_heads_from_the_query(name):
    torch.manual_seed(0)
    own = name.startswith('sa_')
    model = trained_like(small_timm(name)) if own else small_vit(name)
    images = torch.randn(2, 3, *((16, 16) if own else (SIZE, SIZE)))
    maps = mean_attention(model, images)
    figure = plot_heads(maps)
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == sum(len(layer.probs) for layer in maps.values())
    assert [layer.in_windows for layer in maps.values()] == (
        [True] * 2 + [False] * 2 if 'swin' in name else [False] * 2
    )
    for layer in maps.values():
        if not layer.in_windows:
            for axes, expected in zip(panels, layer.of_query()[0]):
                np.testing.assert_allclose(axes.images[0].get_array(), relative(expected), rtol=1e-4)
                assert query_of(axes) == layer.of_query()[1]
            panels = panels[len(layer.probs) :]
            continue
        for axes, means in zip(panels, means_by_shift(layer)):
            array = axes.images[0].get_array()
            down, right = array.shape[0] // 2, array.shape[1] // 2
            assert down <= 3 and right <= 3 and query_of(axes) == (down, right)
            seen = {(i - down, j - right): array[i, j] for i in range(2 * down + 1) for j in range(2 * right + 1)}
            assert means.keys() <= seen.keys()
            whole = relative(torch.tensor([[means.get(shift, 0.0) for shift in seen]]))[0]
            np.testing.assert_allclose(list(seen.values()), whole, rtol=1e-4)
        panels = panels[len(layer.probs) :]
    assert [axes.get_ylabel() for axes in figure.axes if axes.get_ylabel()][0] in ('block 0', 'stage 0 block 0')
    for axes, expected in zip(plot_heads(maps, (1, 2)).axes, next(iter(maps.values())).of_query((1, 2))[0]):
        np.testing.assert_allclose(axes.images[0].get_array(), relative(expected), rtol=1e-4)
        assert query_of(axes) == (1, 2)


def query_of(axes):
    """Row and column of the square."""
    (square,) = axes.patches
    return square.get_y() + 0.5, square.get_x() + 0.5


def means_by_shift(layer):
    """P[q, q + δ] of each head, mean over those queries in the interior that see a shift, by shift."""
    height, width = layer.grid
    margin = 2 if min(layer.grid) > 5 else 1
    for probs in layer.probs.double():
        found = {}
        for row, column in product(range(margin, height - margin), range(margin, width - margin)):
            for key, value in enumerate(probs[row * width + column].tolist()):
                if value > 0:
                    found.setdefault((key // width - row, key % width - column), []).append(value)
        yield {shift: sum(values) / len(values) for shift, values in found.items()}


def test_uniform_attention_in_windows_is_neutral():
    """Whatever the share of queries is that see a shift."""
    model = small_vit('swin_tiny_patch4_window7_224')
    for layer in model.layers:
        for block in layer.blocks:
            block.shift_size = (0, 0)
            block.attn_mask = None
            for parameter in (block.attn.qkv.weight, block.attn.qkv.bias, block.attn.relative_position_bias_table):
                parameter.data.zero_()
    figure = plot_heads(mean_attention(model, torch.randn(1, 3, SIZE, SIZE)))
    drawn = [axes.images[0].get_array() for axes in figure.axes if axes.get_title().startswith('head')]
    assert len(drawn) == 12
    for values in drawn:
        assert np.allclose(values, 1, atol=1e-4)


def test_ablation_by_blocks_and_heads():
    torch.manual_seed(0)
    model = small_vit('vit_tiny_patch16_224')
    prune_heads(model, {0: [1]})
    batches = [(torch.randn(3, 3, SIZE, SIZE), torch.arange(3))]
    ablation = head_ablation(model, batches, lambda model, batch: F.cross_entropy(output_of(model, batch[0]), batch[1]))
    figure = plot_head_ablation(ablation)
    for axes, values in zip(figure.axes, (ablation.mean_loss, ablation.zero_loss, ablation.importance)):
        shown = axes.images[0].get_array()
        np.testing.assert_allclose(shown[0, :2], values['blocks.0.attn'])
        np.testing.assert_allclose(shown[1], values['blocks.1.attn'])
        assert np.ma.getmaskarray(np.ma.masked_invalid(shown))[0].tolist() == [False, False, True]
    first, second = (axes.images[0].norm for axes in figure.axes[:2])
    assert (first.vmin, first.vmax) == (second.vmin, second.vmax) and first.vmin == -first.vmax
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ['block 0', 'block 1']


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'sa_quadratic_cifar'])
def test_a_patch_looks_on_the_photo(name):
    """Uniform attention leaves the photo as it is; what gets more, or less, is tinted."""
    torch.manual_seed(0)
    model = trained_like(small_timm(name)) if name.startswith('sa_') else small_vit(name)
    images = torch.randn(2, 3, SIZE, SIZE)
    figure = plot_attention(model, images, 'blocks.0.*', query=(1, 0), overlay=True)
    maps = attention_maps(model, images)['blocks.0.attn']
    size = math.isqrt(maps.shape[-1])
    keys = maps[0, :, -size * size :, -size * size :][:, size].unflatten(-1, (size, size))
    panels = {axes.get_title(): axes for axes in reversed(figure.axes)}
    assert len(figure.axes) == 2 * 5 + 1 and 'rollout' not in panels
    photo = panels['image 0'].images[0].get_array()
    for head in range(3):
        axes = panels[f'head {head}']
        tint, below = axes.images
        np.testing.assert_allclose(tint.get_array(), relative(keys[head]), rtol=1e-4)
        assert np.array_equal(below.get_array(), photo) and below.get_zorder() < tint.get_zorder()
        assert list(below.get_extent()) == list(tint.get_extent()) and query_of(axes) == (1, 0)
        far = np.abs(np.log(tint.get_array())).ravel()
        assert (np.diff(tint.get_alpha().ravel()[far.argsort()]) >= 0).all() and tint.get_alpha().max() <= 0.8
    uniform = Figure().subplots()
    assert draw_attention(uniform, np.ones((2, 2)), np.zeros((4, 4))).get_alpha().max() < 1e-6


@pytest.mark.parametrize('heads', [3, pytest.param(16, marks=pytest.mark.slow)])
def test_figures_of_few_and_many_heads_are_readable(heads):
    """No title covers another, and maps stand side by side."""
    model, images = small_vit('vit_tiny_patch16_224', embed_dim=48, num_heads=heads), torch.randn(1, 3, SIZE, SIZE)
    ablation = head_ablation(model, [images], lambda model, batch: output_of(model, batch).square().mean())
    for figure in (
        plot_attention(model, images),
        plot_head_ablation(ablation),
        plot_heads(mean_attention(model, images)),
    ):
        image_of(figure)  # places what is in it
        titles = [axes.title.get_window_extent() for axes in figure.axes if axes.get_title()]
        assert not any(a.overlaps(b) for a, b in combinations(titles, 2))
        assert all(title.x0 >= 0 and title.x1 <= figure.bbox.width for title in titles)
    boxes = [axes.get_window_extent() for axes in figure.axes[:heads]]
    assert all(b.x0 - a.x1 < 0.5 * a.width for a, b in zip(boxes, boxes[1:]))


def test_what_cannot_be_drawn():
    vit, images = small_vit('vit_tiny_patch16_224'), torch.randn(1, 3, SIZE, SIZE)
    with pytest.raises(TypeError, match=r'images=3 must be a tensor \(B, C, H, W\)'):
        plot_attention(vit, 3)
    with pytest.raises(ValueError, match='layers chooses none.*: blocks.0.attn'):
        plot_attention(vit, images, layers=['x'])
    with pytest.raises(ValueError, match=r'query=\(9, 0\) must be a row from 0 to'):
        plot_attention(vit, images, query=(9, 0))
    with pytest.raises(TypeError, match=r'ablation=<Tensor of shape \(2, 3\)> must be the result of head_ablation'):
        plot_head_ablation(torch.rand(2, 3))
