"""Head reports: every claim against a computation by brute force, exact sentences for convolutions, text and JSON."""

import dataclasses
import itertools
import json
import math
import re

import numpy as np
import pytest
import timm
import torch
from helpers.head_reports import LAYERS, brute_force, check_schema, hard_layer, shift_operators, values, window_shifts
from helpers.small import small_cmhsa, small_timm
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from attncnn_plugin.analysis import (
    HeadReport,
    MeanAttention,
    head_centers,
    head_report,
    mean_attention,
)
from attncnn_plugin.analysis.report import layer_report
from attncnn_plugin.analysis.shift_statistics import ShiftMaps, moments, nearest_shifts
from attncnn_plugin.attention import ContentAttention, GeneralizedQuadraticAttention, WindowImageAttention
from attncnn_plugin.attention.window import Window
from attncnn_plugin.convert import conv_to_mhsa, expressible, expressible_shifts
from attncnn_plugin.pruning import find_degenerate_heads, prune_heads


def report_of(layer, size):
    """The report of a layer by position."""
    (report,) = head_report(layer, size=size).layers
    return report


def test_the_covariance_of_a_nearly_hard_head():
    """Far smaller than the square of the shift, from which it must not be subtracted."""
    near, nearest = shift_operators([(0, 1), (0, 2)], (8, 8), 'zeros')
    maps = MeanAttention((nearest + 1e-13 * near)[None], (8, 8))
    _, spread = moments(ShiftMaps(maps).interior_sums, (7, 7))
    assert head_centers(maps)[1].item() == pytest.approx(math.sqrt(1e-13 / 2), rel=1e-6)
    assert torch.allclose(spread[0], torch.tensor([[0, 0], [0, 1e-13]]).double(), rtol=1e-6, atol=1e-24)


def test_parameters_of_gaussians():
    report = report_of(hard_layer([[1.5, -2.0], [9.0, 0.0]], torch.tensor([0.5, 2.0])), (6, 6))
    assert [head.center for head in report.heads] == [(1.5, -2.0), (9.0, 0.0)]
    assert [head.covariance for head in report.heads] == [((4.0, 0.0), (0.0, 4.0)), ((0.25, 0.0), (0.0, 0.25))]
    assert report.heads[0].row()[1:3] == ['(1.5, -2)', '(2, 2)']

    layer = GeneralizedQuadraticAttention(3, 4)
    covariance = torch.tensor([[2.0, 0.6], [0.6, 1.0]])
    with torch.no_grad():
        layer.encoding.sqrt_precision[0] = torch.diag(torch.tensor([0.5, 0.25]))
        layer.encoding.sqrt_precision[1] = torch.linalg.cholesky(torch.linalg.inv(covariance))
        layer.encoding.sqrt_precision[2] = 0
        layer.encoding.sqrt_precision[3] = torch.diag(torch.tensor([3.0, 1e-4]))
    wide, tilted, uniform, stripe = report_of(layer, (6, 6)).heads
    assert wide.row()[2] == '(2, 4)' and tilted.row()[2] == '(1.41, 1)'  # along rows, along columns
    assert torch.allclose(torch.tensor(tilted.covariance), covariance)
    assert uniform.covariance is None and uniform.row()[2] == '-'
    assert uniform.kind == 'uniform' and uniform.criterion == 'uniform' and '< 1e-05' in uniform.why
    assert stripe.row()[2] == '(0.33, 1e+04)'
    assert stripe.criterion == 'stripe' and 'condition number' in stripe.why


