"""Scores S_h = U G_h Vᵀ with bases U and V that the heads of a layer share, quantized."""

from typing import Dict, Optional, Tuple, Union

import numpy as np
import torch
from torch import Tensor

Record = Dict[str, Union[str, int, float, np.ndarray]]

FINEST_BASIS, COARSEST_BASIS = 1 / 32000, 1 / 64  # steps of a basis, whose entries are 1 at most
LARGEST = 2**22  # a number in steps, exact in float32 with a byte to spare
TYPICAL_STEP = 0.02  # of those that are tried: it decides whether U pays


class Factors:
    """The principal axes of scores, and the scores in them: what does not depend on a step.

    Args:
        scores (Tensor): ``(N_h, N, N)``, of mean 0 over the keys.
    """

    def __init__(self, scores: Tensor) -> None:
        # The principal axes of what the heads say of the keys, then of what they say of the queries.
        self._right = _principal_axes(torch.einsum('hqk,hql->kl', scores, scores))
        self._core = scores @ self._right
        left = _principal_axes(torch.einsum('hqk,hpk->qp', self._core, self._core))
        core = left.mT @ self._core
        self._left = left if _bits(core) < _bits(self._core) else None  # None: the identity
        if self._left is not None:
            self._core = core

    def quantized(self, step: float) -> Optional[Record]:
        """Quantized bases, and the quantized core that fits the scores best in them.

        Returns:
            dict | None: A record; None where a coefficient takes too many steps.
        """
        core, record = self._core, {'type': 'factors', 'step': step}
        used = (core / step).round() != 0
        for name, basis, axis in (('right', self._right, 2), ('left', self._left, 1)):
            if basis is None:
                continue
            others = (0, 3 - axis)
            rank = _last(used.any(others[1]).any(0))
            weight = self._core.square().mean(others).sqrt()[:rank]
            levels, steps = _quantize_basis(basis[:, :rank], weight, step)
            record.update({**split(name, levels), f'{name}_step': steps.numpy()})
            # The coefficients in the quantized basis B that fit best: (BᵀB)⁻¹BᵀV of those in V.
            solved = _fit(levels.mT * steps, basis)
            core = core @ solved.mT if axis == 2 else solved @ core
        core = (core / step).round()
        if core.abs().max() > LARGEST:
            return None
        # Coefficients of one axis, which are alike, side by side.
        return {**record, **split('core', core.movedim(-1, 0))}


def scores_of_factors(record: Record) -> Tensor:
    """The scores of a record of :class:`Factors`, ``(N_h, N, N)``."""
    right, left = (
        joined(record, name) * torch.from_numpy(record[f'{name}_step'])[:, None] if f'{name}_step' in record else None
        for name in ('right', 'left')
    )
    scores = joined(record, 'core').movedim(0, -1) * record['step'] @ right  # (N_h, U, N)
    return scores if left is None else left.mT @ scores


def split(name: str, values: Tensor) -> Record:
    """Whole numbers v as the low and the high bytes of v + 128: the high ones of small numbers are all 0."""
    values = values.numpy().astype(np.int32) + 128
    return {f'{name}_low': (values & 255).astype(np.uint8), f'{name}_high': (values >> 8).astype(np.int16)}


def joined(record: Record, name: str) -> Tensor:
    """The numbers that :func:`split` has split, float32."""
    low, high = (torch.from_numpy(record[f'{name}_{half}'].astype(np.float32)) for half in ('low', 'high'))
    return low + 256 * high - 128


def _quantize_basis(basis: Tensor, weight: Tensor, step: float) -> Tuple[Tensor, Tensor]:
    """A basis ``(N, r)`` in steps of its own an axis, finer for axes with large coefficients.

    Returns:
        tuple[Tensor, Tensor]: Whole numbers ``(r, N)``, and the steps ``(r,)``.
    """
    steps = step / (weight * len(weight) ** 0.5).clamp(min=torch.finfo(torch.float32).tiny)
    steps = steps.clamp(FINEST_BASIS, COARSEST_BASIS)
    return (basis / steps).round().mT, steps


def _fit(basis: Tensor, other: Tensor) -> Tensor:
    """(BᵀB)⁻¹BᵀA: the coefficients in B ``(N, r)`` that fit A ``(N, M)`` best, ``(r, M)``."""
    return torch.linalg.solve(basis.mT @ basis, basis.mT @ other)


def _bits(core: Tensor) -> float:
    """About as many bits as coefficients take."""
    return (core / TYPICAL_STEP).abs().add(1).log2().sum().item()


def _principal_axes(gram: Tensor) -> Tensor:
    """Eigenvectors as columns, those of the largest eigenvalues first."""
    return torch.linalg.eigh(gram)[1].flip(1)


def _last(used: Tensor) -> int:
    """How many entries there are up to the last one that is true, at least 1."""
    return int(used.nonzero().max()) + 1 if used.any() else 1
