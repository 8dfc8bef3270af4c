"""The values of given heads for a convolution, against least squares by numpy on dense matrices and convolutions."""

import copy
import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.convolutions import convolutions, relative_error
from helpers.grids import SHIFTS, gaussian_layer, matrix, on_images, shift_operators
from helpers.layers import TOKENS
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from attncnn_plugin.attention import ContentAttention, WindowImageAttention
from attncnn_plugin.attention.window import Window
from attncnn_plugin.convert import conv_to_mhsa, expressible_shifts, fit_values

DOUBLE = dict(dtype=torch.float64)


def interior(conv, size):
    """Whether the whole window of each output is inside, as nested loops for odd and even kernels with stride 1."""
    before = [d * (k - 1) // 2 for k, d in zip(conv.kernel_size, conv.dilation)]
    after = [d * (k - 1) - b for k, d, b in zip(conv.kernel_size, conv.dilation, before)]
    pixels = itertools.product(*map(range, size))
    return [all(b <= n < m - a for n, m, b, a in zip(pixel, size, before, after)) for pixel in pixels]


def reference(probs, conv, size, rows):
    """numpy's least squares: the matrix of the heads, those of the shifts, both at some queries, and the solution."""
    shifts = shift_operators(conv, size)[:, rows].flatten(1).T.numpy()
    heads = probs[:, rows].flatten(1).T.numpy()
    return heads, shifts, np.linalg.lstsq(heads, shifts, rcond=1e-12)[0]


@given(convolutions(), st.randoms(use_true_random=False))
def test_hard_heads_in_any_order_are_the_convolution(case, random):
    """Borders included: the layer pads the image as the convolution does."""
    conv, shape = case
    attention = conv_to_mhsa(conv)[0]
    order = list(range(attention.num_heads))
    random.shuffle(order)
    with torch.no_grad():
        attention.encoding.center.copy_(attention.encoding.center[order])
        nn.init.normal_(attention.value.weight)  # what it was does not matter
    before = copy.deepcopy(attention.state_dict())
    fitted, report = fit_values(attention, conv, shape[2:], queries='all')
    x = torch.randn(shape, dtype=torch.float64)
    assert relative_error(fitted(x), conv(x)) <= 1e-10
    assert report.exact and report.error <= 1e-12
    assert all(torch.equal(value, before[name]) for name, value in attention.state_dict().items())


@given(
    st.sampled_from(['quadratic', 'generalized', 'learned']),
    st.integers(1, 10),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
    st.integers(1, 2),
    st.sampled_from(['zeros', 'replicate', 'reflect', 'circular']),
    st.sampled_from(['interior', 'all']),
    st.integers(0, 2**16),
)
def test_values_by_least_squares(kind, num_heads, kernel_size, dilation, groups, padding_mode, queries, seed):
    torch.manual_seed(seed)
    layer = TOKENS[kind](2, num_heads, **DOUBLE)
    conv = nn.Conv2d(
        2, 4, kernel_size, padding='same', dilation=dilation, groups=groups, padding_mode=padding_mode
    ).double()
    size = (6, 7)
    inside = interior(conv, size)
    rows = [n for n, yes in enumerate(inside) if yes or queries == 'all']
    heads, shifts, solution = reference(layer.attention_probs(size).detach(), conv, size, rows)
    scaled = heads / np.linalg.norm(heads, axis=0)
    condition = np.linalg.cond(scaled)
    assume(condition < 1e6)
    fitted, report = fit_values(layer, conv, size, queries, tolerance=1e-10)

    assert report.rank == num_heads and report.condition == pytest.approx(condition, rel=1e-6)
    assert np.abs(report.coefficients.numpy() - solution).max() <= 1e-8 * max(1, np.abs(solution).max())
    residual = np.linalg.norm(heads @ solution - shifts, axis=0) / np.linalg.norm(shifts, axis=0)
    assert report.residual.numpy() == pytest.approx(residual, abs=1e-9)

    # The layers as dense matrices, from what they answer to single pixels.
    wanted = matrix(conv, 2, size).flatten(2)
    got = matrix(on_images(fitted), 2, size).flatten(2)
    assert report.error == pytest.approx(((got - wanted).norm() / wanted.norm()).item(), abs=1e-9)
    error = ((got - wanted)[:, inside].norm() / wanted[:, inside].norm()).item()
    assert report.interior_error == pytest.approx(error, abs=1e-9)
    assert report.relative_error == (report.error if queries == 'all' else report.interior_error)
    zero = torch.zeros(1, *size, 2, dtype=torch.float64)
    assert torch.allclose(fitted(zero), conv.bias.expand(1, *size, 4))

    if padding_mode == 'zeros':
        spanned = expressible_shifts(layer, kernel_size, size, queries, tolerance=1e-10) if dilation == (1, 1) else None
        assert spanned is None or spanned.residual == pytest.approx(report.residual.tolist(), rel=0, abs=1e-9)


def test_some_kernels_are_exact_where_their_shifts_are_not():
    """Two heads and three positions, but a kernel in their span: (1, 2, 1) by one head, its shift by another."""
    window = Window.of(nn.Conv1d(1, 1, 4, padding='same'))
    attention = WindowImageAttention(1, 1, 2, window, dtype=torch.float64)
    with torch.no_grad():
        blur = torch.tensor([0.25, 0.5, 0.25, 0.0]).double()
        attention.encoding.weight.copy_(torch.stack([blur, blur.roll(1)])[:, None].log().clamp(min=-800))
    conv = nn.Conv1d(1, 1, 4, padding='same').double()
    conv.weight.data = torch.tensor([[[1.0, 0.0, -3.0, -2.0]]]).double()  # (1, 2, 1, 0) − 2·(0, 1, 2, 1)
    with torch.device('meta'):  # whatever the default device is
        fitted, report = fit_values(attention, conv, 12, queries='all')
    assert report.exact and report.error <= 1e-14 and report.residual.min() > 0.1
    assert fitted.value.weight.flatten().tolist() == pytest.approx([4, -8])


@pytest.mark.parametrize('distance', [1e-2, 1e-4, 0.0])
def test_nearly_identical_heads_are_reported(distance):
    """The maps of two heads differ by about their distance; the condition number is at least its inverse."""
    centers = [*SHIFTS, (distance, 0.0)]
    layer = gaussian_layer(2, centers, alpha=2, **DOUBLE)
    conv = nn.Conv2d(2, 2, 3, padding=1).double()
    _, report = fit_values(layer, conv, (7, 7))
    assert report.rank == (10 if distance else 9)
    if distance:
        maps = layer.attention_probs((7, 7))[:, interior(conv, (7, 7))].detach().flatten(1).numpy()
        condition = np.linalg.cond(maps.T / np.linalg.norm(maps, axis=1))
        assert report.condition == pytest.approx(condition, rel=1e-4) and condition > 1 / distance
        others = fit_values(gaussian_layer(2, SHIFTS, alpha=2, **DOUBLE), conv, (7, 7))[1]
        assert report.interior_error <= others.interior_error + 1e-12
        assert report.amplification > others.amplification > 1
    else:
        assert report.condition > 1e12
    assert f'10 heads of rank {report.rank}, condition number {report.condition:.3g}' in str(report)
    assert report.relative_error == report.interior_error and report.size == (7, 7)


def test_tolerance_bounds_the_values():
    layer = gaussian_layer(2, [*SHIFTS, (1e-4, 0.0)], alpha=2, **DOUBLE)
    conv = nn.Conv2d(2, 2, 3, padding=1).double()
    exact, bounded = (fit_values(layer, conv, (7, 7), tolerance=tolerance) for tolerance in (1e-9, 1e-3))
    assert (exact[1].rank, bounded[1].rank) == (10, 9)
    assert exact[1].amplification > 10 * bounded[1].amplification
    assert bounded[1].interior_error >= exact[1].interior_error
    x = torch.randn(2, 2, 7, 7)
    for layer, report in (exact, bounded):  # what is reported is what happens in float32
        rounding = relative_error(on_images(copy.deepcopy(layer).float())(x), on_images(layer)(x.double()).float())
        assert rounding <= 1e-6 * report.amplification


ATTENTION = gaussian_layer(2, SHIFTS, **DOUBLE)


@pytest.mark.parametrize(
    'arguments, error, message',
    [
        ((ATTENTION, nn.Linear(2, 2), 6), TypeError, 'conv is a Linear'),
        ((ContentAttention(2, 2), nn.Conv2d(2, 2, 3), 6), ValueError, 'depend on the input'),
        ((ATTENTION, nn.Conv1d(2, 2, 3, padding=1), 6), ValueError, 'layer has 2 axes of pixels, but the convolution'),
        ((ATTENTION, nn.Conv2d(3, 2, 3, padding=1), 6), ValueError, 'in_channels=3, but heads of attention read 2'),
        ((ATTENTION, nn.Conv2d(2, 2, 7, padding=3), 6), ValueError, 'no query with the whole window inside'),
        (
            (conv_to_mhsa(nn.Conv2d(2, 2, 3, stride=2))[0], nn.Conv2d(2, 2, 3), 9),
            ValueError,
            '4 queries from pixel 1 on along axis 0 of 9 pixels, but the convolution, .*, has 7 from pixel 1',
        ),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        fit_values(*arguments)


def test_weights_that_are_not_finite_and_layers_whose_values_do_not_fit():
    conv = nn.Conv2d(2, 2, 3, padding=1)
    conv.weight.data[0, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match='not finite'):
        fit_values(ATTENTION, conv, 6)
    empty = copy.deepcopy(ATTENTION)
    empty.prune_heads(range(9), allow_empty=True)
    with pytest.raises(ValueError, match='attention has num_heads=0'):
        fit_values(empty, nn.Conv2d(2, 2, 3, padding=1), 6)


def test_table_of_the_documentation():
    """Relative errors and condition numbers of fitted heads at the shifts of 3×3 and 5×5, to the digits given."""
    page = (Path(__file__).parents[2] / 'docs/convert.md').read_text()
    rows = re.findall(r'^\| ' + r' \| '.join([r'(\d\S*)'] * 6) + r' \|$', page, re.MULTILINE)
    assert len(rows) == 4
    conv = nn.Conv2d(16, 16, 3, padding=1)
    for row in rows:
        alpha, _, *expected = map(float, row)
        found = []
        for reach in (1, 2):
            centers = list(itertools.product(range(-reach, reach + 1), repeat=2))
            report = fit_values(gaussian_layer(16, centers, alpha), conv, 16)[1]
            found += [report.relative_error, report.condition]
        assert found == pytest.approx(expected, rel=0.2), alpha
