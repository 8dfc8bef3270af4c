"""Attention probabilities in few bytes: exact where they depend on rows and columns or on shifts, quantized elsewhere.

What is stored of a layer is a *record*, a dict of arrays and numbers with a ``'type'``, from which the scores of every
query and key follow, up to a constant per query. The probabilities are their softmax, times ``'mass'``, ``(N_h, N)``,
where rows add up to something else than 1.

- ``'axes'``: scores of rows ``(N_h, H, H)`` and of columns ``(N_h, W, W)``, float32.
- ``'shifts'``: scores of the shifts δ = k − q, ``(N_h, 2H − 1, 2W − 1)``, float64: far from a centre they are large.
- ``'query_axes'``: scores of rows by query ``(H, N_h, N)`` and of columns ``(W, N_h, N)``, in steps of ``'step'``.
- ``'factors'``: scores S_h = U G_h Vᵀ, with bases U and V that the heads share, quantized; U may be the identity.
- ``'maps'``: P[q, k] / max_k P[q, k] in steps of 1 / ``'steps'``, ``(N_h, N, N)``, uint8, and ``'largest'``, the
  denominator, ``(N_h, N)``. Here the probabilities are the product of the two, which is nearer to them than a softmax.
"""

import zlib
from typing import Optional

import numpy as np
import torch
from torch import Tensor

from ..layers.shifts import at_grid_shifts
from .factors import Factors, Record, joined, scores_of_factors, split

EXACT = 1e-6  # error of a probability up to which a record counts as exact
SMALLEST = 1e-30  # probability: those below are not told apart


@torch.no_grad()
def encode_position(probs: Tensor, height: int, width: int, scores: Optional[Tensor] = None) -> Record:
    """The record of probabilities that depend on position alone.

    Args:
        probs (Tensor): ``(N_h, H*W, H*W)``, float32.
        height, width (int): Size of the grid in tokens.
        scores (Tensor, optional): Scores by shift where they are known, ``(N_h, 2H − 1, 2W − 1)``. Defaults to the
            logarithms of the probabilities that the shifts have.

    Returns:
        dict: ``'axes'`` or ``'shifts'``, the first one that is exact; if none is, ``'maps'`` with 255 steps.
    """
    grid = probs.unflatten(2, (height, width)).unflatten(1, (height, width))  # (N_h, q1, q2, k1, k2)
    rows, columns = grid[:, :, 0].sum(-1), grid[:, 0].sum(-2)
    shifts = _by_shift(grid, height, width).log() if scores is None else scores
    mass = with_mass({}, probs)
    for record in (
        {'type': 'axes', 'rows': _numpy(rows.log()), 'columns': _numpy(columns.log()), **mass},
        {'type': 'shifts', 'scores': _numpy(shifts, np.float64), **mass},
    ):
        if torch.allclose(decode_probs(record), probs, rtol=0, atol=EXACT):
            return record
    return encode_maps(probs, 255)


@torch.no_grad()
def encode_query_axes(rows: Tensor, columns: Tensor, step: float) -> Record:
    """The record of scores that are terms of rows plus terms of columns, other ones for each query.

    Args:
        rows, columns (Tensor): ``(N_h, N, H)`` and ``(N_h, N, W)``, each up to a constant per query.
        step (float): Step of the terms: scores have an error of ``step/√6``, root mean square, ``step`` at most.

    Returns:
        dict: ``'query_axes'``.
    """
    record = {'type': 'query_axes', 'step': step}
    for name, scores in (('rows', rows), ('columns', columns)):
        scores = centered(scores.softmax(-1))
        record.update(split(name, (scores / step).round().movedim(-1, 0)))  # of one key, which are alike, side by side
    return record


@torch.no_grad()
def encode_content(probs: Tensor, factors: Factors, step: float) -> Record:
    """The record of probabilities of an image, quantized.

    Args:
        probs (Tensor): ``(N_h, N, N)``, float32, N_h at least 1.
        factors (Factors): Those of their :func:`centered` scores.
        step (float): Step of the scores' coefficients in orthonormal bases: scores have an error of about
            ``step/√6``, root mean square, and probabilities that relative error.

    Returns:
        dict: ``'factors'``, or ``'maps'`` where they take less than half the bytes: they have no small probabilities.
    """
    maps = encode_maps(probs, min(max(round(2 / step), 15), 255))
    record = factors.quantized(step)
    if record is None or packed_size(maps) < packed_size(record) / 2:
        return maps
    return with_mass(record, probs)


