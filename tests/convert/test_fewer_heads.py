"""Convolutions with fewer heads than kernel positions, against the singular value decomposition and brute force."""

import dataclasses
import itertools
import math

import pytest
import torch
from helpers.convolutions import CONVOLUTIONS, convolutions
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn

from attncnn_plugin.attention.images import QuadraticImageAttention, WindowImageAttention
from attncnn_plugin.convert import ConversionReport, conv_to_mhsa
from attncnn_plugin.convert.fewer_heads import amplification, best_probs

seeds = st.integers(0, 2**32 - 1)


def kernel(conv):
    """M: a row for each kernel position, in float64."""
    return conv.weight.detach().double().flatten(2).flatten(0, 1).T


def eckart_young(matrix, terms):
    """Relative error of the truncated singular value decomposition: no matrix of that rank is nearer."""
    values = torch.linalg.svdvals(matrix)
    return (values[terms:].norm() / values.norm()).item()


def stored_kernel(attention, conv):
    """M' as the kernel of a convolution, from the parameters of the attention: ``(C_out, C_in/groups, *kernel)``."""
    probs = attention.encoding.weight.detach().double().flatten(1).softmax(-1)
    weight = attention.value.weight.detach().double().unflatten(1, (attention.num_heads, -1))  # (C_out, N, C_in/groups)
    return torch.einsum('hk,ohi->oik', probs, weight).unflatten(2, conv.kernel_size)


def conv_with(matrix, out_channels, *kernel_size, **options):
    """A convolution with the kernel M."""
    in_channels = matrix.shape[1] // out_channels
    conv = CONVOLUTIONS[len(kernel_size)](in_channels, out_channels, kernel_size, dtype=matrix.dtype, **options)
    conv.weight.data = matrix.T.reshape(out_channels, in_channels, *kernel_size).contiguous()
    return conv


@st.composite
def convs(draw):
    """Convolutions in float64 with kernels from random to almost of low rank, and a number of heads for each."""
    conv, shape = draw(convolutions(ndims=(1, 2)))
    positions = math.prod(conv.kernel_size)
    assume(1 < positions < 10)
    nn.init.normal_(conv.weight)
    decay = draw(st.floats(0.1, 1))  # from singular values that fall fast to those of noise
    left, values, right = torch.linalg.svd(kernel(conv), full_matrices=False)
    matrix = left * (values * decay ** torch.arange(len(values))) @ right + draw(st.sampled_from([0, 0.2, 1]))
    conv.weight.data = (10.0 ** draw(st.integers(-3, 3)) * matrix).T.reshape(conv.weight.shape).contiguous()
    return conv, shape, draw(st.integers(1, positions - 1))


@given(convs(), st.sampled_from([(torch.float64, 1e-12), (torch.float32, 1e-5)]))
def test_layer_is_the_approximated_convolution(case, precision):
    (conv, shape, num_heads), (dtype, tolerance) = case, precision
    attention, report = conv_to_mhsa(conv.to(dtype), num_heads)
    assert isinstance(attention, WindowImageAttention) and attention.num_heads == report.num_heads == num_heads
    attention, conv = attention.double(), conv.double()
    approximated = stored_kernel(attention, conv)
    error = (approximated - conv.weight).norm() / conv.weight.norm()
    assert report.relative_error == pytest.approx(error.item(), abs=tolerance)
    assert report.bound == pytest.approx(eckart_young(kernel(conv), num_heads), abs=1e-12)
    guarantee = eckart_young(kernel(conv), num_heads - 1)
    assert report.bound - tolerance <= report.relative_error <= guarantee + tolerance

    x = torch.randn(shape, dtype=torch.float64)
    conv.weight.data = approximated
    expected = conv(x)
    assert (attention(x) - expected).norm() <= 1e-11 * expected.norm()


