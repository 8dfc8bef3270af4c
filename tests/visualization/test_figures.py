"""Figures of heads: where things are drawn."""

import math
import xml.dom.minidom

import numpy as np
import pytest
import torch
from helpers.small import model_with_head, small_timm
from helpers.vits import small_vit
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from attncnn_plugin.analysis import HeadReport, MeanAttention, head_report, mean_attention
from attncnn_plugin.analysis.report import layer_report
from attncnn_plugin.attention.positions import GaussianHeads
from attncnn_plugin.pruning import prune_heads
from attncnn_plugin.visualization import (
    plot_attention_centers,
    plot_attention_distance,
    plot_center_movement,
    plot_heads,
    save_figure,
)
from attncnn_plugin.visualization.style import color_of, image_of

HARD = 40.0  # √(2α) of a head that attends to one pixel


def maps_of(model, size):
    """By position."""
    return mean_attention(model, size=size, part='position')


def centers_of(model, size, **options):
    return plot_attention_centers(maps_of(model, size), **options)


def head_marks(axes):
    """Row and column of the dot of each head, from the lines that are drawn."""
    return {
        line.get_label(): (line.get_ydata()[0], line.get_xdata()[0])
        for line in axes.get_lines()
        if line.get_label().startswith('head')
    }


def contours_of(axes, head=0):
    """Rows and columns of the lines of a head's contours, by line style."""
    lines = [line for line in axes.get_lines() if line.get_zorder() == 3 and line.get_color() == color_of(head)]
    return {line.get_linestyle(): np.stack([line.get_ydata(), line.get_xdata()], axis=-1) for line in lines}


@pytest.mark.parametrize(
    'name, factor', [('sa_quadratic_cifar', HARD), ('sa_generalized_cifar', [[HARD, 0.0], [0.0, HARD]])]
)
def test_a_head_one_row_down_and_two_columns_left(name, factor):
    figure = centers_of(model_with_head((1.0, -2.0), name, factor), (8, 8))
    for axes in figure.axes:
        assert head_marks(axes)['head 0'] == (1, -2)
        right, down = np.diff(axes.transData.transform([(0, 0), (-2, 1)]), axis=0)[0]
        assert right < 0 and down < 0  # on the canvas, whose y axis points up
        (query,) = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        assert query.get_xy() == (-0.5, -0.5) and to_hex(query.get_facecolor()) == '#000000'
        assert axes.get_aspect() == 1


def test_a_head_one_row_down_and_two_columns_left_by_its_probabilities():
    model = model_with_head((1.0, -2.0), sqrt_precision=HARD)
    hard = {name: MeanAttention(own.probs, own.grid) for name, own in maps_of(model, (8, 8)).items()}
    figure = plot_attention_centers(hard)
    for axes in figure.axes:
        assert head_marks(axes)['head 0'] == pytest.approx((1, -2), abs=1e-6)
        assert contours_of(axes) == {}  # its maps show how it spreads
    figure = plot_heads(maps_of(model, (8, 8)))
    for axes in figure.axes[:-1]:
        if axes.get_title() == 'head 0':
            (map_,) = axes.get_images()
            ((row, column),) = np.argwhere(map_.get_array() > 63)  # of 64 tokens
            assert (row, column) == (4 + 1, 4 - 2) and list(map_.get_extent()) == [-0.5, 7.5, 7.5, -0.5]


@pytest.mark.parametrize('mass, style', [(0.5, '-'), (0.9, '--')])
def test_circles_are_drawn_around_their_heads(mass, style):
    figure = centers_of(model_with_head((1.0, -2.0), sqrt_precision=0.8), (8, 8))
    for axes in figure.axes:
        line = contours_of(axes)[style]
        radius = math.sqrt(math.log(1 / (1 - mass)) / (0.8**2 / 2))
        assert np.allclose(np.linalg.norm(line - [1, -2], axis=1), radius)


@pytest.mark.parametrize('sign', [-1, 1])
def test_a_centre_beyond_the_panel_is_hollow_on_its_border(sign):
    axes = centers_of(model_with_head((0.0, sign * 30.0)), (8, 8)).axes[0]
    reach = axes.get_xlim()[1]
    assert reach == 7.5 and head_marks(axes)['head 0'] == (0, sign * reach)
    marks = {line.get_label(): line for line in axes.get_lines()}
    assert to_hex(marks['head 0'].get_markerfacecolor()) == '#ffffff'
    assert to_hex(marks['head 1'].get_markerfacecolor()) != '#ffffff'


