"""Figures of heads: where things are drawn."""

import math
import xml.dom.minidom

import numpy as np
import pytest
import torch
from helpers.logs import accuracy, write_log
from helpers.small import model_with_head, small_cmhsa, small_timm
from helpers.vits import small_vit
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from attncnn_plugin.analysis import MeanAttention, mean_attention
from attncnn_plugin.attention.positions import GaussianHeads
from attncnn_plugin.pruning import prune_heads
from attncnn_plugin.visualization import (
    plot_attention_centers,
    plot_attention_distance,
    plot_attention_probs,
    plot_center_movement,
    plot_metric,
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
        for line in contours_of(axes).values():
            assert np.abs(line - [1, -2]).max() < 0.5
    figure = plot_attention_probs(maps_of(model, (8, 8)))
    for axes in figure.axes[:-1]:
        if axes.get_title().startswith('head 0:'):
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
    titles = [axes.get_title() for axes in plot_attention_probs(maps_of(model, (8, 8)), numbers=numbers).axes[:2]]
    assert sorted(title.split(':')[0] for title in titles) == ['head 0', 'head 2']


def test_probabilities_are_zoomed():
    """A head is in the same column in all layers."""
    model = model_with_head((0.0, 3.0), sqrt_precision=HARD)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.encoding.center[1:] = torch.tensor([[-1.0, 0.0], [0.0, 0.0]])
            block.attn.encoding.sqrt_precision.fill_(HARD)
    figure = plot_attention_probs(maps_of(model, (10, 12)))
    assert [axes.get_title() for axes in figure.axes[:3]] == ['head 0: 1', 'head 1: 1', 'head 2: 1']
    assert [axes.get_ylabel() for axes in figure.axes[:-1] if axes.get_ylabel()] == ['block 0', 'block 1']
    assert all((axes.get_xlim(), axes.get_ylim()) == ((2.5, 9.5), (8.5, 1.5)) for axes in figure.axes[:6])
    (query,) = figure.axes[0].patches
    assert query.get_xy() == (5.5, 4.5) and to_hex(query.get_edgecolor()) == '#000000'
    # Beyond the grid there is nothing to show.
    corner = plot_attention_probs(maps_of(model, (10, 12)), (0, 11)).axes[0]
    assert list(corner.get_images()[0].get_extent()) == [-0.5, 11.5, 9.5, -0.5] and corner.get_xlim() == (7.5, 14.5)
    whole = plot_attention_probs(maps_of(model, (10, 12)), (2, 7), zoom=None).axes[0]
    assert whole.get_images()[0].get_array().shape == (10, 12) and whole.patches[0].get_xy() == (6.5, 1.5)


def test_a_head_that_attends_to_all_pixels_alike_is_white():
    """And one that looks beyond the grid, by a null key, has less everywhere."""
    probs = torch.stack([torch.full((16, 16), 1 / 16), torch.full((16, 16), 1e-9)])
    alike, nowhere = (
        axes.get_images()[0] for axes in plot_attention_probs({'a': MeanAttention(probs, (4, 4))}).axes[:2]
    )
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
    with pytest.raises(ValueError, match='zoom=4 must be odd'):
        plot_attention_probs(maps, zoom=4)
    for plot in (plot_attention_centers, plot_attention_probs):
        with pytest.raises(ValueError, match='maps is empty'):
            plot({})
        with pytest.raises(ValueError, match=r'query=\(2, 0\) must be a row from 0 to 1'):
            plot({'a': MeanAttention(torch.eye(4)[None], (2, 2))}, query=(2, 0))
        with pytest.raises(TypeError, match=r'maps=<.* of shape \(2, 3, 32, 32\)> must be the'):
            plot(torch.rand(2, 3, 32, 32))
    with pytest.raises(ValueError, match='centers is empty'):
        plot_center_movement({})


def test_heads_that_look_beyond_the_grid_are_named():
    model = small_cmhsa('conv')
    model.to_attention()  # a shift a head, the null key outside
    axes = centers_of(model, (8, 8), query=(0, 0)).axes[0]
    drawn = {int(name.split()[1]) for name in head_marks(axes)}
    title, beyond = axes.get_title().split(', beyond the grid: ')
    assert title == 'block 0' and drawn | set(map(int, beyond.split(', '))) == set(range(9)) and len(drawn) == 4
    assert len(head_marks(centers_of(model, (8, 8)).axes[0])) == 9


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


def test_accuracy_of_several_runs(tmp_path):
    for name in ('a', 'b'):
        write_log(tmp_path / name, '1', accuracy(10.0, 20.0 if name == 'a' else 30.0))
    runs = {'first': tmp_path / 'a', 'second': tmp_path / 'b'}
    figure = plot_metric(runs, offsets={'second': 2})  # C20, Figure 13: begins where the other one ends
    lines = figure.axes[0].get_lines()
    assert [line.get_xydata().tolist() for line in lines] == [[[1, 10], [2, 20]], [[3, 10], [4, 30]]]
    assert figure.axes[0].get_ylabel() == 'accuracy, %'
    with pytest.raises(ValueError, match="offsets={'third': 2} must be of some of the runs, which are first, second"):
        plot_metric(runs, offsets={'third': 2})
    labels = [text.get_text() for text in figure.legends[0].texts]
    assert labels == ['first, 20.0 at the end', 'second, 30.0 at the end']
    with pytest.raises(ValueError, match="metric='accuracy/top5' is not in the logs.*accuracy/top1"):
        plot_metric({'a': tmp_path / 'a'}, 'accuracy/top5')
    with pytest.raises(FileNotFoundError, match='LocalVisBackend'):
        plot_metric({'a': tmp_path})
    with pytest.raises(ValueError, match='runs is empty'):
        plot_metric({})


def test_the_transition_is_marked_once(tmp_path):
    for name in 'ab':
        write_log(tmp_path / name, '1', [*accuracy(10.0, 20.0), {'transition/parameters': 9, 'step': 1}])
    axes = plot_metric({name: tmp_path / name for name in 'ab'}).axes[0]
    (mark,) = [line for line in axes.get_lines() if line.get_gid() == 'transition']
    assert set(mark.get_xdata()) == {1}
    assert [text.get_text() for text in axes.texts] == ['convolutions become attention']


def test_the_movement_of_centres():
    """A head that was pruned after epoch 1 ends in a cross."""
    ways = {0: np.array([[0, 0, 0], [1, 0.5, -1], [2, 1, -2]]), 3: np.array([[0, 1, 1], [1, 2, 1]])}
    axes = plot_center_movement({'backbone.blocks.0.attn': ways}).axes[0]
    assert axes.get_title() == 'block 0' and axes.yaxis_inverted() and not axes.xaxis_inverted()
    assert head_marks(axes) == {'head 0': (1, -2)}
    drawn = [line.get_xydata().tolist() for line in axes.get_lines() if len(line.get_xdata()) > 2]
    assert drawn == [[[0, 0], [-1, 0.5], [-2, 1]]]
    assert [line.get_xydata().tolist() for line in axes.get_lines() if line.get_marker() == 'x'] == [[[1, 2]]]


def test_curves_of_trainings_by_iterations(tmp_path):
    write_log(tmp_path / 'a', '1', [{'loss': 1.0, 'iter': 2, 'step': 2}, *accuracy(10.0, 15.0)])
    write_log(tmp_path / 'b', '1', [*accuracy(20.0, 30.0), {'loss': 1.0, 'epoch': 2, 'iter': 8, 'step': 8}])
    assert plot_metric({'a': tmp_path / 'a'}).axes[0].get_xlabel() == 'iteration'
    assert plot_metric({'b': tmp_path / 'b'}).axes[0].get_xlabel() == 'epoch'
    assert plot_metric({name: tmp_path / name for name in 'ab'}).axes[0].get_xlabel() == 'epoch or iteration'
    write_log(tmp_path / 'c', '1', [{'accuracy/top1': 10.0, 'step': 0}, {'accuracy/top1': 15.0, 'step': 0}])
    with pytest.raises(ValueError, match='of step 0.*log_metric_by_epoch=False'):
        plot_metric({'c': tmp_path / 'c'})


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
    figure = plot_attention_centers(maps, query=(8, 9))  # one that is asked for is shown
    assert head_marks(figure.axes[0]) == {'head 0': pytest.approx((1.5, 0.5), abs=1e-5)}


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


def test_distances_of_heads_that_look_nowhere_else():
    head = {'distance': 0.0, 'mass_3x3': 1.0}
    far, near = plot_attention_distance({'a': {'layers': [{'name': 'b', 'grid': [4, 4], 'heads': [head]}]}}).axes
    assert far.get_ylim() == (0, 1.05) and near.get_ylim() == pytest.approx((0, 105))
