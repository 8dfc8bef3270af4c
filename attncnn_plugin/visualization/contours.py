"""Contours around a given share of a head's attention (Cordonnier et al. 2020 (C20), Figure 4)."""

import math
from typing import List

import numpy as np
from contourpy import contour_generator

from ..analysis.shift_statistics import MAX_WIDTH


def gaussian_contour(center: np.ndarray, precision: np.ndarray, mass: float) -> np.ndarray:
    """Returns the ellipse around a Gaussian head that holds a share p of it: (δ − Δ)ᵀΣ⁻¹(δ − Δ) = 2 ln(1/(1 − p)).

    For the quadratic encoding, Σ⁻¹ = 2α·I (C20, eq. 9), it is the circle r² = ln(1/(1 − p))/α. Along an axis on which
    the head is wider than 1000 tokens it is drawn as if it were that wide: a stripe is two parallel lines.

    Args:
        center (ndarray): Δ in tokens, (row, column), ``(2,)``.
        precision (ndarray): Σ⁻¹, ``(2, 2)``.
        mass (float): p, above 0 and below 1.

    Returns:
        ndarray: Rows and columns, ``(181, 2)``, the last as the first.
    """
    eigenvalues, vectors = np.linalg.eigh(precision)
    radii = np.sqrt(-2 * math.log1p(-mass) / eigenvalues.clip(min=MAX_WIDTH**-2))
    angle = np.linspace(0, 2 * np.pi, 181)
    return center + np.stack([np.cos(angle), np.sin(angle)], axis=-1) * radii @ vectors.T


def region_of_mass(probs: np.ndarray, mass: float) -> np.ndarray:
    """Returns the fewest keys that hold a share of a query's attention, the most attended first.

    Args:
        probs (ndarray): Probabilities of the keys, ``(H, W)``; the share is one of their sum, which is below 1 where
            some of the attention lies outside of the grid.
        mass (float): The share, above 0 and below 1.

    Returns:
        ndarray: ``(H, W)``, bool.
    """
    order = np.argsort(-probs, axis=None, kind='stable')
    total = np.cumsum(probs.reshape(-1)[order].astype(np.float64))
    count = int(np.searchsorted(total, mass * total[-1] * (1 - 1e-9))) + 1
    region = np.zeros(probs.size, dtype=bool)
    region[order[:count]] = True
    return region.reshape(probs.shape)


def outline(region: np.ndarray, inset: float = 0.0) -> List[np.ndarray]:
    """Returns the closed lines around the pixels of a region, with their corners cut.

    Args:
        region (ndarray): ``(H, W)``, bool. Pixel (i, j) reaches from i − ½ to i + ½ and from j − ½ to j + ½.
        inset (float): How far inside of the pixels the lines run, from 0 to below 0.3, so that those of several regions
            can be told apart. Defaults to 0.

    Returns:
        list[ndarray]: Rows and columns of each line, ``(n, 2)``, the last as the first.
    """
    # A line at a level between 0, outside, and 1 crosses from 0.3 inside of a pixel's side to 0.3 outside of it.
    sides = [(np.arange(-1, n + 1)[:, None] + [-0.2, 0.2]).ravel() for n in region.shape]
    corners = np.pad(region, 1).astype(float).repeat(2, 0).repeat(2, 1)
    lines = contour_generator(sides[1], sides[0], corners).lines(0.5 + inset / 0.6)
    return [line[:, ::-1] for line in lines]
