"""Head reports: every claim against a computation by brute force, exact sentences for convolutions, timm, the tool."""

import dataclasses
import itertools
import json
import math
import runpy
import sys

import cv2
import numpy as np
import pytest
import timm
import torch
from helpers.processes import run
from helpers.small import SMALL, SMALL_ARCH, small_cmhsa, small_timm
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.config import Config
from PIL import Image
from torch import nn

from attncnn_plugin.analysis import (
    attention_layers,
    attention_probs_of,
    head_report,
    maps_report,
    model_reports,
    position_only_probs_of,
    reports_to_dict,
    reports_to_text,
    timm_attention,
    timm_reports,
)
from attncnn_plugin.analysis.head_reports.kinds import Lattice
from attncnn_plugin.analysis.head_reports.report import json_ready
from attncnn_plugin.analysis.head_reports.shift_maps import ShiftMaps, moments
from attncnn_plugin.convert import conv_to_mhsa, conv_to_patch_mhsa, expressible_shifts
from attncnn_plugin.layers import (
    ContentAttention,
    GeneralizedQuadraticAttention,
    GridBias,
    LearnedAttention,
    PatchAttention,
    QuadraticAttention,
)
from attncnn_plugin.pruning import find_degenerate_heads

LAYERS = {
    'quadratic': lambda: QuadraticAttention(3, 4, out_dim=2),
    'generalized': lambda: GeneralizedQuadraticAttention(3, 4, out_dim=2),
    'learned': lambda: LearnedAttention(3, 4, max_size=(9, 9), out_dim=2),
    'vr': lambda: ContentAttention(3, 4, max_size=(9, 9), terms=('vr',), out_dim=2),
    'content': lambda: ContentAttention(3, 4, max_size=(9, 9), terms=('qk', 'vr'), out_dim=2),
    'patch': lambda: random_patches(),
    'merged': lambda: random_patches().merge(),
}


def random_patches():
    layer = PatchAttention(3, 4, GridBias(4, (9, 9)), out_dim=2)
    nn.init.normal_(layer.position.table, std=2.0)
    nn.init.normal_(layer.value.weight)
    return layer


def hard_layer(centers, sqrt_precision=40.0):
    layer = QuadraticAttention(3, len(centers), out_dim=2)
    with torch.no_grad():
        layer.encoding.center.copy_(torch.tensor(centers))
        layer.encoding.sqrt_precision.copy_(torch.as_tensor(sqrt_precision).expand(len(centers)))
    return layer


def values(layer):
    """V_h of each head, from the layer's own matrices."""
    if isinstance(layer, PatchAttention):
        into, out = layer.value.weight.chunk(layer.num_heads), layer.out.weight.chunk(layer.num_heads, dim=1)
        return [o @ i for o, i in zip(out, into)]
    weight = layer.value_out.weight if hasattr(layer, 'value_out') else layer.value.weight
    return weight.chunk(layer.num_heads, dim=1)


def test_moments_of_known_gaussians():
    """At the middle of a large grid a discrete Gaussian has the moments of the continuous one."""
    layer = GeneralizedQuadraticAttention(3, 2)
    covariance = torch.tensor([[2.0, 0.6], [0.6, 1.0]])
    with torch.no_grad():
        layer.encoding.center.copy_(torch.tensor([[1.0, -2.0], [-0.3, 0.4]]))
        layer.encoding.sqrt_precision.copy_(torch.linalg.cholesky(torch.linalg.inv(covariance)).expand(2, -1, -1))
    probs = layer.attention_probs((25, 27)).double().detach()
    maps = ShiftMaps.of(probs, (25, 27))
    middle = tuple(axis == n for axis, n in zip(maps.queries, (12, 13)))
    center, spread = moments(dataclasses.replace(maps, interior=middle))
    assert torch.allclose(center, layer.encoding.center.double(), atol=1e-4)
    assert torch.allclose(spread, covariance.double().expand(2, -1, -1), atol=1e-3)


def test_the_covariance_of_a_nearly_hard_head():
    """Far smaller than the square of the shift, from which it must not be subtracted."""
    near, nearest = shift_operators([(0, 1), (0, 2)], (8, 8), 'zeros')
    _, spread = moments(ShiftMaps.of((nearest + 1e-13 * near)[None], (8, 8)))
    assert torch.allclose(
        spread[0], torch.tensor([[0.0, 0.0], [0.0, 1e-13]], dtype=torch.float64), rtol=1e-6, atol=1e-24
    )


def test_parameters_of_gaussians():
    report = head_report(hard_layer([[1.5, -2.0], [9.0, 0.0]], torch.tensor([0.5, 2.0])), (6, 6))
    assert [head.source for head in report.heads] == ['parameters'] * 2
    assert [head.center for head in report.heads] == [(1.5, -2.0), (9.0, 0.0)]
    assert [head.alpha for head in report.heads] == [0.125, 2.0]
    assert report.heads[0].covariance == ((4.0, 0.0), (0.0, 4.0)) and report.heads[1].covariance == (
        (0.25, 0.0),
        (0.0, 0.25),
    )
    assert report.heads[0].width_text == '2' and '(1.50, -2.00)' in str(report)

    layer = GeneralizedQuadraticAttention(3, 4)
    with torch.no_grad():
        layer.encoding.sqrt_precision[3] = torch.linalg.cholesky(
            torch.linalg.inv(torch.tensor([[2.0, 0.6], [0.6, 1.0]]))
        )
        layer.encoding.sqrt_precision[0] = torch.tensor([[1.0, 0.5], [0.0, 2.0]])
        layer.encoding.sqrt_precision[1] = torch.diag(torch.tensor([0.5, 0.25]))
        layer.encoding.sqrt_precision[2] = 0
    heads = head_report(layer, (6, 6)).heads
    expected = torch.linalg.inv(layer.encoding.inverse_covariance[0].double())
    assert torch.allclose(torch.tensor(heads[0].covariance, dtype=torch.float64), expected)
    assert heads[1].width_text == '4 x 2 at 90°'  # wide along columns: to the right
    assert heads[3].width_text == '1.51 x 0.848 at 25°'  # down, and a little to the right
    assert heads[2].covariance is None and heads[2].width_text == 'inf' and heads[2].alpha is None
    assert heads[2].kind == 'uniform' and heads[2].criterion == 'uniform' and '< 1e-05' in heads[2].why


