"""Contours around a given share of a head's attention (Cordonnier et al. 2020 (C20), Figure 4)."""

import math
from typing import List

import numpy as np

from ..analysis.head_centers import MAX_WIDTH


def gaussian_contour(center: np.ndarray, precision: np.ndarray, mass: float, points: int = 181) -> np.ndarray:
    """The ellipse around a Gaussian head that holds a share p of it: (δ − Δ)ᵀΣ⁻¹(δ − Δ) = 2 ln(1/(1 − p)).

    For the quadratic encoding, Σ⁻¹ = 2α·I (C20, eq. 9), it is the circle r² = ln(1/(1 − p))/α. Along an axis on which
    the head is wider than 1000 tokens it is drawn as if it were that wide: a stripe is two parallel lines.

    Args:
        center (ndarray): Δ in tokens, (row, column), ``(2,)``.
        precision (ndarray): Σ⁻¹ in 1/tokens², ``(2, 2)``.
        mass (float): p, above 0 and below 1.
        points (int): Points of the closed line. Defaults to 181.

    Returns:
        ndarray: Rows and columns, ``(points, 2)``, the last as the first.

    Raises:
        ValueError: A mass out of range.
    """
    check_mass(mass)
    eigenvalues, vectors = np.linalg.eigh(precision)
    radii = np.sqrt(-2 * math.log1p(-mass) / eigenvalues.clip(min=MAX_WIDTH**-2))
    angle = np.linspace(0, 2 * np.pi, points)
    return center + np.stack([np.cos(angle), np.sin(angle)], axis=-1) * radii @ vectors.T


def region_of_mass(probs: np.ndarray, mass: float) -> np.ndarray:
    """The fewest keys that hold a share of a query's attention, the most attended first.

    Args:
        probs (ndarray): Probabilities of the keys, ``(H, W)``; the share is one of their sum, which is below 1 where
            some of the attention lies outside of the grid.
        mass (float): The share, above 0 and below 1.

    Returns:
        ndarray: Whether a key belongs to them, ``(H, W)``, bool.

    Raises:
        ValueError: A mass out of range.
    """
    check_mass(mass)
    order = np.argsort(-probs, axis=None, kind='stable')
    total = np.cumsum(probs.reshape(-1)[order].astype(np.float64))
    count = int(np.searchsorted(total, mass * total[-1] * (1 - 1e-9))) + 1
    region = np.zeros(probs.size, dtype=bool)
    region[order[:count]] = True
    return region.reshape(probs.shape)


def outline(region: np.ndarray, inset: float = 0.0) -> List[np.ndarray]:
    """The closed lines around the pixels of a region; pixel (i, j) reaches from i − ½ to i + ½ and j − ½ to j + ½.

    Args:
        region (ndarray): ``(H, W)``, bool.
        inset (float): How far inside of the pixels the lines run, from 0 to below ½, so that those of several regions
            can be told apart. Defaults to 0.

    Returns:
        list[ndarray]: Rows and columns of the corners of each line, ``(n, 2)``, the last as the first.
    """
    padded = np.pad(region, 1)
    sides = {}  # (corner, step to the next one) of the sides, in order, with the region to the right
    for row, column in np.argwhere(region):
        for corner, step in (((0, 0), (0, 1)), ((0, 1), (1, 0)), ((1, 1), (0, -1)), ((1, 0), (-1, 0))):
            outside = row + 1 - step[1], column + 1 + step[0]  # to the left of the side
            if not padded[outside]:
                sides[(row + corner[0], column + corner[1]), step] = None
    lines, left = [], dict(sides)
    while left:
        line = [next(iter(left))]
        while True:
            del left[line[-1]]
            (row, column), (down, right) = line[-1]
            corner = row + down, column + right
            # First to the right: where two pixels touch at a corner alone, each keeps a line of its own.
            following = next(
                (corner, step) for step in ((right, -down), (down, right), (-right, down)) if (corner, step) in sides
            )
            if following == line[0]:
                break
            line.append(following)
        lines.append(_inset(*(np.array(part, dtype=float) for part in zip(*line)), inset))
    return lines


def _inset(corners: np.ndarray, steps: np.ndarray, inset: float) -> np.ndarray:
    """Moves each corner to the right of the side before it and of the side after it."""
    normals = np.stack([steps[:, 1], -steps[:, 0]], axis=-1)
    before = np.roll(normals, 1, axis=0)
    turns = (before != normals).any(-1)
    moved = corners - 0.5 + inset * (normals + before)
    return np.concatenate([moved[turns], moved[turns][:1]])


def check_mass(mass: float) -> None:
    """Raises ValueError if a mass is not above 0 and below 1."""
    if not 0 < mass < 1:
        raise ValueError(f'mass={mass} must be above 0 and below 1, for instance 0.5')