@pytest.mark.parametrize('kind', LAYERS)
@settings(max_examples=6)
@given(size=st.tuples(st.integers(3, 7), st.integers(3, 7)), seed=st.integers(0, 999))
@example(size=(4, 4), seed=0)  # just a quarter of the queries have a key at (2, 2)
def test_statistics(kind, size, seed):
    torch.manual_seed(seed)
    layer = LAYERS[kind]()
    report = report_of(layer, size)
    probs = layer.position_probs(size).detach()
    assert len(report.heads) == 4 and report.attention == 'position'
    for head, maps in zip(report.heads, probs):
        expected = brute_force(maps, *size)
        for name in ('entropy', 'distance', 'mass_3x3', 'mass_5x5'):
            assert getattr(head, name) == pytest.approx(expected[name], abs=1e-5)
        assert head.relative_entropy == pytest.approx(expected['entropy'] / math.log(math.prod(size)), abs=1e-5)
        assert head.share == pytest.approx(expected['share'], abs=1e-5)
        assert expected['wholes'][head.nearest_shift][0] == pytest.approx(
            max(inner for inner, _ in expected['wholes'].values()), abs=2e-6
        )
        kinds = {'hard': head.share >= 0.9, 'uniform': head.share < 0.9 and head.relative_entropy > 0.99}
        assert head.kind == next((name for name, true in kinds.items() if true), 'soft')
        if kind not in ('quadratic', 'generalized'):
            assert head.center == pytest.approx(expected['center'], abs=1e-4)
            assert np.allclose(head.covariance, expected['covariance'], atol=1e-4)


@pytest.mark.parametrize('kind', LAYERS)
def test_best_convolution(kind):
    """The error is that of the best of all convolutions, in the linear map from input to output."""
    layer, size = LAYERS[kind](), (6, 5)
    report = report_of(layer, size)
    probs = layer.position_probs(size).detach().double()
    whole = sum(torch.einsum('qk,oi->oiqk', p, v.double()) for p, v in zip(probs, values(layer))).flatten(2)
    assert [entry.kernel_size for entry in report.convolutions] == [(3, 3), (5, 5)]
    for entry in report.convolutions:
        assert entry.padding_mode == ('zeros' if kind == 'patch' else 'replicate')
        operators = shift_operators(window_shifts(entry.kernel_size), size, entry.padding_mode).flatten(1)
        best = torch.linalg.lstsq(operators.T, whole.flatten(0, 1).T, driver='gelsd').solution
        left = whole.flatten(0, 1).T - operators.T @ best
        assert entry.error == pytest.approx((left.norm() / whole.norm()).item(), abs=1e-5)
        reach = entry.kernel_size[0] // 2
        inside = torch.zeros(size, dtype=torch.bool)
        inside[reach : size[0] - reach, reach : size[1] - reach] = True
        left, there = (m.unflatten(0, (30, 30))[inside.flatten()] for m in (left, whole.flatten(0, 1).T))
        assert entry.interior_error == pytest.approx((left.norm() / there.norm()).item(), abs=1e-5)
    assert report.best == min(report.convolutions, key=lambda entry: entry.error)
    near = report.best
    words = f'  {near}, {near.interior_error:.3g} inside (nearest)'
    assert words in str(report).splitlines()
    assert str(HeadReport((report,))).endswith(f'{"x".join(map(str, near.kernel_size))}: {near.error:.3g}')


@pytest.mark.parametrize(
    'conv, summary',
    [
        (nn.Conv2d(3, 4, 3, padding=1), '3x3 convolution, error 0'),
        (nn.Conv2d(3, 4, 1), '1x1 convolution, error 0'),
        (nn.Conv2d(3, 4, 5, padding='same', padding_mode='reflect'), '5x5 convolution, error 0'),
        (nn.Conv2d(4, 4, (2, 4), groups=2, bias=False), '2x4 convolution, error 0'),
        (nn.Conv2d(3, 4, 3, stride=(1, 3)), '3x3 convolution with stride 1x3, error 0'),
        (nn.Conv2d(3, 4, (5, 3), dilation=(1, 3)), '5x3 convolution dilated by 1x3, error 0'),
        (nn.Conv2d(3, 4, 3, dilation=2, stride=2), '3x3 convolution dilated by 2x2 with stride 2x2, error 0'),
    ],
)
def test_convolutions_are_called_convolutions(conv, summary):
    report = report_of(conv_to_mhsa(conv)[0], (10, 14))
    assert report.summary == summary and f'  {summary}, 0 inside' in str(report).splitlines()
    assert len(report.heads) == math.prod(conv.kernel_size)
    assert all(head.kind == 'hard' and not head.degenerate for head in report.heads)
    assert all(head.nearest_shift == head.center for head in report.heads)
    if conv.stride == (1, 1) and conv.padding == 'same':
        assert all(entry.expressible for entry in report.spanned)
    if conv.stride != (1, 1):
        assert report.spanned == ()