def brute_force(probs, height, width):
    """Entropy, masses, shares, the nearest shift and moments of one head, by loops."""
    pixels = list(itertools.product(range(height), range(width)))
    margins = [min(2, (n - 1) // 2) for n in (height, width)]
    rows = probs.tolist()
    entropies, mass3, mass5, moved, inner = [], [], [], [], []
    for q, (q1, q2) in enumerate(pixels):
        entropies.append(-sum(p * math.log(p) for p in rows[q] if p > 0))
        if not (margins[0] <= q1 < height - margins[0] and margins[1] <= q2 < width - margins[1]):
            continue
        inner.append((q1, q2))
        moved += [(p, k1 - q1, k2 - q2) for p, (k1, k2) in zip(rows[q], pixels)]
        for masses, reach in ((mass3, 1), (mass5, 2)):
            masses.append(sum(p for p, (k1, k2) in zip(rows[q], pixels) if max(abs(k1 - q1), abs(k2 - q2)) <= reach))
    total = sum(p for p, _, _ in moved)
    center = [sum(m[0] * m[i] for m in moved) / total for i in (1, 2)]
    covariance = [
        [sum(m[0] * (m[i] - center[i - 1]) * (m[j] - center[j - 1]) for m in moved) / total for j in (1, 2)]
        for i in (1, 2)
    ]

    def mean(numbers):
        return sum(numbers) / len(numbers)

    def given(query, shift):
        """P[q, q + δ], and whether δ stays in the grid; the nearest key where it does not."""
        key = [q + d for q, d in zip(query, shift)]
        inside = [min(max(k, 0), n - 1) for k, n in zip(key, (height, width))]
        return rows[query[0] * width + query[1]][inside[0] * width + inside[1]], key == inside

    shares, wholes = {}, {}
    for shift in itertools.product(range(1 - height, height), range(1 - width, width)):
        by_inner, by_all = ([given(query, shift) for query in queries] for queries in (inner, pixels))
        wholes[shift] = tuple(mean([p for p, _ in values]) for values in (by_inner, by_all))
        values = by_inner if all(stays for _, stays in by_inner) else [entry for entry in by_all if entry[1]]
        if sum(stays for _, stays in by_all) >= len(pixels) / 4:
            shares[shift] = mean([p for p, _ in values])
    nearest = max(wholes, key=lambda shift: ([round(p, 6) for p in wholes[shift]], -math.hypot(*shift)))
    return dict(
        entropy=mean(entropies),
        mass_3x3=mean(mass3),
        mass_5x5=mean(mass5),
        center=center,
        covariance=covariance,
        shares=shares,
        wholes=wholes,
        share=shares.get(nearest, wholes[nearest][1]),
    )


@pytest.mark.parametrize('kind', LAYERS)
@settings(max_examples=6)
@given(size=st.tuples(st.integers(3, 7), st.integers(3, 7)), seed=st.integers(0, 999))
def test_statistics(kind, size, seed):
    torch.manual_seed(seed)
    layer = LAYERS[kind]()
    report = head_report(layer, size)
    probs = layer.position_probs(size).detach()
    assert report.num_heads == len(report.heads) == 4 and report.attention == 'position'
    for head, maps in zip(report.heads, probs):
        expected = brute_force(maps, *size)
        for name in ('entropy', 'mass_3x3', 'mass_5x5'):
            assert getattr(head, name) == pytest.approx(expected[name], abs=1e-5)
        assert head.relative_entropy == pytest.approx(expected['entropy'] / math.log(math.prod(size)), abs=1e-5)
        assert head.share == pytest.approx(expected['share'], abs=1e-5)
        assert expected['wholes'][head.nearest_shift][0] == pytest.approx(
            max(inner for inner, _ in expected['wholes'].values()), abs=2e-6
        )
        for row, column in itertools.product(range(-3, 4), repeat=2):
            share = head.shares[row + 3][column + 3]
            assert share == (
                None
                if (row, column) not in expected['shares']
                else pytest.approx(expected['shares'][row, column], abs=1e-5)
            )
        kinds = {'hard': head.share >= 0.9, 'uniform': head.share < 0.9 and head.relative_entropy > 0.99}
        assert head.kind == next((name for name, true in kinds.items() if true), 'soft')
        if kind in ('quadratic', 'generalized'):
            assert head.source == 'parameters'
        else:
            assert head.source == 'moments' and head.center == pytest.approx(expected['center'], abs=1e-4)
            assert np.allclose(head.covariance, expected['covariance'], atol=1e-4)


def window_shifts(kernel_size):
    return list(itertools.product(*(range(-(n // 2), n // 2 + 1) for n in kernel_size)))


def shift_operators(shifts, size, padding_mode):
    """S_δ as matrices, by loops."""
    height, width = size
    operators = []
    for row, column in shifts:
        operator = torch.zeros(height * width, height * width, dtype=torch.float64)
        for q1, q2 in itertools.product(range(height), range(width)):
            k1, k2 = q1 + row, q2 + column
            if padding_mode == 'replicate':
                k1, k2 = min(max(k1, 0), height - 1), min(max(k2, 0), width - 1)
            if 0 <= k1 < height and 0 <= k2 < width:
                operator[q1 * width + q2, k1 * width + k2] = 1
        operators.append(operator)
    return torch.stack(operators)


@pytest.mark.parametrize('kind', LAYERS)
def test_best_convolution(kind):
    """The error is that of the best of all convolutions, in the linear map from input to output."""
    layer, size = LAYERS[kind](), (6, 5)
    report = head_report(layer, size)
    probs = layer.position_probs(size).detach().double()
    whole = sum(torch.einsum('qk,oi->oiqk', p, v.double()) for p, v in zip(probs, values(layer))).flatten(2)
    assert [entry.kernel_size for entry in report.convolutions] == [(3, 3), (5, 5)]
    for entry in report.convolutions:
        assert entry.padding_mode == ('zeros' if kind in ('patch', 'merged') else 'replicate')
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
    assert f'5x5 convolution (best): error {report.best.error:.3g}' in str(report)


def test_heads_of_equal_weight_by_default():
    probs = LAYERS['learned']().attention_probs((5, 5))
    report = maps_report(probs, (5, 5), num_images=7)
    operators = shift_operators(window_shifts((3, 3)), (5, 5), 'replicate').flatten(1)
    maps = probs.detach().double().flatten(1).T
    left = maps - operators.T @ torch.linalg.lstsq(operators.T, maps, driver='gelsd').solution
    assert report.convolutions[0].error == pytest.approx((left.norm() / maps.norm()).item())
    assert report.attention == 'images' and 'mean over 7 images' in str(report)


@pytest.mark.parametrize(
    'conv, summary',
    [
        (nn.Conv2d(3, 4, 3, padding=1), 'one convolution, 3x3, error 0'),
        (nn.Conv2d(3, 4, 1), 'one convolution, 1x1, error 0'),
        (nn.Conv2d(3, 4, 5, padding='same', padding_mode='reflect'), 'one convolution, 5x5, error 0'),
        (nn.Conv2d(3, 4, (3, 5), padding_mode='circular', padding=1), 'one convolution, 3x5, error 0'),
        (nn.Conv2d(4, 4, (2, 4), groups=2, bias=False), 'one convolution, 2x4, error 0'),
        (nn.Conv2d(3, 4, 3, stride=2, padding=1), 'one convolution, 3x3, error 0, stride 2'),
        (nn.Conv2d(3, 4, 3, stride=(1, 3)), 'one convolution, 3x3, error 0, stride 1x3'),
        (nn.Conv2d(3, 4, 3, dilation=2, padding=2), 'one convolution, 3x3, error 0, dilated by 2'),
        (nn.Conv2d(3, 4, (5, 3), dilation=(1, 3)), 'one convolution, 5x3, error 0, dilated by 1x3'),
        (nn.Conv2d(3, 4, (1, 3), dilation=(5, 2), padding='same'), 'one convolution, 1x3, error 0, dilated by 2'),
        (nn.Conv2d(3, 4, 3, dilation=2, stride=2), 'one convolution, 3x3, error 0, dilated by 2, stride 2'),
    ],
)
def test_convolutions_are_called_convolutions(conv, summary):
    report = head_report(conv_to_mhsa(conv)[0], (10, 14))
    assert report.summary == summary and summary in str(report)
    assert report.kind.kind == ('dilated' if 'dilated' in summary else 'convolution')
    assert report.kind.hard == report.num_heads == math.prod(conv.kernel_size)
    assert all(head.kind == 'hard' and not head.degenerate for head in report.heads)
    assert all(head.nearest_shift == head.center for head in report.heads)
    if conv.stride == (1, 1) and conv.padding == 'same':
        assert all(entry.expressible for entry in report.expressible)
    if conv.stride != (1, 1):
        assert report.expressible == ()


@pytest.mark.parametrize('dilation, words', [(1, ''), (2, ', dilated by 2')])
def test_soft_heads_of_a_convolution(dilation, words):
    """A head a kernel position is not needed: with fewer the layer still is a convolution."""
    conv = nn.Conv2d(3, 4, 3, padding='same', dilation=dilation)
    report = head_report(conv_to_mhsa(conv, num_heads=4)[0], (8, 8))
    assert report.summary == f'one convolution, 3x3, error 0{words}, by 0 hard, 4 soft and 0 uniform heads'
    assert report.kind.kind == ('dilated' if dilation > 1 else 'convolution')


def test_hard_heads_whose_rest_counts():
    """Heads on one shift whose matrices cancel leave what they give to others: no 1x1 convolution."""
    attention, _ = conv_to_mhsa(nn.Conv2d(3, 4, 3, padding=1), num_heads=2)
    probs = torch.full((2, 9), 0.01).index_fill_(1, torch.tensor(4), 0.92)
    probs[1, :2] += torch.tensor([0.005, -0.005])
    with torch.no_grad():
        attention.encoding.weight.copy_(probs.log().unflatten(1, (3, 3)))
        attention.value.weight[:, 3:] = -attention.value.weight[:, :3]
    report = head_report(attention, (8, 8))
    assert report.kind.hard == 2 and {head.nearest_shift for head in report.heads} == {(0, 0)}
    assert report.summary == 'one convolution, 3x3, error 0'

    layer = hard_layer([[0.0, 0.0], [0.0, 0.0]], torch.tensor([3.0, 3.2]))
    with torch.no_grad():
        layer.value.weight[:, 3:] = -layer.value.weight[:, :3]
    report = head_report(layer, (8, 8))
    assert report.kind.hard == 2 and report.kind.kernel_size == (1, 1) and report.kind.error > 0.3


@pytest.mark.parametrize('size', [(1, 2), (2, 2), (3, 3)])
def test_grids_without_an_interior(size):
    """Where no query has its window inside, shifts that coincide express anything: that is no convolution."""
    assert head_report(LAYERS['quadratic'](), size).summary == 'mixture, 4 soft'


@pytest.mark.parametrize('padding_mode', ['zeros', 'reflect', 'circular'])
def test_padding_is_no_part_of_a_head(padding_mode):
    """What a soft head reads from the padding does not count: its shares are the probabilities of its window."""
    attention, _ = conv_to_mhsa(nn.Conv2d(3, 4, 5, padding=2, padding_mode=padding_mode), num_heads=3)
    for head, probs in zip(head_report(attention, (7, 8)).heads, attention.encoding()):
        assert np.allclose([line[1:6] for line in head.shares[1:6]], probs.detach(), atol=1e-6)
        assert head.mass_5x5 == pytest.approx(1) and head.mass_3x3 == pytest.approx(probs[1:4, 1:4].sum().item())


def test_uniform_with_noise():
    report = maps_report(torch.full((1, 36, 36), 1 / 36) + 1e-9 * torch.rand(1, 36, 36), (6, 6))
    assert report.heads[0].nearest_shift == (0, 0) and report.summary == 'mixture, 1 uniform'


@pytest.mark.parametrize(
    'centers, kind, summary',
    [
        (list(itertools.product((-1, 0, 1), repeat=2)), 'convolution', 'one convolution, 3x3, error 0'),
        (list(itertools.product((-2, -1, 0, 1, 2), (0,))), 'convolution', 'one convolution, 5x1, error 0'),
        (list(itertools.product((0, 1), (2, 3))), 'convolution', 'one convolution, 2x2, error 0, centred at (0, 2)'),
        ([(1, -2)], 'convolution', 'one convolution, 1x1, error 0, centred at (1, -2)'),
        ([(0, 0), (0, 0), (0, 1)], 'convolution', 'one convolution, 1x2, error 0'),
        (list(itertools.product((-2, 0, 2), repeat=2)), 'dilated', 'one convolution, 3x3, error 0, dilated by 2'),
        (list(itertools.product((-3, 0, 3), (-1, 0, 1))), 'dilated', 'one convolution, 3x3, error 0, dilated by 3x1'),
        ([(-1, 0), (0, -1), (0, 0), (0, 1), (1, 0)], 'sparse', 'sparse convolution, 5 shifts of 3x3, error 0'),
        ([(0, -2), (0, -1), (0, 2)], 'sparse', 'sparse convolution, 3 shifts of 1x5, error 0'),
    ],
)
def test_hard_heads(centers, kind, summary):
    report = head_report(hard_layer([list(map(float, center)) for center in centers]), (9, 10))
    assert report.kind.kind == kind and report.summary == summary
    assert [head.nearest_shift for head in report.heads] == centers
    assert [head.relative_entropy for head in report.heads] == [0.0] * len(centers)
    for entry in report.expressible:
        shifts = set(itertools.product(range(-(entry.kernel_size[0] // 2), entry.kernel_size[0] // 2 + 1), repeat=2))
        assert set(entry.expressible) == shifts & set(centers) and set(entry.missing) == shifts - set(centers)
    for head, other in itertools.combinations(report.heads, 2):
        if head.nearest_shift == other.nearest_shift:
            assert other.criterion == 'duplicate' and f'from head {head.head}' in other.why


@pytest.mark.parametrize(
    'centers, words',
    [
        ([(0, -1), (0, 0), (0, 1)], 'one convolution, 1x3, error {}'),
        (list(itertools.product((-2, 0, 2), repeat=2)), 'one convolution, 3x3, error {}, dilated by 2'),
        (list(itertools.product((0, 1), repeat=2)), 'one convolution, 2x2, error {}'),
        ([(1, -2)], 'one convolution, 1x1, error {}, centred at (1, -2)'),
        ([(0, -3), (0, 0), (1, 1)], 'sparse convolution, 3 shifts of 2x5, error {}, centred at (0, -1)'),
    ],
)
@pytest.mark.parametrize('sqrt_precision', [3.0, 5.0])
def test_hard_but_not_exact(centers, words, sqrt_precision):
    """Hard heads that leak a little are a convolution by their shifts, and no others, with an error."""
    layer, size = hard_layer([list(map(float, center)) for center in centers], sqrt_precision), (8, 9)
    report = head_report(layer, size)
    operators = shift_operators(centers, size, 'replicate').flatten(1)
    whole = (
        sum(
            torch.einsum('qk,oi->qkoi', p, v.double())
            for p, v in zip(layer.double().attention_probs(size), values(layer))
        )
        .flatten(0, 1)
        .flatten(1)
        .detach()
    )
    left = whole - operators.T @ torch.linalg.lstsq(operators.T, whole, driver='gelsd').solution
    assert 1e-6 < report.kind.error == pytest.approx((left.norm() / whole.norm()).item(), rel=1e-4)
    assert report.summary == words.format(f'{report.kind.error:.3g}')
    if report.best.error > report.kind.error:
        assert report.best_text == report.summary and reports_to_text([report]).endswith(report.summary)


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
    (head,) = head_report(hard_layer([list(center)], precision), (8, 8)).heads
    assert head.nearest_shift == nearest and head.kind == kind


def test_mixture():
    layer = hard_layer([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], torch.tensor([40.0, 40.0, 1.0, 0.0]))
    report = head_report(layer, (8, 8))
    assert report.summary == 'mixture, 2 hard, 1 soft, 1 uniform' and report.kind.error is None
    assert [head.kind for head in report.heads] == ['hard', 'hard', 'soft', 'uniform']
    uniform = report.heads[3]
    assert uniform.relative_entropy == 1 and uniform.share == pytest.approx(1 / 64)
    assert uniform.mass_3x3 == pytest.approx(9 / 64) and uniform.mass_5x5 == pytest.approx(25 / 64)
    assert uniform.nearest_shift == (0, 0)


def test_one_fixed_key_is_no_hard_head():
    """All queries attend to the same token: no shift, but for a corner, which is replicate padding."""
    probs = torch.zeros(1, 36, 36)
    probs[:, :, 14] = 1
    report = maps_report(probs, (6, 6))
    assert report.summary == 'mixture, 1 soft' and report.heads[0].entropy == 0
    report = maps_report(probs.roll(-14, dims=2), (6, 6))
    assert report.summary == 'one convolution, 1x1, error 0, centred at (-5, -5)'


@given(
    kernel=st.tuples(st.integers(2, 4), st.integers(2, 4)),
    steps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    first=st.tuples(st.integers(-5, 5), st.integers(-5, 5)),
    data=st.data(),
)
def test_lattice(kernel, steps, first, data):
    axes = [[f + s * i for i in range(n)] for f, s, n in zip(first, steps, kernel)]
    shifts = list(itertools.product(*axes))
    lattice = Lattice.of(data.draw(st.permutations(shifts)))
    assert (lattice.kernel_size, lattice.dilation, lattice.full) == (kernel, steps, True)
    assert lattice.offset == tuple(f + s * (n - 1) // 2 for f, s, n in zip(first, steps, kernel))
    corners = {tuple(axis[i] for axis, i in zip(axes, ends)) for ends in itertools.product((0, -1), repeat=2)}
    missing = data.draw(st.sampled_from(shifts))
    holed = Lattice.of([shift for shift in shifts if shift != missing])
    if missing not in corners or min(kernel) > 2:
        assert not holed.full and holed.dilation == (1, 1)


@pytest.mark.parametrize('kind', ['quadratic', 'generalized', 'learned', 'vr'])
def test_degenerate_and_expressible_are_those_of_their_modules(kind):
    layer = LAYERS[kind]()
    with torch.no_grad():  # head 3 is head 1
        weight = layer.position_bias if kind == 'vr' else layer.encoding.weight if kind == 'learned' else None
        for tensor in [weight] if weight is not None else list(layer.encoding.parameters()):
            tensor[3] = tensor[1]
    report = head_report(layer, (7, 6), tolerance=0.7)
    criteria = ['entropy', 'duplicate'] + (['uniform', 'stripe'] if kind in ('quadratic', 'generalized') else [])
    expected = find_degenerate_heads(layer, criteria, (7, 6))
    assert [head.head for head in report.heads if head.degenerate] == expected.heads and 3 in expected.heads
    for entry in expected.found:
        head = report.heads[entry.head]
        assert (head.criterion, head.why) == (entry.criterion, entry.reason) and entry.reason in str(report)
    for entry in report.expressible:
        found = expressible_shifts(layer, entry.kernel_size, (7, 6), queries='interior', tolerance=0.7)
        assert list(entry.missing) == found.missing and set(entry.expressible).isdisjoint(found.missing)
        assert entry.residual == pytest.approx(found.residual.tolist(), abs=1e-7)
        assert entry.tolerance == 0.7 and len(entry.expressible) + len(entry.missing) == entry.kernel_size[0] ** 2


def test_stripe():
    layer = GeneralizedQuadraticAttention(3, 1)
    with torch.no_grad():
        layer.encoding.sqrt_precision[0] = torch.diag(torch.tensor([3.0, 1e-4]))
    (head,) = head_report(layer, (6, 6)).heads
    assert head.criterion == 'stripe' and 'condition number' in head.why and head.width_text == '1e+04 x 0.333 at 90°'


def test_transition_of_cmhsa():
    """Convolutions that became attention over patches are reported as hard heads on the nine patches."""
    model = small_cmhsa('conv', attn_bias_init=40.0)
    model.to_attention()
    for report in model_reports(model, torch.randn(2, 3, 16, 16)):
        assert report.summary == 'one convolution, 3x3, error 0' and report.grid == (8, 8)
        assert sorted(head.nearest_shift for head in report.heads) == sorted(itertools.product((-1, 0, 1), repeat=2))
        assert report.convolutions[0].padding_mode == 'zeros'
        assert {head.width_text for head in report.heads} == {'0'}
        assert {head.degenerate for head in report.heads} == {None} and 'degenerate' not in str(report)
    assert report.attention == 'images' and report.num_images == 2
    model.switch_to_deploy()
    assert {report.summary for report in model_reports(model, torch.randn(2, 3, 16, 16))} == {report.summary}


def test_a_little_softer_than_expressible():
    """A residual above the tolerance, beside a small error: how large it is is said."""
    model = small_cmhsa('conv', attn_bias_init=12.0)
    model.to_attention()
    report = head_report(model.blocks[0].attn, (8, 8))
    least, largest = min(report.expressible[0].residual), max(report.expressible[0].residual)
    assert report.expressible[0].expressible == () and 1e-6 < largest < 1e-3
    assert f'3x3 shifts expressible: 0 of 9, residuals {least:.3g} to {largest:.3g}' in str(report)


def test_patches_of_a_convolution():
    report = head_report(conv_to_patch_mhsa(nn.Conv2d(2, 3, 3, padding=1), 4)[0], (5, 6))
    assert report.summary == 'one convolution, 3x3, error 0' and report.grid == (5, 6)


def test_layers_that_became_convolutions():
    """They have a line in the place of their heads; with nothing else left the error names what took them."""
    model = small_timm('sa_quadratic_cifar', num_heads=9)
    for block in model.blocks[1:]:
        with torch.no_grad():
            block.attn.encoding.center.copy_(torch.tensor(window_shifts((3, 3))))
            block.attn.encoding.sqrt_precision.fill_(40.0)
    model.switch_to_deploy(conv_tolerance=1e-3)
    reports = model_reports(model, size=(5, 6))
    assert [(report.name, report.num_heads) for report in reports] == [('blocks.0.attn', 9), ('blocks.1.attn', 0)]
    assert reports[1].summary == 'a convolution of 3x3 shifts' and reports[1].grid == (5, 6)
    assert 'blocks.1.attn: by position, 5x6 tokens, 0 heads: a convolution of 3x3 shifts' in reports_to_text(reports)
    check_schema(json.dumps(reports_to_dict(reports)))
    del model.blocks[0]
    with pytest.raises(ValueError, match='switch_to_deploy with conv_tolerance puts convolutions in their place'):
        model_reports(model, size=(5, 6))


SCHEMA = {
    'layer': {
        'grid',
        'num_heads',
        'kind',
        'convolutions',
        'expressible',
        'heads',
        'name',
        'attention',
        'num_images',
        'summary',
        'best',
    },
    'kind': {'kind', 'hard', 'soft', 'uniform', 'num_shifts', 'kernel_size', 'dilation', 'offset', 'stride', 'error'},
    'head': {
        'head',
        'source',
        'center',
        'alpha',
        'covariance',
        'entropy',
        'relative_entropy',
        'mass_3x3',
        'mass_5x5',
        'nearest_shift',
        'share',
        'kind',
        'degenerate',
        'criterion',
        'why',
        'shares',
        'prefix_mass',
    },
    'convolutions': {'kernel_size', 'padding_mode', 'error', 'interior_error'},
    'expressible': {'kernel_size', 'expressible', 'missing', 'residual', 'tolerance'},
}


def check_schema(content):
    """What a JSON file holds, whatever the model."""

    def fail(token):
        raise AssertionError(f'{token} is no JSON')

    loaded = json.loads(content, parse_constant=fail)
    assert loaded['schema_version'] == 1
    assert loaded['thresholds'] == {
        'hard_share': 0.9,
        'uniform_relative_entropy': 0.99,
        'exact_error': 1e-6,
        'least_queries': 0.25,
    }
    assert loaded['layers']
    for layer in loaded['layers']:
        assert layer.keys() == SCHEMA['layer'] and layer['kind'].keys() == SCHEMA['kind']
        assert len(layer['heads']) == layer['num_heads']
        for head in layer['heads']:
            assert head.keys() == SCHEMA['head'] and len(head['shares']) == 7 == len(head['shares'][0])
        for part in ('convolutions', 'expressible'):
            assert all(entry.keys() == SCHEMA[part] for entry in layer[part])
    return loaded


@pytest.mark.parametrize('kind', ['quadratic', 'generalized', 'learned', 'patch'])
@pytest.mark.parametrize('width', [0.0, 1e-30, 1.0, 1e15])
def test_json(kind, width):
    """Widths of 0, and hardly more, give infinite covariances: null, never a word that JSON does not have."""
    layer = LAYERS[kind]()
    with torch.no_grad():
        if hasattr(layer, 'encoding') and hasattr(layer.encoding, 'sqrt_precision'):
            layer.encoding.sqrt_precision[1] *= width
        else:
            next(layer.position.parameters() if kind == 'patch' else layer.encoding.parameters())[1] *= min(
                width, 100.0
            )
    for size in [(3, 4), (1, 2), (8, 8)]:
        report = head_report(layer, size)
        content = reports_to_dict([report], model='m', checkpoint=None)
        loaded = check_schema(json.dumps(content, allow_nan=False))
        assert loaded['layers'][0] == report.to_dict() and loaded['model'] == 'm'
        assert str(report) and reports_to_text([report])


def test_json_of_numbers_that_are_not_finite():
    assert json_ready({'a': (math.inf, [math.nan, 1.5], 'x', None, True)}) == {
        'a': [None, [None, 1.5], 'x', None, True]
    }


def test_no_heads():
    layer = LAYERS['quadratic']()
    layer.prune_heads([0, 1, 2, 3], allow_empty=True)
    report = head_report(layer, (5, 5))
    assert report.summary == 'no heads: the layer is its bias' and report.best is None
    check_schema(json.dumps(reports_to_dict([report])))
    assert 'no heads' in reports_to_text([report])
    assert maps_report(torch.zeros(0, 25, 25), (5, 5), num_images=2).num_heads == 0

    model = small_timm('sa_learned_content_cifar')
    model.prune_heads({0: [0, 1, 2]}, allow_empty=True)
    reports = model_reports(model, torch.randn(2, 3, 8, 8))
    assert [(report.attention, report.num_heads) for report in reports] == [
        (part, heads) for heads in (0, 3) for part in ('position', 'images')
    ]


def test_zero_values():
    """A layer that is 0 is a convolution with the kernel 0."""
    layer = LAYERS['learned']()
    nn.init.zeros_(layer.value.weight)
    assert [entry.error for entry in head_report(layer, (5, 5)).convolutions] == [0, 0]


@pytest.mark.parametrize(
    'call, error, message',
    [
        (
            lambda: head_report(nn.MultiheadAttention(4, 2), (5, 5)),
            TypeError,
            'layer is a MultiheadAttention, but only',
        ),
        (lambda: head_report(conv_to_mhsa(nn.Conv1d(2, 2, 3))[0], (5, 5)), ValueError, 'layer has 1 axes of pixels'),
        (
            lambda: head_report(conv_to_mhsa(nn.Conv2d(2, 2, 7, padding=3))[0], (5, 5)),
            ValueError,
            'the image of 5x5 pixels is',
        ),
        (lambda: head_report(ContentAttention(4, 2), (5, 5)), ValueError, r"terms=\('qk', 'qr'\), .*have no part"),
        (lambda: head_report(LAYERS['learned'](), (1, 1)), ValueError, 'is a single token'),
        (lambda: head_report(LAYERS['learned'](), (0, 5)), ValueError, r'size=\(0, 5\)'),
        (lambda: maps_report(torch.rand(2, 9, 9), (3, 4)), ValueError, r'probs have shape \(2, 9, 9\)'),
        (
            lambda: model_reports(small_timm('sa_learned_content_cifar'), torch.rand(1, 3, 8, 8), (4, 4)),
            ValueError,
            r'size=\(4, 4\) is that of a grid for scores by position alone',
        ),
        (
            lambda: head_report(LAYERS['learned'](), (5, 5), tolerance=1e-9),
            ValueError,
            'tolerance=1e-09 must be at least',
        ),
        (lambda: model_reports(small_timm('sa_quadratic_cifar')), ValueError, 'images=None and size=None'),
        (
            lambda: model_reports(small_timm('sa_learned_content_cifar'), size=(4, 4)),
            ValueError,
            'images=None and size=',
        ),
        (lambda: model_reports(small_cmhsa('conv'), torch.rand(1, 3, 16, 16)), ValueError, 'no attention layers'),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_not_finite():
    layer = LAYERS['quadratic']()
    nn.init.constant_(layer.encoding.center, math.nan)
    with pytest.raises(ValueError, match='not finite'):
        head_report(layer, (5, 5))


@pytest.mark.parametrize('name', ['sa_quadratic_cifar', 'sa_learned_cifar', 'sa_learned_content_cifar'])
def test_models(name):
    model, images = small_timm(name), torch.randn(3, 3, 12, 10)
    if name == 'sa_learned_content_cifar':
        images = images.mul(3)  # so that images differ
    model.prune_heads({1: [0]})
    reports = model_reports(model, images)
    assert {report.grid for report in reports} == {(6, 5)}
    parts = ['position', 'images'] if name == 'sa_learned_content_cifar' else ['position']
    assert [(report.name, report.attention, report.num_heads) for report in reports] == [
        (name, part, heads) for name, heads in zip(attention_layers(model), (3, 2)) for part in parts
    ]
    if name != 'sa_learned_content_cifar':
        assert reports[1].heads == head_report(model.blocks[1].attn, (6, 5)).heads
        assert [report.attention for report in model_reports(model, size=(4, 4))] == ['position'] * 2
        return
    probs = dict(position=position_only_probs_of(model, images), images=attention_probs_of(model, images))
    for report in reports:
        assert report.num_images == 3 and 'mean over 3 images' in str(report)
        for head, maps in zip(report.heads, probs[report.attention][report.name].transpose(0, 1)):
            expected = brute_force(maps.mean(0), 6, 5)
            entropies = torch.special.entr(maps).sum(-1).mean().item()  # of each image
            assert head.entropy == pytest.approx(entropies, abs=1e-5) and entropies < expected['entropy'] - 0.1
            assert head.degenerate is head.criterion is head.why is None
            assert head.mass_3x3 == pytest.approx(expected['mass_3x3'], abs=1e-5)


def test_content_with_positions_has_both():
    model = small_timm('sa_learned_content_cifar', terms=('qk', 'vr'))
    reports = model_reports(model, torch.randn(2, 3, 8, 8), size=(5, 6))
    assert [(report.name, report.attention, report.grid) for report in reports] == [
        (f'blocks.{i}.attn', *part) for i in range(2) for part in (('position', (5, 6)), ('images', (4, 4)))
    ]


TINY = dict(embed_dim=12, num_heads=3, depth=2, img_size=32, num_classes=4, pos_drop_rate=0.5)


def tiny_timm(name, **kwargs):
    return timm.create_model(name, pretrained=False, **{**TINY, **kwargs})


@pytest.mark.parametrize(
    'name, kwargs, prefix',
    [
        ('vit_tiny_patch16_224', dict(patch_size=8), 1),
        ('vit_tiny_patch16_224', dict(patch_size=8, reg_tokens=3), 4),
        ('vit_tiny_patch16_224', dict(patch_size=8, class_token=False, global_pool='avg'), 0),
        ('deit_tiny_distilled_patch16_224', dict(patch_size=8), 2),
    ],
)
def test_timm_attention(name, kwargs, prefix):
    """Against q and k computed here."""
    model, images = tiny_timm(name, **kwargs).train(), torch.randn(5, 3, 32, 32)
    inputs = {}
    for i, block in enumerate(model.blocks):
        block.attn.fused_attn = i == 0
        nn.init.normal_(block.attn.qkv.weight, std=0.5)
        block.attn.register_forward_pre_hook(lambda _, args, i=i: inputs.update({i: args[0].detach()}))
    probs, left_out = timm_attention(model, images)
    assert all(module.training for module in model.modules())
    assert [block.attn.fused_attn for block in model.blocks] == [True, False]
    assert not any(block.attn.attn_drop._forward_pre_hooks for block in model.blocks)
    assert list(probs) == ['blocks.0.attn', 'blocks.1.attn']
    for i, block in enumerate(model.blocks):
        qkv = block.attn.qkv(inputs[i]).reshape(5, -1, 3, 3, 4)  # (B, N, 3, heads, D_h)
        for head in range(3):
            whole = (qkv[:, :, 0, head] @ qkv[:, :, 1, head].mT / 2).softmax(-1)
            patches = whole[:, prefix:, prefix:] / whole[:, prefix:, prefix:].sum(-1, keepdim=True)
            assert torch.allclose(probs[f'blocks.{i}.attn'][:, head], patches, atol=1e-5)
            mass = whole[:, prefix:, :prefix].sum(-1).mean(-1)
            assert torch.allclose(left_out[f'blocks.{i}.attn'][:, head], mass, atol=1e-5)
    reports = timm_reports(model, images)
    assert [report.grid for report in reports] == [(4, 4)] * 2 and {report.num_images for report in reports} == {5}
    for report in reports:
        for head, maps in zip(report.heads, probs[report.name].transpose(0, 1)):
            expected = brute_force(maps.mean(0), 4, 4)
            assert head.entropy == pytest.approx(torch.special.entr(maps).sum(-1).mean().item(), abs=1e-5)
            assert head.degenerate is None
            assert head.center == pytest.approx(expected['center'], abs=1e-5)
            assert head.prefix_mass == pytest.approx(left_out[report.name][:, head.head].mean().item(), abs=1e-5)
        assert 'no patch' in str(report)
    check_schema(json.dumps(reports_to_dict(reports), allow_nan=False))


def test_patches_that_look_at_no_patch():
    """All of the attention to the class token: nothing is left to be renormalized, and nothing is divided by it."""
    model = tiny_timm('vit_tiny_patch16_224', patch_size=8)
    with torch.no_grad():
        for tensor in (
            model.pos_embed,
            model.cls_token,
            model.patch_embed.proj.weight,
            model.patch_embed.proj.bias,
            *model.blocks[0].attn.qkv.parameters(),
        ):
            tensor.zero_()
        model.cls_token[..., 0], model.patch_embed.proj.bias[0] = 1, -1
        model.blocks[0].attn.qkv.bias[:12] = 1
        model.blocks[0].attn.qkv.weight[12:24, 0] = 100
    report = timm_reports(model, torch.randn(1, 3, 32, 32))[0]
    assert all(head.prefix_mass == 1 and head.center is None and head.entropy == 0 for head in report.heads)


def test_convit_that_is_a_convolution():
    """Its positional heads, begun hard and with the content shut off, are the nine shifts; rows are not columns."""
    model = timm.create_model(
        'convit_tiny',
        embed_dim=4,
        num_heads=9,
        depth=3,
        local_up_to_layer=2,
        img_size=32,
        patch_size=4,
        locality_strength=40.0,
        num_classes=4,
    )
    for block in model.blocks[:2]:
        nn.init.constant_(block.attn.gating_param, 30.0)
    reports = timm_reports(model, torch.randn(2, 3, 32, 32))
    for report in reports[:2]:
        assert report.summary == 'one convolution, 3x3, error 0'
        assert report.heads[1].nearest_shift == (0, -1) and report.heads[3].nearest_shift == (-1, 0)
        assert [head.prefix_mass for head in report.heads] == pytest.approx([0.0] * 9, abs=1e-6)
    assert reports[2].heads[0].prefix_mass > 0  # the class token has come


@pytest.mark.parametrize(
    'name, kwargs, reason',
    [
        ('swin_tiny_patch4_window7_224', dict(embed_dim=12, depths=(1,) * 4, num_heads=(1,) * 4), 'no blocks'),
        ('cait_xxs24_224', dict(embed_dim=12, depth=1, num_heads=3), 'do not add up to 1'),
        ('samvit_base_patch16', dict(embed_dim=12, depth=1, num_heads=3, img_size=64, global_attn_indexes=()), 'shape'),
        ('vit_dwee_patch16_reg1_gap_256', dict(embed_dim=16, depth=1, num_heads=2, img_size=224), 'with N_h = 2'),
        ('resnet18', {}, 'no patch_embed with a grid'),
    ],
)
def test_other_timm_models(name, kwargs, reason):
    model = timm.create_model(name, pretrained=False, **kwargs)
    size = 64 if name.startswith('sam') else 224
    with pytest.raises(ValueError, match=f'{type(model).__name__}, whose attention cannot be reported: .*{reason}'):
        timm_reports(model, torch.randn(1, 3, size, size))


def test_timm_model_without_attention():
    model = tiny_timm('vit_tiny_patch16_224')
    for block in model.blocks:
        block.attn = nn.Identity()
    with pytest.raises(ValueError, match='its blocks have no attention with num_heads'):
        timm_attention(model, torch.randn(1, 3, 32, 32))


CONFIG = """
_base_ = '{base}'
custom_imports = dict(imports=['attncnn_plugin'], allow_failed_imports=False)
model = dict(backbone=dict(arch=dict(_delete_=True, **{arch})), head=dict(in_channels=16))
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory, repository):
    """Configs of small models, their checkpoints, and images of another size."""
    from mmengine.registry import MODELS, init_default_scope

    folder = tmp_path_factory.mktemp('reports')
    torch.manual_seed(0)
    for name in ('quadratic', 'learned_content', 'generalized'):
        config = folder / f'{name}.py'
        config.write_text(CONFIG.format(base=repository / f'configs/sa_{name}_digits.py', arch=SMALL_ARCH))
        init_default_scope('mmpretrain')
        model = MODELS.build(Config.fromfile(config).model)
        torch.save(dict(state_dict=model.state_dict(), meta={}), folder / f'{name}.pth')
        if name == 'generalized':
            model.backbone.prune_heads({0: [1], 1: [0, 2]})
            torch.save(dict(state_dict=model.state_dict(), meta={}), folder / 'pruned.pth')
    cmhsa = Config.fromfile(repository / 'configs/cmhsa3_digits.py').model
    model = MODELS.build(cmhsa)
    torch.save(dict(state_dict=model.state_dict(), meta={}), folder / 'conv.pth')
    model.backbone.to_attention()
    torch.save(dict(state_dict=model.state_dict(), meta={}), folder / 'attn.pth')
    torch.save(small_timm('sa_quadratic_cifar', num_classes=3).state_dict(), folder / 'timm.pth')
    (folder / 'images/a').mkdir(parents=True)
    for i in range(4):
        pixels = np.random.default_rng(i).integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f'images/a/{i}.png')
    return folder


@pytest.fixture
def tool(repository, monkeypatch, capsys):
    """The tool in this process."""

    def call(*arguments):
        path = str(repository / 'tools/analysis_tools/analyze_heads.py')
        monkeypatch.setattr(sys, 'argv', [path, *map(str, arguments)])
        status = 0
        try:
            runpy.run_path(path, run_name='__main__')
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.mark.slow
def test_tool_as_a_process(folder, repository):
    out = folder / 'new/quadratic.json'
    log = run(
        'python',
        repository / 'tools/analysis_tools/analyze_heads.py',
        folder / 'quadratic.py',
        folder / 'quadratic.pth',
        '--json',
        out,
        folder=folder,
    )
    assert 'backbone.blocks.1.attn: by position, 8x8 tokens, 3 heads: ' in log and f'Saved {out}' in log
    loaded = check_schema(out.read_text())
    assert loaded['model'] == str(folder / 'quadratic.py') and loaded['num_images'] == 0
    model = small_timm('sa_quadratic_cifar', in_chans=1, checkpoint_path=str(folder / 'quadratic.pth'))
    for layer, block in zip(loaded['layers'], model.blocks):
        expected = head_report(block.attn, (8, 8)).to_dict()
        assert layer == {**expected, 'name': layer['name']}


def test_tool_content(folder, tool):
    status, text, _ = tool(
        folder / 'learned_content.py',
        folder / 'learned_content.pth',
        '--num-images',
        5,
        '--json',
        folder / 'content.json',
    )
    assert not status and 'mean over 5 images' in text
    loaded = check_schema((folder / 'content.json').read_text())
    assert [layer['attention'] for layer in loaded['layers']] == ['position', 'images'] * 2
    assert loaded['num_images'] == 5
    # The same as by hand.
    from attncnn_plugin.datasets import Digits

    model = small_timm(
        'sa_learned_content_cifar', in_chans=1, img_size=16, checkpoint_path=str(folder / 'learned_content.pth')
    )
    digits = Digits(split='test')
    images = [
        cv2.resize(digits[i * len(digits) // 5]['img'], (16, 16), interpolation=cv2.INTER_CUBIC) for i in range(5)
    ]
    expected = model_reports(model, (torch.tensor(np.array(images))[:, None].float() - 77.9) / 95.9)
    for layer, report in zip(loaded['layers'], expected):
        for head, other in zip(layer['heads'], report.heads):
            assert head['center'] == pytest.approx(other.center, abs=1e-4)

    status, text, _ = tool(
        folder / 'learned_content.py', folder / 'learned_content.pth', '--images', folder / 'images', '--num-images', 3
    )
    assert not status and 'mean over 3 images, 8x8 tokens' in text


def test_tool_cmhsa(folder, tool, repository):
    config = repository / 'configs/cmhsa3_digits.py'
    status, text, _ = tool(config, folder / 'attn.pth', '--num-images', 2, '--json', folder / 'cmhsa.json')
    assert not status
    loaded = check_schema((folder / 'cmhsa.json').read_text())
    assert [layer['attention'] for layer in loaded['layers']] == ['position', 'images'] * 4
    assert all(layer['summary'].startswith('one convolution, 3x3, error ') for layer in loaded['layers'])
    status, _, _ = tool(config, folder / 'conv.pth')
    assert 'no attention layers' in status and 'in the convolution phase' in status


def test_tool_pruned(folder, tool):
    status, text, _ = tool(folder / 'generalized.py', folder / 'pruned.pth', '--size', 5, 6, '--tolerance', 0.9)
    assert not status and '0.attn: by position, 5x6 tokens, 2 heads' in text and '5x6 tokens, 1 heads' in text


def test_tool_timm(folder, tool):
    arguments = ['embed_dim=12', 'num_heads=3', 'depth=2', 'img_size=(24,32)', 'patch_size=8', 'in_chans=1']
    status, text, error = tool(
        '--timm',
        'vit_tiny_patch16_224',
        '--images',
        folder / 'images',
        '--json',
        folder / 'timm.json',
        '--model-kwargs',
        *arguments,
    )
    assert not status and 'mean over 4 images, 3x4 tokens, 3 heads' in text
    assert 'The weights of vit_tiny_patch16_224 are random' in error
    loaded = check_schema((folder / 'timm.json').read_text())
    assert loaded['model'] == 'vit_tiny_patch16_224' and loaded['num_images'] == 4 and loaded['checkpoint'] is None
    assert all(head['prefix_mass'] > 0 for layer in loaded['layers'] for head in layer['heads'])
    small = [f'{name}={value}' for name, value in {**SMALL, 'num_classes': 3}.items()]
    for grid, source in (('16x16', ['--images', folder / 'images']), ('5x6', ['--size', '5', '6'])):
        status, text, error = tool(
            '--timm', 'sa_quadratic_cifar', *source, '--checkpoint', folder / 'timm.pth', '--model-kwargs', *small
        )
        assert not status and f'blocks.1.attn: by position, {grid} tokens, 3 heads' in text and 'random' not in error


@pytest.mark.parametrize(
    'arguments, message',
    [
        ([], 'a config and a checkpoint are needed, or --timm NAME'),
        (['quadratic.py', 'quadratic.pth', '--pretrained'], 'are for --timm'),
        (['--timm', 'vit_tiny_patch16_224'], '--timm needs --images FOLDER, or --size'),
        (['--timm', 'vit_tiny_patch16_224', '--size', '4', '4', '--model-kwargs', 'depth=1'], 'give --images FOLDER'),
        (['quadratic.py', 'quadratic.pth', '--json', 'images'], '--json images is a folder'),
        (['quadratic.py', '--timm', 'vit_tiny_patch16_224'], '--timm takes the place of the config'),
        (['quadratic.py', 'quadratic.pth', '--num-images', '0'], '--num-images 0 must be at least 1'),
        (['quadratic.py', 'nothing.pth'], 'nothing.pth can not be found'),
        (['quadratic.py', 'quadratic.pth', '--size', '1', '1'], 'is a single token'),
        (['quadratic.py', 'quadratic.pth', '--tolerance', '2'], 'tolerance=2.0 must be at least 1e-07'),
        (['learned_content.py', 'learned_content.pth', '--images', 'nowhere'], 'holds no image files'),
        (['--timm', 'no_such_model', '--images', 'images'], 'Unknown model'),
        (['--timm', 'resnet18', '--images', 'images'], 'ResNet, whose attention cannot be reported'),
    ],
)
def test_tool_errors(arguments, message, folder, tool, monkeypatch):
    monkeypatch.chdir(folder)
    status, _, error = tool(*arguments)
    assert message in (error if status == 2 else status)