def test_discs_do_not_cover_each_other():
    model = small_timm('sa_quadratic16_cifar', num_heads=16, depth=1)
    with torch.no_grad():
        model.blocks[0].attn.encoding.center.mul_(0.2)
    axes = centers_of(model, (8, 8)).axes[0]
    places = {text.get_text(): text.get_position() for text in axes.texts}
    assert set(places) == set(map(str, range(16)))
    least = min(math.dist(a, b) for name, a in places.items() for other, b in places.items() if name != other)
    assert least >= 0.12 * axes.get_xlim()[1] - 1e-9
    assert len(head_marks(axes)) == 16


def test_heads_keep_their_numbers():
    model = small_timm('sa_quadratic_cifar')
    prune_heads(model, {0: [1]})
    numbers = {'blocks.0.attn': [0, 2], 'blocks.1.attn': [0, 1, 2]}
    axes = centers_of(model, (8, 8), numbers=numbers).axes[0]
    assert head_marks(axes)['head 2'] == pytest.approx(tuple(model.blocks[0].attn.encoding.center[1].tolist()))
    assert set(head_marks(axes)) == {'head 0', 'head 2'}
    titles = [axes.get_title() for axes in plot_heads(maps_of(model, (8, 8)), numbers=numbers).axes[:2]]
    assert titles == ['head 0', 'head 2']


def test_a_head_that_attends_to_all_pixels_alike_is_white():
    """And one that looks beyond the grid, by a null key, has less everywhere."""
    probs = torch.stack([torch.full((16, 16), 1 / 16), torch.full((16, 16), 1e-9)])
    alike, nowhere = (axes.get_images()[0] for axes in plot_heads({'a': MeanAttention(probs, (4, 4))}).axes[:2])
    assert alike.to_rgba(alike.get_array())[..., :3].min() > 0.99
    assert np.allclose(nowhere.to_rgba(nowhere.get_array()), nowhere.cmap(0.0))


def test_one_wide_head_does_not_set_the_limits():
    """Of four contours one is far wider than the panel; every centre is in it."""
    factor = torch.tensor([2.0, 2.0, 2.0, 0.1])[:, None, None].double() * torch.eye(2)  # 0.1: a circle of radius 11.8
    centers = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 5.0], [0.0, 1.0]], dtype=torch.float64)
    maps = MeanAttention(torch.full((4, 400, 400), 1 / 400), (20, 20), gaussian=GaussianHeads(centers, factor))
    axes = plot_attention_centers({'a': maps}).axes[0]
    assert 5.5 <= axes.get_xlim()[1] < 7 < np.abs(contours_of(axes, 3)['-']).max()
    assert head_marks(axes)['head 2'] == (0, 5)


def test_wrong_arguments_of_figures():
    maps = maps_of(small_timm('sa_quadratic_cifar'), (2, 2))
    with pytest.raises(ValueError, match=r'query=\(2, 0\) must be a row from 0 to 1'):
        plot_heads(maps, query=(2, 0))
    for plot in (plot_attention_centers, plot_heads):
        with pytest.raises(ValueError, match='maps is empty'):
            plot({})
        with pytest.raises(TypeError, match=r'maps=<.* of shape \(2, 3, 32, 32\)> must be the'):
            plot(torch.rand(2, 3, 32, 32))
    with pytest.raises(ValueError, match='centers is empty'):
        plot_center_movement({})


def test_figures_leave_no_trace():
    before, open_before = dict(pyplot.rcParams), pyplot.get_fignums()
    model = small_timm('sa_quadratic_cifar')
    image = image_of(centers_of(model, (4, 4)))
    assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3 and image.std() > 10
    assert pyplot.get_fignums() == open_before and dict(pyplot.rcParams) == before
    with pyplot.rc_context({'font.size': 20, 'axes.facecolor': 'red', 'lines.linewidth': 9}):
        assert np.array_equal(image_of(centers_of(model, (4, 4))), image)  # whatever the settings outside are


