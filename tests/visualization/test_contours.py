"""Contours: closed forms, and the mass that they hold."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.path import Path as Line

from attncnn_plugin.visualization.contours import gaussian_contour, outline, region_of_mass


def gaussian_probs(center, precision, size):
    """exp(−½(δ − Δ)ᵀΣ⁻¹(δ − Δ)) around the middle of a grid, by the definition."""
    shift = np.stack(np.mgrid[:size, :size], axis=-1) - size // 2 - np.asarray(center)
    probs = np.exp(-np.einsum('...i,ij,...j', shift, np.asarray(precision), shift) / 2)
    return probs / probs.sum()


@given(st.floats(0.05, 3), st.sampled_from([0.5, 0.9]), st.floats(-3, 3), st.floats(-3, 3))
def test_circles_have_the_closed_form(alpha, mass, row, column):
    line = gaussian_contour(np.array([row, column]), 2 * alpha * np.eye(2), mass)
    radius = np.linalg.norm(line - [row, column], axis=1)
    assert np.allclose(radius**2, math.log(1 / (1 - mass)) / alpha)


@pytest.mark.parametrize('mass', [0.5, 0.9])
@pytest.mark.parametrize('precision', [[[0.2, 0.0], [0.0, 0.2]], [[0.1, 0.0], [0.0, 0.6]], [[0.05, 0.05], [0.05, 0.3]]])
def test_ellipses_hold_their_mass_and_agree_with_the_probabilities(precision, mass):
    center, size = (1, -2), 41
    probs = gaussian_probs(center, precision, size)
    ellipse = gaussian_contour(np.array(center), np.array(precision), mass)
    pixels = np.argwhere(np.ones((size, size))) - size // 2
    inside = Line(ellipse).contains_points(pixels).reshape(size, size)
    assert abs(probs[inside].sum() - mass) < 0.03
    # The region of pixels is that of the closed form, but for pixels at its border.
    region = region_of_mass(probs, mass)
    wrong = pixels[(region != inside).flatten()]
    assert all(np.linalg.norm(ellipse - pixel, axis=1).min() < 0.75 for pixel in wrong)


@given(st.integers(0, 10**6), st.floats(0.05, 0.95))
def test_regions_hold_their_mass_and_no_more_than_needed(seed, mass):
    probs = np.random.default_rng(seed).dirichlet(np.full(30, 0.3)).reshape(5, 6) * 0.8  # the rest is outside
    region = region_of_mass(probs, mass)
    held = probs[region].sum() / probs.sum()
    assert held >= mass - 1e-9 and held - probs[region].min() / probs.sum() < mass
    assert probs[region].min() >= probs[~region].max(initial=0)


def test_a_share_that_some_keys_hold_exactly():
    """A key is not added for what sums lose by rounding."""
    for size in range(2, 50):
        probs = np.full((1, size), 1 / size)
        assert [region_of_mass(probs, held / size).sum() for held in range(1, size)] == [*range(1, size)]


@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.1, 0.25]))
def test_outlines_surround_the_pixels_of_the_region_alone(seed, inset):
    region = np.random.default_rng(seed).random((5, 7)) < 0.5
    lines = outline(region, inset)
    pixels = np.argwhere(np.ones_like(region))
    inside = sum(Line(line, closed=True).contains_points(pixels).astype(int) for line in lines) if lines else 0
    assert np.array_equal(np.broadcast_to(inside, region.size) % 2, region.flatten())
    for line in lines:
        assert np.array_equal(line[0], line[-1])
        assert (np.abs(line % 1 - 0.5) < 0.3 + 1e-6).any(1).all()  # near the sides of pixels


def test_the_outline_of_a_pixel():
    """As far inside of its sides as it was asked for."""
    region = np.zeros((3, 4), dtype=bool)
    region[1, 3] = True
    (line,) = outline(region, 0.1)
    assert np.allclose([line.min(0), line.max(0)], [[0.6, 2.6], [1.4, 3.4]])


def test_a_stripe_is_as_if_it_were_1000_tokens_wide():
    line = gaussian_contour(np.zeros(2), np.diag([4.0, 0.0]), 0.5)
    assert np.abs(line).max(0) == pytest.approx([0.5 * math.sqrt(2 * math.log(2)), 1000 * math.sqrt(2 * math.log(2))])
