"""Attention probabilities in few bytes: exact where they depend on rows and columns or on shifts, quantized elsewhere.

What is stored of a layer is a *record*, a dict of arrays and numbers with a ``'type'``, from which the scores of every
query and key follow, up to a constant per query. The probabilities are their softmax, times ``'mass'``, ``(N_h, N)``,
where rows add up to something else than 1.

- ``'axes'``: scores of rows ``(N_h, H, H)`` and of columns ``(N_h, W, W)``, float32.
- ``'shifts'``: scores of the shifts δ = k − q, ``(N_h, 2H − 1, 2W − 1)``, float64: far from a centre they are large.
- ``'factors'``: scores S_h = U G_h Vᵀ, with bases U and V that the heads share, quantized; U may be the identity.
- ``'maps'``: P[q, k] / max_k P[q, k] in steps of 1 / ``'steps'``, ``(N_h, N, N)``, uint8, and ``'largest'``, the
  denominator, ``(N_h, N)``. Here the probabilities are the product of the two, which is nearer to them than a softmax.
"""
import zlib
from typing import Dict, Optional, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from ...layers.encodings import at_grid_shifts

Record = Dict[str, Union[str, int, float, np.ndarray]]

EXACT = 1e-6  # error of a probability up to which a record counts as exact
FINEST_BASIS, COARSEST_BASIS = 1 / 32000, 1 / 64  # steps of a basis, whose entries are 1 at most
SMALLEST = 1e-30  # probability: those below are not told apart
LARGEST = 2 ** 22  # coefficient in steps, exact in float32 with a byte to spare


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
            {'type': 'shifts', 'scores': _numpy(shifts, np.float64), **mass}):
        if max_error(decode_probs(record), probs)[0] <= EXACT:
            return record
    return encode_maps(probs, 255)