def test_files_by_their_suffix(tmp_path):
    model = small_timm('sa_quadratic_cifar')
    figure = centers_of(model, (4, 4))
    save_figure(figure, tmp_path / 'a.svg')
    save_figure(figure, tmp_path / 'new' / 'a.png')
    assert (tmp_path / 'new' / 'a.png').read_bytes()[:4] == b'\x89PNG'
    assert xml.dom.minidom.parse(str(tmp_path / 'a.svg')).documentElement.tagName == 'svg'
    save_figure(centers_of(model, (4, 4)), tmp_path / 'b.svg')
    assert (tmp_path / 'a.svg').read_bytes() == (tmp_path / 'b.svg').read_bytes()
    for name in ('a.pdf', 'b.pdf'):
        save_figure(centers_of(model, (4, 4)), tmp_path / name)
    assert (tmp_path / 'a.pdf').read_bytes() == (tmp_path / 'b.pdf').read_bytes()
    with pytest.raises(ValueError, match=r'must end in .png, .svg or .pdf'):
        save_figure(figure, tmp_path / 'a.jpg')


def test_the_movement_of_centres():
    """A head that was pruned after epoch 1 ends in a cross."""
    ways = {0: np.array([[0, 0, 0], [1, 0.5, -1], [2, 1, -2]]), 3: np.array([[0, 1, 1], [1, 2, 1]])}
    axes = plot_center_movement({'backbone.blocks.0.attn': ways}).axes[0]
    assert axes.get_title() == 'block 0' and axes.yaxis_inverted() and not axes.xaxis_inverted()
    assert head_marks(axes) == {'head 0': (1, -2)}
    drawn = [line.get_xydata().tolist() for line in axes.get_lines() if len(line.get_xdata()) > 2]
    assert drawn == [[[0, 0], [-1, 0.5], [-2, 1]]]
    assert [line.get_xydata().tolist() for line in axes.get_lines() if line.get_marker() == 'x'] == [[[1, 2]]]


def test_centres_of_windows_are_means_over_queries():
    """Uniform heads look nowhere in particular; a single query would show its place in its window."""
    model = small_vit('swin_tiny_patch4_window7_224', img_size=64, embed_dim=4, depths=(2,), num_heads=(1,))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    images = torch.randn(1, 3, 64, 64)
    maps = mean_attention(model, images)
    figure = plot_attention_centers(maps)
    assert [head_marks(axes) for axes in figure.axes] == [{'head 0': pytest.approx((0, 0), abs=1e-5)}] * 2


@pytest.mark.parametrize('layers, columns, width', [(1, 1, 5.0), (2, 2, 5.2), (4, 4, 10.4), (5, 3, 7.8)])
def test_panels_are_in_rows_and_show_what_is_near(layers, columns, width):
    """Four in a row, or three where there are more; 2.5 tokens from the query at least."""
    way = np.array([[0, 0.0, 0.0], [1, 1.0, -2.0]])
    figure = plot_center_movement({f'blocks.{layer}.attn': {0: way} for layer in range(layers)})
    assert {axes.get_subplotspec().colspan.start for axes in figure.axes} == {*range(columns)}
    assert figure.get_figwidth() == pytest.approx(width)
    assert figure.axes[0].get_xlim() == (-2.5, 2.5)
    (far,) = plot_center_movement({'blocks.0.attn': {0: 2 * way}}).axes
    assert far.get_xlim() == pytest.approx((-4.4, 4.4))
    (near,) = plot_attention_centers({'a': MeanAttention(torch.eye(400)[None], (20, 20))}).axes
    assert near.get_xlim() == (-3.5, 3.5)


def test_distances():
    """In percent of the side of the grid; of heads that look at themselves alone, too, or nowhere on the grid."""
    model = model_with_head((0.0, 3.0), sqrt_precision=HARD)
    reports = {'a': head_report(model, size=(8, 8)), 'b': head_report(model, size=(6, 6))}
    figure = plot_attention_distance(reports)
    assert [axes.get_title() for axes in figure.axes] == ['a', 'b', '', '']
    for axes, report, size in zip(figure.axes, reports.values(), (8, 6)):
        *dots, mean = axes.get_lines()
        for place, (layer, drawn) in enumerate(zip(report.layers, dots)):
            expected = [100 * head.distance / size for head in layer.heads]
            assert list(drawn.get_ydata()) == pytest.approx(expected) and set(drawn.get_xdata()) == {place}
            assert mean.get_ydata()[place] == pytest.approx(np.mean(expected))
    probs = torch.stack([torch.eye(16), torch.zeros(16, 16)])
    far, near = plot_attention_distance({'a': HeadReport((layer_report(MeanAttention(probs, (4, 4))),))}).axes
    assert far.get_ylim()[0] == near.get_ylim()[0] == 0 < far.get_ylim()[1] and near.get_ylim()[1] > 100
