"""Contours of Gaussian heads: closed forms, and the mass that they hold."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.path import Path as Line

from attncnn_plugin.visualization.center_figures import gaussian_contour


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
    border = [np.linalg.norm(ellipse - pixel, axis=1).min() < 0.75 for pixel in pixels]
    far = ~np.reshape(border, inside.shape)  # inside of a contour is what gets most
    assert probs[inside & far].min() > probs[~inside & far].max()


def test_a_stripe_is_as_if_it_were_1000_tokens_wide():
    line = gaussian_contour(np.zeros(2), np.diag([4.0, 0.0]), 0.5)
    assert np.abs(line).max(0) == pytest.approx([0.5 * math.sqrt(2 * math.log(2)), 1000 * math.sqrt(2 * math.log(2))])
