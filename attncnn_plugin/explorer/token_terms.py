"""The terms of scores that depend on an image: tokens in their principal axes, and what the heads make of them.

A score q·k is linear in the token of the query and in that of the key, a score q·r_δ in that of the query (Cordonnier
et al. 2020 (C20), eq. 8). So the tokens of a layer and a matrix for each head say all of it. They are far fewer numbers
than the scores of all queries and keys, and images can share the matrices.
"""

import copy
from typing import Dict, List, Tuple

import torch
from torch import Tensor

from ..layers import AttentionLayer
from .layer_grid import LayerGrid
from .stream import Quantized

LARGEST = 2**22  # whole number of a quantized one
RANK_TOLERANCE = 1e-6  # axes along which tokens deviate less, relative to the first one, are left out


class TokenTerms:
    """The terms by tokens of a layer for some images, before they are quantized.

    A token is t = m + Σ_i c_i b_i, with the mean m of all tokens, r principal axes b_i, and uncorrelated coordinates
    c_i of mean 0 and mean square 1. A function of t that is linear up to a constant is known from its values at m and
    at all m + b_i.

    Args:
        layer (AttentionLayer): The layer; its scores depend on content.
        inputs (Tensor): The tokens of the images, ``(B, H, W, D)``.
        grid (LayerGrid): The grid of the layer. Where zeros are keys, they are one more token, the last.

    Attributes:
        images (int): Number of images B.
        encodes (bool): Whether the layer adds a position encoding to the tokens of queries and keys.
        arrays (dict[str, Tensor]): The arrays of :mod:`.stream`; ``matrices`` only if there are scores q·k,
            ``row_shifts`` and ``column_shifts`` only if there are scores q·r_δ.
    """

    @torch.no_grad()
    def __init__(self, layer: AttentionLayer, inputs: Tensor, grid: LayerGrid) -> None:
        layer, inputs = copy.deepcopy(layer).cpu().double(), inputs.cpu().double()
        self.images = len(inputs)
        encoded = layer.encoded(inputs)
        self.encodes = encoded is not inputs
        tokens = (torch.cat([inputs, encoded]) if self.encodes else inputs).flatten(1, 2)
        if grid.has_zeros:
            tokens = torch.cat([tokens, torch.zeros_like(tokens[:, :1])], dim=1)
        coordinates, points = principal_axes(tokens)
        self.arrays = {'tokens': coordinates}

        scores = layer.product_scores(points)  # (N_h, 1 + r, 1 + r)
        if scores is not None:
            differences = scores[:, :, 1:] - scores[:, :, :1]  # a constant for the query is left out
            self.arrays['matrices'] = _coefficients(differences.transpose(0, 1))

        scores = layer.query_shift_scores(points, grid.size)
        for name, shifts in zip(('row_shifts', 'column_shifts'), scores or ()):
            self.arrays[name] = _coefficients(shifts - shifts.mean(-1, keepdim=True))
        self.arrays = {name: array.float() for name, array in self.arrays.items()}
        self._scores = coordinates[0].numel() * coordinates.shape[2] * layer.num_heads

    @property
    def numbers(self) -> int:
        """How many numbers the arrays have."""
        return sum(array.numel() for array in self.arrays.values())

    def quantized(self, error: float) -> Dict[str, Quantized]:
        """The arrays for scores with an error of about ``error``, root mean square.

        The squared errors of all scores add up to Σ w s²/12 over all numbers, with the step s of a number and the sum w
        of the squared derivatives of all scores with respect to it. At a given sum the fewest bits are taken by steps
        with the same w s² for all numbers.
        """
        scale = error * (12 * self._scores / self.numbers) ** 0.5
        weights = self._weights()
        return {name: quantize(array, scale / weights[name].sqrt()) for name, array in self.arrays.items()}

    def _weights(self) -> Dict[str, Tensor]:
        """The sums w for each index of the first axis of each array."""
        rank, images, tokens = self.arrays['tokens'].shape
        # Coordinates are uncorrelated and of mean square 1. Each one is part of as many queries and keys as there are.
        weights = {'tokens': torch.zeros(rank, dtype=torch.float64)}
        for name in self.arrays.keys() - {'tokens'}:
            squares, pairs = self.arrays[name].double().square(), float(images * tokens**2)
            if name == 'matrices':
                squared_derivatives = squares[1:].sum((1, 2)) + squares.sum((0, 1))  # as a query, as a key
            else:
                squared_derivatives = squares[1:].mean(2).sum(1)
                pairs /= squares.shape[2]  # those with the same shift
            weights['tokens'] += tokens * squared_derivatives
            weights[name] = torch.full((rank + 1,), pairs, dtype=torch.float64)
        return weights