def test_soft_heads_of_a_convolution():
    """A head a kernel position is not needed: with fewer the layer still is a convolution."""
    conv = nn.Conv2d(3, 4, 3, padding='same', dilation=2)
    report = report_of(WindowImageAttention(3, 4, 4, Window.of(conv)), (8, 8))
    assert report.summary == '3x3 convolution dilated by 2x2, error 0'
    assert {head.kind for head in report.heads} == {'soft'} and report.spanned[1].worst == pytest.approx(1)


@pytest.mark.parametrize('size', [(1, 2), (2, 2), (3, 3)])
def test_grids_without_an_interior(size):
    """Where no query has its window inside, shifts that coincide express anything: that is no convolution."""
    report = report_of(LAYERS['quadratic'](), size)
    kernels = [(3, 3)] if size == (3, 3) else []
    assert [entry.kernel_size for entry in report.convolutions] == kernels
    assert [entry.kernel_size for entry in report.spanned] == kernels
    assert ('smaller than a 3x3 kernel' in str(report)) is (not kernels)
    assert [head.mass_5x5 for head in report.heads] == pytest.approx([1.0] * 4)


@pytest.mark.parametrize('padding_mode', ['zeros', 'reflect', 'circular'])
def test_padding_is_no_part_of_a_head(padding_mode):
    """What a soft head reads from the padding does not count: its shares are the probabilities of its window."""
    conv = nn.Conv2d(3, 4, 5, padding=2, padding_mode=padding_mode)
    attention = WindowImageAttention(3, 4, 3, Window.of(conv))
    for head, probs in zip(report_of(attention, (7, 8)).heads, attention.encoding()):
        assert head.mass_5x5 == pytest.approx(1) and head.mass_3x3 == pytest.approx(probs[1:4, 1:4].sum().item())