@given(convs(), st.sampled_from([(torch.float32, 1e-4), (torch.float16, 0.2), (torch.bfloat16, 0.5)]))
def test_narrow_layers(case, precision):
    """The heads do not amplify the rounding errors of a narrow dtype too much."""
    (conv, shape, num_heads), (dtype, tolerance) = case, precision
    conv = conv.to(dtype)
    attention, report = conv_to_mhsa(conv, num_heads)
    assert attention.value.weight.dtype == dtype and attention.encoding.weight.dtype == torch.float32
    assert report.relative_error <= eckart_young(kernel(conv), num_heads - 1) + tolerance / 10
    x = torch.randn(shape, dtype=torch.float64)
    if conv.bias is not None:
        attention.value.bias.data.zero_()
    expected = attention.double()(x)
    assert (attention.to(dtype)(x.to(dtype)).double() - expected).norm() <= tolerance * expected.norm()


@given(seeds, st.integers(2, 9), st.integers(1, 8))
def test_kernels_of_known_distributions_are_exact(seed, positions, num_heads):
    """N distributions make the kernel, so that N heads find it, and every further head keeps it."""
    assume(num_heads < positions)
    torch.manual_seed(seed)
    probs = torch.rand(num_heads, positions, dtype=torch.float64) ** 3
    matrix = probs.T @ torch.randn(num_heads, 12, dtype=torch.float64)
    for heads in range(num_heads, positions):
        assert conv_to_mhsa(conv_with(matrix, 4, positions), heads)[1].relative_error <= 1e-11


def test_positions_without_weights():
    """Causal kernels: a position that is never used gets no attention, and does not stand in the way."""
    matrix = torch.randn(9, 2, dtype=torch.float64).abs() @ torch.randn(2, 12, dtype=torch.float64)
    matrix[5:] = 0
    attention, report = conv_to_mhsa(conv_with(matrix, 4, 3, 3), 2)
    assert report.relative_error <= 1e-14
    assert (attention.encoding().flatten(1)[:, 5:] == 0).all()
    assert attention.encoding.weight.isfinite().all()
    assert (attention.float().encoding().flatten(1)[:, 5:] == 0).all()


@pytest.mark.parametrize('matrix', [[[1.0], [-1.0]], [[-1.0], [2.0], [-1.0]], [[1.0, 0], [0, 1.0], [-1.0, -1.0]]])
def test_kernels_that_sum_to_zero(matrix):
    """Differences: a head that attends to all positions alike sees nothing."""
    matrix = torch.tensor(matrix, dtype=torch.float64)
    for num_heads in range(1, len(matrix)):
        attention, report = conv_to_mhsa(conv_with(matrix, 1, len(matrix)), num_heads)
        assert attention.encoding.weight.isfinite().all()
        assert report.relative_error <= eckart_young(matrix, num_heads - 1) + 1e-12
        assert num_heads > 1 or report.relative_error == pytest.approx(best_single_distribution(matrix), abs=1e-6)


def best_single_distribution(matrix):
    """Least relative error of a ⊗ w with a ≥ 0, from the eigenvectors of all principal submatrices of MMᵀ.

    On the support of the best a, a is an eigenvector of the submatrix: the conditions of first order.
    """
    gram = matrix @ matrix.T
    best = 0.0
    for size in range(1, len(gram) + 1):
        for support in itertools.combinations(range(len(gram)), size):
            values, vectors = torch.linalg.eigh(gram[list(support)][:, list(support)])
            same_sign = (vectors > -1e-12).all(0) | (vectors < 1e-12).all(0)
            best = max([best, *values[same_sign].tolist()])
    return math.sqrt(max(1 - best / gram.trace().item(), 0))


@settings(max_examples=15)
@given(seeds, st.integers(2, 6))
@example(2, 6)  # these have more than one local minimum
@example(24, 6)
@example(62, 6)
def test_single_head(seed, positions):
    torch.manual_seed(seed)
    matrix = torch.randn(positions, 6, dtype=torch.float64)
    report = conv_to_mhsa(conv_with(matrix, 2, positions), 1)[1]
    assert report.relative_error == pytest.approx(best_single_distribution(matrix), abs=1e-6)