def token_terms(layer: AttentionLayer, inputs: Tensor, grid: LayerGrid) -> List[TokenTerms]:
    """The terms for all images together, or for each of them, whichever are fewer numbers.

    Together they have the matrices once. But these have an entry for each pair of axes, and the few tokens of one image
    may have fewer axes than channels.

    Args:
        layer (AttentionLayer): The layer.
        inputs (Tensor): The tokens of all images, ``(B, H, W, D)``.
        grid (LayerGrid): The grid of the layer.
    """
    images, height, width, dim = inputs.shape

    def numbers(images: int) -> int:
        rank = min(images * height * width, dim)
        return rank * (rank * layer.num_heads + images * height * width)

    together = numbers(images) <= images * numbers(1)
    return [TokenTerms(layer, group, grid) for group in (inputs.split(images) if together else inputs.split(1))]


def token_scores(term: str, arrays: Dict[str, Tensor], head: int, image: int, grid: LayerGrid) -> Tensor:
    """The scores of a term.

    Args:
        term (str): Its name, see :mod:`.stream`.
        arrays (dict[str, Tensor]): Those of :class:`TokenTerms`.
        head (int): The head.
        image (int): The image, counted among the images of the arrays.
        grid (LayerGrid): The grid of the layer.

    Returns:
        Tensor: ``(Q, P)``, up to a constant for each query.
    """
    tokens = arrays['tokens']
    key = tokens[:, image + (tokens.shape[1] // 2 if term == 'encoded_products' else 0)]  # (r, N)
    query = key[:, grid.query_tokens]
    query = torch.cat([torch.ones_like(query[:1]), query])
    if term != 'query_axes':
        return (query.mT @ (arrays['matrices'][:, head] @ key))[:, grid.source.flatten()]
    scores = 0
    for shifts, name in zip(grid.shifts, ('row_shifts', 'column_shifts')):
        table = arrays[name][:, head]
        scores = scores + (query.mT @ table).gather(1, shifts + table.shape[1] // 2)
    return scores


def principal_axes(tokens: Tensor) -> Tuple[Tensor, Tensor]:
    """Tokens in their principal axes.

    Args:
        tokens (Tensor): ``(S, N, D)``.

    Returns:
        tuple[Tensor, Tensor]: The coordinates c ``(r, S, N)``; m and all m + b_i, ``(1 + r, D)``.
    """
    mean = tokens.mean((0, 1))
    left, deviations, right = torch.linalg.svd((tokens - mean).flatten(0, 1), full_matrices=False)
    rank = max(int((deviations > RANK_TOLERANCE * deviations[0]).sum()), 1)
    scale = len(left) ** 0.5
    axes = right[:rank] * deviations[:rank, None] / scale
    return (left[:, :rank] * scale).mT.unflatten(1, tokens.shape[:2]), torch.cat([mean[None], mean + axes])


def quantize(values: Tensor, step: Tensor) -> Quantized:
    """Values in steps, one for each index of the first axis; larger ones where the numbers would become too large."""
    step = step.clamp(max=1e6).maximum(values.abs().flatten(1).amax(1) / LARGEST)
    return Quantized(values.numpy(), step.float().numpy())


def _coefficients(values: Tensor) -> Tensor:
    """Values at m and at all m + b_i, along the first axis, as the constant and the coefficients of all c_i."""
    return torch.cat([values[:1], values[1:] - values[:1]])