@torch.no_grad()
def encode_content(probs: Tensor, step: float) -> Record:
    """The record of probabilities of an image, quantized.

    Args:
        probs (Tensor): ``(N_h, N, N)``, float32.
        step (float): Step of the scores' coefficients in orthonormal bases: scores have an error of about
            ``step/√6``, root mean square, and probabilities that relative error.

    Returns:
        dict: ``'factors'``, or ``'maps'`` where they take less than half the bytes: they have no small probabilities.
    """
    maps = encode_maps(probs, min(max(round(2 / step), 15), 255))
    factors = _encode_factors(probs, step)
    if factors is None or packed_size(maps) < packed_size(factors) / 2:
        return maps
    return with_mass(factors, probs)


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
    """The scores of every query and key, up to a constant per query, ``(N_h, N, N)``, at least float32."""
    if record['type'] == 'axes':
        rows, columns = (torch.from_numpy(record[name]) for name in ('rows', 'columns'))
        scores = rows[:, :, None, :, None] + columns[:, None, :, None, :]
        return scores.flatten(3).flatten(1, 2)
    if record['type'] == 'shifts':
        table = torch.from_numpy(record['scores'])
        return at_grid_shifts(table, *((size + 1) // 2 for size in table.shape[1:]))
    if record['type'] == 'maps':
        return torch.from_numpy(record['levels'].astype(np.float32)).log()
    core = torch.from_numpy(_joined(record, 'core')).movedim(0, -1) * record['step']  # (N_h, U, V)
    right = torch.from_numpy(_joined(record, 'right')) * torch.from_numpy(record['right_step'])[:, None]
    scores = core @ right
    if 'left_low' in record:
        left = torch.from_numpy(_joined(record, 'left')) * torch.from_numpy(record['left_step'])[:, None]
        scores = left.mT @ scores
    return scores


def decode_probs(record: Record, scores: Optional[Tensor] = None) -> Tensor:
    """The probabilities of a record, ``(N_h, N, N)``, float32; of ``scores`` where they are not the record's own."""
    if record['type'] == 'maps':
        levels = torch.from_numpy(record['levels'].astype(np.float32))
        return levels / record['steps'] * torch.from_numpy(record['largest'])[..., None]
    probs = (decode_scores(record) if scores is None else scores).softmax(-1).nan_to_num(0.).float()
    return probs * torch.from_numpy(record['mass'])[..., None] if 'mass' in record else probs


def max_error(decoded: Tensor, probs: Tensor) -> Tuple[float, float]:
    """The largest error of a probability, and the largest one relative to the largest probability of its query."""
    if probs.numel() == 0:
        return 0., 0.
    error = (decoded - probs).abs().amax(-1)
    return error.max().item(), (error / probs.amax(-1).clamp(min=torch.finfo(torch.float32).tiny)).max().item()


def packed_size(record: Record) -> int:
    """About as many bytes as the arrays of a record take, compressed."""
    return sum(len(zlib.compress(array.tobytes(), 1)) for array in record.values() if isinstance(array, np.ndarray))


def _encode_factors(probs: Tensor, step: float) -> Optional[Record]:
    """S_h = U G_h Vᵀ, or None where a coefficient is too large."""
    if probs.numel() == 0:
        return None
    scores = probs.clamp(min=SMALLEST).log()
    scores = scores - scores.mean(-1, keepdim=True)
    # The principal axes of what the heads say of the keys, then of what they say of the queries.
    right = _principal_axes(torch.einsum('hqk,hql->kl', scores, scores))
    by_query = scores @ right
    left = _principal_axes(torch.einsum('hqk,hpk->qp', by_query, by_query))
    by_axis = left.mT @ by_query
    if _bits(by_query, step) <= _bits(by_axis, step):
        return _quantize(scores, None, right, by_query, step)
    return _quantize(scores, left, right, by_axis, step)


def _bits(core: Tensor, step: float) -> float:
    """About as many bits as coefficients ``(N_h, U, V)`` take."""
    return (core / step).abs().add(1).log2().sum().item()


def _quantize(scores: Tensor, left: Optional[Tensor], right: Tensor, core: Tensor, step: float) -> Optional[Record]:
    """Quantized bases, and the quantized core that fits the scores best in them."""
    used = (core / step).round() != 0
    record, solved = {'type': 'factors', 'step': step}, scores
    rank = _last(used.flatten(0, 1).any(0))
    basis, steps = _quantize_basis(right[:, :rank], core[..., :rank].square().mean((0, 1)).sqrt(), step)
    record.update(_split('right', basis), right_step=_numpy(steps))
    solved = _solve(basis.mT * steps, solved.mT).mT  # (N_h, N, V)
    if left is not None:
        rank = _last(used.any(0).any(1))
        basis, steps = _quantize_basis(left[:, :rank], core[:, :rank].square().mean((0, 2)).sqrt(), step)
        record.update(_split('left', basis), left_step=_numpy(steps))
        solved = _solve(basis.mT * steps, solved)
    core = (solved / step).round()
    if core.abs().max() > LARGEST:
        return None
    record.update(_split('core', core.movedim(-1, 0)))  # coefficients of one axis, which are alike, side by side
    return record


def _quantize_basis(basis: Tensor, weight: Tensor, step: float) -> Tuple[Tensor, Tensor]:
    """A basis ``(N, r)`` in steps of its own an axis, finer for axes with large coefficients.

    Returns:
        tuple[Tensor, Tensor]: Whole numbers ``(r, N)``, and the steps ``(r,)``.
    """
    steps = step / (weight * max(len(weight), 1) ** 0.5).clamp(min=torch.finfo(torch.float32).tiny)
    steps = steps.clamp(FINEST_BASIS, COARSEST_BASIS)
    return (basis / steps).round().mT, steps


def _solve(basis: Tensor, scores: Tensor) -> Tensor:
    """The coefficients in a basis ``(N, r)`` that fit ``(…, N, M)`` best, ``(…, r, M)``."""
    return torch.linalg.solve(basis.mT @ basis, basis.mT @ scores)


def _principal_axes(gram: Tensor) -> Tensor:
    """Eigenvectors as columns, those of the largest eigenvalues first."""
    return torch.linalg.eigh(gram)[1].flip(1)


def _last(used: Tensor) -> int:
    """How many entries there are up to the last one that is true, at least 1."""
    return int(used.nonzero().max()) + 1 if used.any() else 1


def _by_shift(grid: Tensor, height: int, width: int) -> Tensor:
    """``(N_h, q1, q2, k1, k2)`` as a table of shifts: from the corner that each quarter of the shifts begins in."""
    first, last = (0, 0), (height - 1, width - 1)
    rows = []
    for row in (last[0], first[0]):
        columns = [grid[:, row, last[1]], grid[:, row, first[1], :, 1:]]
        rows.append(torch.cat(columns, dim=-1))
    return torch.cat([rows[0], rows[1][:, 1:]], dim=1)


def _split(name: str, values: Tensor) -> Dict[str, np.ndarray]:
    """Whole numbers v as the low and the high bytes of v + 128: the high ones of small numbers are all 0."""
    values = values.numpy().astype(np.int32) + 128
    return {f'{name}_low': (values & 255).astype(np.uint8), f'{name}_high': (values >> 8).astype(np.int16)}


def _joined(record: Record, name: str) -> np.ndarray:
    """The numbers that :func:`_split` has split, float32."""
    return record[f'{name}_low'].astype(np.float32) + 256 * record[f'{name}_high'].astype(np.float32) - 128


def _numpy(tensor: Tensor, dtype: type = np.float32) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().cpu().numpy().astype(dtype))
