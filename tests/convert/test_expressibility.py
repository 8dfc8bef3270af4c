"""The shifts that heads span, and how many heads a convolution takes."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.grids import SHIFTS, gaussian_layer
from helpers.head_reports import shift_operators
from helpers.layers import TOKENS
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attncnn_plugin.attention import ContentAttention, GeneralizedQuadraticAttention
from attncnn_plugin.attention.images import WindowImageAttention
from attncnn_plugin.attention.window import Window
from attncnn_plugin.convert import conv_to_mhsa, expressible, expressible_shifts, min_heads
from attncnn_plugin.convert.expressible import expressible_shifts_of_maps


def test_hard_heads_are_expressible_in_the_interior_and_not_at_the_border():
    layer = gaussian_layer(2, SHIFTS)
    report = expressible_shifts(layer, 3, (6, 7), queries='interior')
    assert report.missing == [] and report.rank == 9
    assert report.expressible == SHIFTS and max(report.residual) <= 1e-12

    report = expressible_shifts(layer, 3, (6, 7))
    assert report.missing == [shift for shift in SHIFTS if shift != (0, 0)] and report.rank == 9
    assert str(report).endswith('; exactly the shifts (0, 0)')

    nearly = gaussian_layer(2, SHIFTS, alpha=8)  # e^-8 goes to a neighbour
    assert 1e-5 < max(expressible_shifts(nearly, 3, (7, 7), queries='interior').residual) < 1e-3


def test_center_is_row_then_column():
    report = expressible_shifts(gaussian_layer(2, [(1, -2)]), 5, (6, 7), queries='interior')
    assert report.expressible == [(1, -2)] and report.kernel_size == (5, 5)
    # One row down and two columns left: the map that takes pixel (q1 + 1, q2 - 2).
    probs = torch.zeros(6, 7, 6, 7, dtype=torch.float64)
    for row, column in itertools.product(range(6), range(7)):
        probs[row, column, min(row + 1, 5), max(column - 2, 0)] = 1
    expected = expressible_shifts_of_maps(probs.reshape(1, 42, 42), 5, (6, 7), queries='interior')
    assert expected.expressible == report.expressible


def test_faint_maps_count_like_strong_ones():
    layer = WindowImageAttention(1, 1, 2, Window.of(nn.Conv2d(1, 1, (1, 2), padding='same')), dtype=torch.float64)
    with torch.no_grad():
        layer.encoding.weight.copy_(torch.tensor([[[[0.0, -800.0]]], [[[-800.0, 0.0]]]]))
    probs = layer.attention_probs((3, 4))
    scaled = probs * torch.tensor([1.0, 1e-8])[:, None, None]
    assert expressible_shifts_of_maps(scaled, (1, 2), (3, 4)).missing == []


@pytest.mark.parametrize('leak', [1e-3, 1e-5, 1e-7, 1e-12])
def test_a_small_residual_is_exact(leak):
    """A hard head that gives a little to one far key: ‖S_δ − ⟨S_δ, P⟩P/‖P‖²‖ = leak·‖S_δ‖, not its root."""
    identity = torch.eye(30, dtype=torch.float64)
    probs = identity + leak * identity.roll(7, dims=1)
    report = expressible_shifts_of_maps(probs[None], 1, (5, 6))
    assert report.residual == [pytest.approx(leak / math.hypot(1, leak), rel=1e-3)]
    assert (report.missing == []) == (leak < 1e-6)


def test_given_maps():
    """The maps of a layer, as they are in float32, by a grid given as a list; maps of images too."""
    layer = GeneralizedQuadraticAttention(4, 5)
    expected = expressible_shifts(layer, 3, (5, 6))
    report = expressible_shifts_of_maps(layer.attention_probs((5, 6)).detach(), 3, [5, 6])
    assert report.residual == pytest.approx(expected.residual, rel=0, abs=1e-5)
    assert expressible_shifts_of_maps(layer.exact_attention_probs((5, 6)), 3, [5, 6]) == expected
    padding = torch.cat([layer.exact_attention_probs((5, 6)), torch.zeros(1, 30, 30)])  # all that a head sees
    assert expressible_shifts_of_maps(padding, 3, [5, 6]).residual == pytest.approx(expected.residual, abs=1e-12)
    nothing = expressible_shifts_of_maps(torch.zeros(0, 30, 30), 3, (5, 6))
    assert len(nothing.missing) == 9 and nothing.residual == [1.0] * 9 and nothing.rank == 0


@given(
    st.sampled_from(['quadratic', 'generalized', 'learned']),
    st.integers(1, 10),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.integers(3, 5),
    st.integers(3, 6),
    st.sampled_from(['all', 'interior']),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 2**31),
)
def test_by_least_squares(kind, num_heads, kernel_size, height, width, queries, dtype, seed):
    """What is left of single shifts, of the worst kernel and of others, by NumPy's least squares on the whole maps."""
    torch.manual_seed(seed)
    probs = TOKENS[kind](4, num_heads, dtype=dtype).attention_probs((height, width)).detach()
    report = expressible_shifts_of_maps(probs, kernel_size, (height, width), queries)
    pixels = list(itertools.product(range(height), range(width)))
    before, after = [(k - 1) // 2 for k in kernel_size], [k // 2 for k in kernel_size]
    chosen = [
        n
        for n, (row, column) in enumerate(pixels)
        if queries == 'all' or (before[0] <= row < height - after[0] and before[1] <= column < width - after[1])
    ]
    shifts = shift_operators(sorted(report.expressible + report.missing), (height, width), 'zeros').numpy()
    shifts, maps = (x[:, chosen].reshape(len(x), -1).T for x in (shifts, probs.double().numpy()))
    maps = maps / np.maximum(np.linalg.norm(maps, axis=0), 1e-300)

    def left_of(kernels):
        wanted = shifts @ kernels
        solution, _, rank, _ = np.linalg.lstsq(maps, wanted, rcond=1e-6)
        assert rank == report.rank
        left, whole = (np.linalg.norm(x, axis=0) for x in (wanted - maps @ solution, wanted))
        return left, left / np.maximum(whole, 1e-300), wanted - maps @ solution

    left, relative, of_shifts = left_of(np.eye(len(report.residual)))
    assert report.residual == pytest.approx(relative, abs=1e-9)
    assert report.error == pytest.approx(np.linalg.norm(left) / np.linalg.norm(shifts), abs=1e-9)
    # The kernel w whose ‖Σ w E‖ / ‖Σ w S‖ is the largest; the S are orthogonal.
    lengths = np.maximum(np.linalg.norm(shifts, axis=0), 1)
    worst = np.linalg.svd(of_shifts / lengths, full_matrices=False)[2][0] / lengths
    others = np.random.default_rng(seed).normal(size=(20, len(worst)))
    relative = left_of(np.stack([worst, *others]).T)[1]
    assert report.worst == pytest.approx(relative[0], abs=1e-9) and relative.max() <= report.worst + 1e-9


@given(st.permutations(SHIFTS), st.integers(0, 9), st.sampled_from([torch.float32, torch.float64]))
def test_heads_on_pixels_span_what_they_are_on(centers, number, dtype):
    """Each head takes a ninth of a random kernel; without all nine, of some kernel nothing is spanned."""
    layer = gaussian_layer(2, centers[:number] + centers[:1]).to(dtype)  # one of them twice
    report = expressible_shifts(layer, 3, (6, 5), queries='interior')
    number = max(number, 1)
    assert report.error == pytest.approx((1 - number / 9) ** 0.5, abs=1e-12)
    assert report.worst == pytest.approx(float(number < 9), abs=1e-12) and report.rank == number
    assert report.expressible == sorted(centers[:number])
    words = ('0%', '0%') if number == 9 else (f'{100 * report.error:.3g}%', '100%; exactly the shifts ')
    assert str(report).startswith('the heads span a random 3x3 kernel to within {}, any to within {}'.format(*words))


@given(st.integers(1, 8), st.integers(0, 2**31))
def test_fewer_heads_than_positions_cannot_span_them(num_heads, seed):
    """Whatever their maps: K² directions do not fit into fewer."""
    probs = torch.rand(num_heads, 30, 30, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    report = expressible_shifts_of_maps(probs, 3, (5, 6), queries='interior')
    assert report.worst == pytest.approx(1, abs=1e-12) and report.error >= (1 - num_heads / 9) ** 0.5 - 1e-12


@pytest.mark.parametrize(
    'options, interior, everywhere',
    [
        (dict(padding=1), [], []),
        (dict(padding=1, padding_mode='replicate'), [], [shift for shift in SHIFTS if shift != (0, 0)]),
        (dict(padding=2, dilation=2), [shift for shift in SHIFTS if shift != (0, 0)], None),
    ],
)
def test_attention_made_of_convolutions(options, interior, everywhere):
    layer = conv_to_mhsa(nn.Conv2d(2, 2, 3, **options))[0]
    assert expressible_shifts(layer, 3, (6, 6), queries='interior').missing == interior
    if everywhere is not None:
        assert expressible_shifts(layer, 3, (6, 6)).missing == everywhere


@pytest.mark.parametrize(
    'arguments, error, message',
    [
        ((nn.Linear(2, 2), 3, (5, 5)), TypeError, 'layer is a Linear'),
        ((ContentAttention(4, 2), 3, (5, 5)), ValueError, 'depend on the input'),
        ((gaussian_layer(2, SHIFTS), 3, (5, 5), 'some'), ValueError, "queries='some' is unknown"),
        ((gaussian_layer(2, SHIFTS), 3, (0, 5)), ValueError, r'size=\(0, 5\)'),
        ((gaussian_layer(2, SHIFTS), (3, 0), (5, 5)), ValueError, r'kernel_size=\(3, 0\)'),
        ((gaussian_layer(2, SHIFTS), (3, 6), (5, 5), 'interior'), ValueError, 'no query with the whole window inside'),
        ((conv_to_mhsa(nn.Conv2d(2, 2, 3))[0], 3, (5, 5)), ValueError, 'one output for each query'),
        ((conv_to_mhsa(nn.Conv1d(2, 2, 3, padding=1))[0], 3, (5, 5)), ValueError, '1 axes of pixels'),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        expressible_shifts(*arguments)


def token_matrices(kernel_size, patch, channels, tokens):
    """A matrix for each pair of tokens of a random convolution: ``(query tokens × key tokens, entries)``."""
    height, width = (n * p for n, p in zip(tokens, patch))
    conv = nn.Conv2d(channels, channels, kernel_size, padding='same', bias=False, dtype=torch.float64)
    basis = torch.eye(channels * height * width, dtype=torch.float64).unflatten(1, (channels, height, width))
    flat = F.unfold(conv(basis).detach(), patch, stride=patch)  # (key pixels, channels × patch, query tokens)
    flat = F.unfold(flat.permute(1, 2, 0).reshape(-1, channels, height, width), patch, stride=patch)
    flat = flat.unflatten(0, (-1, math.prod(tokens)))  # (output entries, q, input entries, k)
    return flat.permute(1, 3, 0, 2).flatten(0, 1).flatten(1)


@pytest.mark.parametrize(
    'kernel_size, patch, channels, tokens',
    [
        ((3, 3), (2, 2), 1, (3, 3)),
        ((3, 3), (3, 3), 1, (2, 3)),
        ((5, 3), (2, 3), 2, (3, 2)),
        ((2, 3), (2, 2), 1, (3, 3)),
        ((1, 5), (1, 2), 3, (1, 4)),
        ((3, 3), (1, 1), 3, (4, 3)),
        ((2, 3), (1, 1), 3, (3, 4)),
    ],
)
def test_fewer_heads_cannot_be_the_convolution(kernel_size, patch, channels, tokens):
    needed = min_heads(kernel_size, patch)
    target = token_matrices(kernel_size, patch, channels, tokens)
    target = target / target.norm()
    # N heads, whatever their maps: a sum of N terms, map times matrix. The nearest one is the truncated SVD.
    singular = torch.linalg.svdvals(target)
    assert singular[needed:].norm() <= 1e-12  # needed heads are enough
    assert singular[needed - 1 :].norm() > 1e-3  # one fewer are not


@pytest.mark.parametrize('kernel_size, patch, channels', [((3, 3), (1, 1), n) for n in (1, 2)] + [((7, 7), (2, 2), 1)])
def test_few_channels_need_fewer_heads(kernel_size, patch, channels):
    """Not more than the matrices between two patches have numbers of their own, (2P − 1)²·C_in·C_out, and one."""
    most = (2 * patch[0] - 1) ** 2 * channels**2
    assert most < min_heads(kernel_size, patch) - 1
    singular = torch.linalg.svdvals(token_matrices(kernel_size, patch, channels, (4, 4)))
    assert singular[most:].norm() <= 1e-12 * singular.norm()


def test_maps_in_parts(monkeypatch):
    """One query at a time."""
    probs = GeneralizedQuadraticAttention(4, 5).exact_attention_probs((5, 6))
    expected = expressible_shifts_of_maps(probs, 3, (5, 6))
    monkeypatch.setattr(expressible, 'CHUNK_ELEMENTS', 1)
    assert expressible_shifts_of_maps(probs, 3, (5, 6)).residual == pytest.approx(expected.residual, abs=1e-12)


def test_shifts_that_leave_the_grid_from_everywhere():
    report = expressible_shifts(GeneralizedQuadraticAttention(4, 5), 7, (3, 3))
    assert (3, 0) in report.expressible and min(report.residual) == 0 and max(report.residual) <= 1