def least_error_by_descent(matrix, num_heads, starts=2):
    """The relative error of the best distributions that descents from random starts find."""
    found = []
    for _ in range(starts):
        scores = torch.randn(num_heads, len(matrix), dtype=matrix.dtype, requires_grad=True)
        optimizer = torch.optim.LBFGS([scores], max_iter=200, line_search_fn='strong_wolfe')

        def error(scores=scores, optimizer=optimizer):
            optimizer.zero_grad()
            basis = torch.linalg.qr(scores.softmax(1).T).Q
            rest = (matrix - basis @ (basis.T @ matrix)).norm() / matrix.norm()
            rest.backward()
            return rest

        optimizer.step(error)
        found.append(error().item())
    return min(found)


@pytest.mark.parametrize('seed', [0, 2])
def test_no_descent_finds_better_heads(seed):
    torch.manual_seed(seed)
    matrix = torch.randn(9, 12, dtype=torch.float64)
    report = conv_to_mhsa(conv_with(matrix, 3, 9), 4)[1]
    assert report.relative_error <= 1.001 * least_error_by_descent(matrix, 4)


def test_noise_is_not_amplified():
    """The singular vectors beyond the rank of a kernel are noise: no reason for heads that are nearly dependent."""
    for _ in range(10):
        scales = torch.logspace(0, -30, 9, dtype=torch.float64)[torch.randperm(9)]
        matrix = scales[:, None] * torch.randn(9, 3, dtype=torch.float64)
        for num_heads in (4, 8):
            probs = best_probs(matrix, num_heads)
            assert amplification(matrix, probs) <= 1e3
            assert conv_to_mhsa(conv_with(matrix, 1, 9), num_heads)[1].relative_error <= 1e-12


@pytest.mark.parametrize('scale', [1e-200, 1e200])
def test_any_scale(scale):
    matrix = torch.randn(6, 8, dtype=torch.float64)
    expected = conv_to_mhsa(conv_with(matrix, 2, 6), 3)[1]
    report = conv_to_mhsa(conv_with(matrix * scale, 2, 6), 3)[1]
    assert dataclasses.astuple(report) == pytest.approx(dataclasses.astuple(expected), abs=1e-9)


def test_exact_conversion_has_a_report():
    conv = nn.Conv2d(3, 4, 3)
    for attention, report in (conv_to_mhsa(conv), conv_to_mhsa(conv, 9), conv_to_mhsa(conv, num_heads=9)):
        assert isinstance(attention, QuadraticImageAttention)
        assert dataclasses.astuple(report) == (9, 0.0, 0.0, pytest.approx(800), 0.0, None, None)
        assert report.output_bound == 0


@pytest.mark.parametrize('num_heads', [1, 4, 9])
def test_kernel_of_zeros(num_heads):
    conv = nn.Conv2d(2, 3, 3)
    nn.init.zeros_(conv.weight)
    attention, report = conv_to_mhsa(conv, num_heads)
    assert report == ConversionReport(num_heads, 0.0, 0.0, alpha=800.0 if num_heads == 9 else None)
    x = torch.randn(1, 2, 5, 5)
    torch.testing.assert_close(attention(x), conv(x))


@pytest.mark.parametrize('num_heads', [0, -1, 7, 2.0, '2', True])
def test_wrong_num_heads(num_heads):
    with pytest.raises(ValueError, match=f'num_heads={num_heads!r} must be an integer from 1 to 6, the positions'):
        conv_to_mhsa(nn.Conv2d(1, 1, (2, 3)), num_heads)


@pytest.mark.parametrize('num_heads', [None, 2])
@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_weights_that_are_not_finite(num_heads, value):
    conv = nn.Conv2d(1, 1, 3)
    conv.weight.data[0, 0, 1, 1] = value
    with pytest.raises(ValueError, match='not finite'):
        conv_to_mhsa(conv, num_heads)