def centered(probs: Tensor) -> Tensor:
    """The scores of probabilities, of mean 0 over the keys."""
    scores = probs.clamp(min=SMALLEST).log()
    return scores - scores.mean(-1, keepdim=True)


def encode_maps(probs: Tensor, steps: int) -> Record:
    """Probabilities relative to the largest one of their query, in ``steps`` steps, 255 at most."""
    largest = probs.amax(-1, keepdim=True) if probs.numel() else probs.sum(-1, keepdim=True)
    levels = (probs / largest.clamp(min=torch.finfo(torch.float32).tiny) * steps).round()
    record = {'type': 'maps', 'steps': steps, 'levels': _numpy(levels, np.uint8), 'largest': _numpy(largest[..., 0])}
    return with_mass(record, probs)


def with_mass(record: Record, probs: Tensor) -> Record:
    """The record with the sums of the rows of ``probs``, where they are not 1."""
    mass = probs.sum(-1)
    return {**record, 'mass': _numpy(mass)} if ((mass - 1).abs() > 1e-5).any() else record


def decode_scores(record: Record) -> Tensor:
    """The scores of every query and key, up to a constant per query, ``(N_h, N, N)``, at least float32.

    Not of ``'maps'``, which are of probabilities.
    """
    if record['type'] == 'axes':
        rows, columns = (torch.from_numpy(record[name]) for name in ('rows', 'columns'))
        scores = rows[:, :, None, :, None] + columns[:, None, :, None, :]
        return scores.flatten(3).flatten(1, 2)
    if record['type'] == 'shifts':
        table = torch.from_numpy(record['scores'])
        return at_grid_shifts(table, [(size + 1) // 2 for size in table.shape[1:]])
    if record['type'] == 'query_axes':
        rows, columns = (joined(record, name).movedim(0, -1) * record['step'] for name in ('rows', 'columns'))
        return (rows[..., :, None] + columns[..., None, :]).flatten(2)
    return scores_of_factors(record)


def decode_probs(record: Record, scores: Optional[Tensor] = None) -> Tensor:
    """The probabilities of a record, ``(N_h, N, N)``, float32; of ``scores`` where they are not the record's own."""
    if record['type'] == 'maps':
        levels = torch.from_numpy(record['levels'].astype(np.float32))
        return levels / record['steps'] * torch.from_numpy(record['largest'])[..., None]
    probs = (decode_scores(record) if scores is None else scores).softmax(-1).nan_to_num(0.0).float()
    return probs * torch.from_numpy(record['mass'])[..., None] if 'mass' in record else probs


def relative_errors(decoded: Tensor, probs: Tensor) -> Tensor:
    """The largest error of a probability of each head, relative to the largest decoded one of its query, ``(N_h,)``."""
    errors = (decoded - probs).abs().amax(-1) / decoded.amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return errors.amax(-1)


def packed_size(record: Record) -> int:
    """About as many bytes as the arrays of a record take, compressed."""
    compressor = compressor_of_arrays()
    arrays = [value for value in record.values() if isinstance(value, np.ndarray)]
    return sum(len(compressor.compress(array.tobytes())) for array in arrays) + len(compressor.flush())


def compressor_of_arrays():
    """A compressor to zlib's format for noise with runs of zeros.

    A search for longer repetitions takes ten times as long and finds no more.
    """
    return zlib.compressobj(9, strategy=zlib.Z_RLE)


def _by_shift(grid: Tensor, height: int, width: int) -> Tensor:
    """``(N_h, q1, q2, k1, k2)`` as a table of shifts: from the corner that each quarter of the shifts begins in."""
    first, last = (0, 0), (height - 1, width - 1)
    rows = []
    for row in (last[0], first[0]):
        columns = [grid[:, row, last[1]], grid[:, row, first[1], :, 1:]]
        rows.append(torch.cat(columns, dim=-1))
    return torch.cat([rows[0], rows[1][:, 1:]], dim=1)


def _numpy(tensor: Tensor, dtype: type = np.float32) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().cpu().numpy().astype(dtype))