@pytest.mark.parametrize(
    'centers, summary',
    [
        (list(itertools.product((-2, -1, 0, 1, 2), (0,))), '5x5 convolution, error 0'),
        ([(0, 0), (0, 0), (0, 1)], '3x3 convolution, error 0'),
        (list(itertools.product((-2, 0, 2), (-1, 0, 1))), '5x5 convolution, error 0'),
        ([(-1, 0), (0, -1), (0, 0), (0, 1), (1, 0)], '3x3 convolution, error 0'),
    ],
)
def test_hard_heads(centers, summary):
    report = report_of(hard_layer([list(map(float, center)) for center in centers]), (9, 10))
    assert report.summary == summary
    assert [head.nearest_shift for head in report.heads] == centers
    assert [head.relative_entropy for head in report.heads] == [0.0] * len(centers)
    for entry in report.spanned:
        shifts = set(itertools.product(range(-(entry.kernel_size[0] // 2), entry.kernel_size[0] // 2 + 1), repeat=2))
        assert set(entry.expressible) == shifts & set(centers) and set(entry.missing) == shifts - set(centers)
        if set(centers) <= shifts:  # others are in the span at the border, where they are replicate padding
            assert entry.error == pytest.approx((len(entry.missing) / len(shifts)) ** 0.5)
        assert f'  {entry}' in str(report).replace('\n    ', ' ').splitlines()
    for head, other in itertools.combinations(report.heads, 2):
        if head.nearest_shift == other.nearest_shift:
            assert other.criterion == 'duplicate' and f'from head {head.head}' in other.why


def test_the_smaller_kernel_is_named_where_the_larger_one_is_hardly_nearer():
    """Heads of a 3x3 kernel leak out of it as they get softer."""
    centers = [list(map(float, center)) for center in itertools.product((-1, 0, 1), repeat=2)]
    for alpha, kernel_size in ((12.0, (3, 3)), (4.0, (5, 5))):
        report = report_of(hard_layer(centers, alpha**0.5), (9, 9))
        small, large = (entry.error for entry in report.convolutions)
        assert report.best.kernel_size == kernel_size and large < small and (small - large < 0.01) is (alpha == 12)


def test_of_shifts_that_get_equally_much_the_one_of_all_queries():
    """Inside the grid half of the attention goes right, half down; at its border all of it goes down."""
    right, down = shift_operators([(0, 1), (1, 0)], (8, 8), 'replicate')
    inside = torch.zeros(8, 8, dtype=torch.bool)
    inside[2:-2, 2:-2] = True
    maps = torch.where(inside.flatten()[:, None], (right + down) / 2, down)
    assert nearest_shifts(ShiftMaps(MeanAttention(maps[None], (8, 8)))) == [((1, 0), 0.5)]


@pytest.mark.parametrize(
    'center, precision, nearest, kind',
    [
        ((-1.61, 0.19), 1 / 0.955, (-2, 0), 'soft'),
        ((2.6, -3.4), 1.0, (3, -3), 'soft'),
        ((6.0, -1.0), 40.0, (6, -1), 'hard'),
        ((9.0, 0.0), 40.0, (7, 0), 'hard'),  # the last row, from everywhere
        ((5.5, 0.0), 40.0, (5, 0), 'soft'),
    ],
)
def test_nearest_shift_is_not_drawn_to_the_query(center, precision, nearest, kind):
    """At the border what is left is renormalized: short shifts, which stay in the grid there, must not gain by it."""
    (head,) = report_of(hard_layer([list(center)], precision), (8, 8)).heads
    assert head.nearest_shift == nearest and head.kind == kind


def test_of_shifts_with_equal_shares_the_shortest_is_the_nearest():
    """To 1e-6 a query, which is more than rounding; the second head gives more than that to the longer one."""
    short, long = shift_operators([(0, 1), (0, 2)], (8, 8), 'replicate')
    probs = torch.stack([(0.5 - more) * short + (0.5 + more) * long for more in (4e-7, 1e-6)])
    assert [head.nearest_shift for head in layer_report(MeanAttention(probs, (8, 8))).heads] == [(0, 1), (0, 2)]


def test_one_fixed_key_is_no_hard_head():
    """All queries attend to the same token: no shift, but for a corner, which is replicate padding."""
    probs = torch.zeros(1, 36, 36)
    probs[:, :, 14] = 1
    report = layer_report(MeanAttention(probs, (6, 6)))
    assert report.best.error > 0.99 and report.heads[0].kind == 'soft' and report.heads[0].entropy == 0
    report = layer_report(MeanAttention(probs.roll(-14, dims=2), (6, 6)))
    assert report.heads[0].kind == 'hard' and report.heads[0].nearest_shift == (-5, -5) and report.best.error > 0.9


@pytest.mark.parametrize('kind', ['generalized', 'learned'])
def test_degenerate_heads_and_shifts_are_those_of_their_modules(kind, monkeypatch):
    layer = LAYERS[kind]()
    with torch.no_grad():  # head 3 is head 1
        for parameter in layer.encoding.parameters():
            parameter[3] = parameter[1]
    monkeypatch.setattr(expressible, 'TOLERANCE', 0.7)  # some shifts are, some are not
    report = report_of(layer, (7, 6))
    criteria = ['entropy', 'duplicate'] + (['uniform', 'stripe'] if kind == 'generalized' else [])
    expected = find_degenerate_heads(layer, criteria, (7, 6)).reports['']
    assert [head.head for head in report.heads if head.degenerate] == expected.heads and 3 in expected.heads
    for entry in expected.found:
        head = report.heads[entry.head]
        assert (head.criterion, head.why) == (entry.criterion, entry.reason)
        assert f'head {head.head} is degenerate, {head.criterion}: {head.why}' in str(report)
    for entry in report.spanned:
        found = expressible_shifts(layer, entry.kernel_size, (7, 6), queries='interior')
        assert entry.missing == found.missing and set(entry.expressible).isdisjoint(found.missing)
        assert entry.residual == pytest.approx(found.residual, abs=1e-7)
        assert len(entry.expressible) + len(entry.missing) == entry.kernel_size[0] ** 2


def test_zero_values():
    """A layer that is 0 is a convolution with the kernel 0."""
    layer = LAYERS['learned']()
    nn.init.zeros_(layer.value.weight)
    assert [entry.error for entry in report_of(layer, (5, 5)).convolutions] == [0, 0]


@pytest.mark.parametrize('heads', [dict(), dict(head_dim='exact', qk_dim=4)])
def test_transition_of_cmhsa(heads):
    """Convolutions that became attention over patches are reported as hard heads on the nine patches."""
    model = small_cmhsa('conv', attn_bias_init=40.0, **heads)
    model.to_attention()
    for report in head_report(model, torch.randn(2, 3, 16, 16)).layers:
        assert report.summary == '3x3 convolution, error 0' and report.grid == (8, 8)
        assert sorted(head.nearest_shift for head in report.heads) == sorted(itertools.product((-1, 0, 1), repeat=2))
        assert report.convolutions[0].padding_mode == 'zeros'
        assert {head.row()[2] for head in report.heads} == {'(0, 0)'}
        assert {head.degenerate for head in report.heads} == {None} and 'degenerate' not in str(report)
    assert report.attention == 'images' and report.num_images == 2


@pytest.mark.parametrize('kind', LAYERS)
@pytest.mark.parametrize('width', [0.0, 1e-30, 1.0, 1e15])
def test_json(kind, width):
    """Widths of 0, and hardly more, give infinite covariances: null, never a word that JSON does not have."""
    layer = LAYERS[kind]()
    factors = [p for name, p in layer.named_parameters() if name.endswith(('sqrt_precision', 'encoding.weight'))]
    with torch.no_grad():
        for factor in factors:
            factor[1] *= width if factor.ndim < 3 or kind == 'generalized' else min(width, 100.0)
    for size in [(3, 4), (1, 2), (8, 8)]:
        report = head_report(layer, size=size)
        assert check_schema(json.dumps(report.to_dict(model='m'), allow_nan=False))['model'] == 'm' and str(report)


def test_models_by_position():
    model, images = small_timm('sa_quadratic_cifar'), torch.randn(3, 3, 12, 10)
    prune_heads(model, {1: [0]})
    reports = head_report(model, images).layers
    found = [(report.name, report.attention, report.grid, len(report.heads)) for report in reports]
    assert found == [(f'blocks.{i}.attn', 'position', (6, 5), 3 - i) for i in range(2)]
    assert reports[1].heads == head_report(model.blocks[1].attn, size=(6, 5)).layers[0].heads


def test_models_by_content():
    """A report by position, which is that of the query, before that of the whole attention."""
    model, images = small_timm('sa_learned_content_cifar'), torch.randn(3, 3, 12, 10)
    for block in model.blocks:
        block.attn.query.weight.data.mul_(10)  # so that images differ
    reports = head_report(model, images).layers
    found = [(report.name, report.attention, report.num_images) for report in reports]
    assert found == [(f'blocks.{i}.attn', part, 3) for i in range(2) for part in ('position', 'images')]
    for report in reports[1::2]:
        each = [mean_attention(model, image[None])[report.name].probs for image in images]
        for head, maps in zip(report.heads, torch.stack(each, dim=1)):
            expected = brute_force(maps.mean(0), 6, 5)
            entropies = torch.special.entr(maps).sum(-1).mean().item()  # of each image
            assert head.entropy == pytest.approx(entropies, abs=1e-5) and entropies < expected['entropy'] - 0.1
            assert head.degenerate is head.criterion is head.why is None
            assert head.mass_3x3 == pytest.approx(expected['mass_3x3'], abs=1e-5)


@pytest.mark.parametrize(
    'model, settings, message',
    [
        (nn.MultiheadAttention(4, 2), dict(size=(5, 5)), 'a MultiheadAttention, depends on images, which say'),
        (conv_to_mhsa(nn.Conv2d(2, 2, 7, padding=3))[0], dict(size=(5, 5)), 'the image of 5x5 pixels is'),
        (ContentAttention(4, 2), dict(size=(5, 5)), 'layer, .*dim=4, num_heads=2.*, depend on images: give'),
        (LAYERS['learned'](), dict(size=(1, 1)), 'is a single token'),
        (LAYERS['learned'](), dict(size=(0, 5)), r'size=\(0, 5\)'),
        (hard_layer([[math.nan, 0.0]]), dict(size=(5, 5)), 'finite: the parameters of layer must be finite'),
    ],
)
def test_errors(model, settings, message):
    with pytest.raises(ValueError, match=message):
        head_report(model, **settings)


def test_a_size_in_the_place_of_images():
    with pytest.raises(TypeError, match=r'images=\(9, 9\) must be a tensor \(B, C, H, W\): give the size of a grid as'):
        head_report(LAYERS['learned'](), (9, 9))


def test_converted_heads_inside_and_outside_of_the_kernel():
    """Outside they are no convolution with the window of the layer, whatever their shifts are among themselves."""
    layer, converted = conv_to_mhsa(nn.Conv2d(2, 3, 3, padding=1), alpha=8)
    assert 1e-6 < report_of(layer, (9, 9)).best.error < 2 * converted.relative_error
    with torch.no_grad():
        layer.encoding.center.add_(2)
    outside = report_of(layer, (9, 9))
    assert outside.best.error > 0.5 and outside.heads[8].nearest_shift == (3, 3)


def test_lines_and_columns():
    """Kernels that do not fit into the grid are left out."""
    layer = hard_layer(list(itertools.product((-1.0, 0.0, 1.0), repeat=2)))
    near = head_report(nn.ModuleDict(dict(a=layer)), size=(5, 6))
    lines = str(near).splitlines()
    assert '  3x3 convolution, error 0, 0 inside (nearest)' in lines
    assert '  the heads span a random 3x3 kernel to within 0%, any to within 0%' in lines
    assert [kernel.kernel_size for kernel in near.layers[0].spanned] == [(3, 3), (5, 5)]
    assert dict(zip(*(re.split('  +', line.strip()) for line in lines[-2:])))['random 3x3'] == '0.0%'
    uniform = report_of(hard_layer([[0.0, 0.0]], 0.0), (4, 5))
    assert '\n  the heads span a random 3x3 kernel to within 9' in str(uniform) and 'exactly' not in str(uniform)
    assert [kernel.kernel_size for kernel in uniform.spanned] == [(3, 3)]


def test_the_width_of_a_head_along_a_line():
    """A variance of 0 that rounding makes negative."""
    head = report_of(hard_layer([[0.0, 0.0]]), (5, 5)).heads[0]
    assert dataclasses.replace(head, covariance=((-1e-17, 0.0), (0.0, 4.0))).row()[2] == '(0, 2)'


def test_a_report_fits_a_terminal():
    """Of a backbone of mmpretrain and of a ViT; what heads of several layers have in common stands there once."""
    own = small_timm('sa_generalized_cifar', depth=3)
    with torch.no_grad():  # stripes, in two layers the same ones
        own.blocks[2].load_state_dict(own.blocks[0].state_dict())
        for block in own.blocks:
            block.attn.encoding.center.mul_(10)
            block.attn.encoding.sqrt_precision[0] = torch.diag(torch.tensor([3.0, 1e-4]))
    vit = timm.create_model('vit_tiny_patch16_224', depth=2).eval()
    for model in (nn.ModuleDict(dict(backbone=own)), vit):
        images = torch.rand(1, 3, 224, 224)
        report = head_report(model, images) if model is vit else head_report(model, size=(16, 16))
        lines = str(report).splitlines()
        assert max(map(len, lines)) <= 80
        tables = sum(line.startswith('head ') for line in lines)
        assert tables == 2 and lines.count('  heads as those of backbone.blocks.0.attn') == (model is not vit)
