"""The numbers of each head of a layer: centre, width, entropy, masses, nearest shift (Cordonnier et al. 2020, 4.2)."""

import math
from typing import Dict, Iterator, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention import GaussianHeads
from ...pruning.criteria import DegenerateHead
from .kinds import head_kind
from .report import HeadStatistics
from .shift_maps import ShiftMaps, mean_distance, moments, nearest_shifts, shift_shares, window_mass

ZOOM = 3  # shares of the shifts −3 … 3, as C20's Figure 5


def head_statistics(
    maps: ShiftMaps,
    relative_entropy: Tensor,
    gaussian: Optional[GaussianHeads] = None,
    degenerate: Optional[Dict[int, DegenerateHead]] = None,
) -> Iterator[HeadStatistics]:
    """The numbers of each head.

    Args:
        maps (ShiftMaps): The maps of the heads.
        relative_entropy (Tensor): Entropy relative to that of uniform attention, ``(N_h,)``.
        gaussian (GaussianHeads, optional): Centres and shapes of Gaussian heads. Defaults to the moments of the maps.
        degenerate (dict[int, DegenerateHead], optional): The degenerate heads by index. Defaults to None: it was not
            asked which heads are degenerate.

    Examples:
        >>> maps = ShiftMaps.of(torch.eye(36).roll(1, dims=1)[None], (6, 6))  # every query to the next key
        >>> (head,) = head_statistics(maps, torch.zeros(1))
        >>> head.nearest_shift, head.kind, head.center, head.width_text
        ((0, 1), 'hard', (0.0, 1.0), '0')
    """
    center, covariance, alpha = _parameters(gaussian) if gaussian else (*moments(maps), None)
    mass_3x3, mass_5x5 = (window_mass(maps, kernel_size).tolist() for kernel_size in (3, 5))
    distance = mean_distance(maps).tolist()
    shares = shift_shares(maps)
    nearest = nearest_shifts(maps, shares)
    for head, relative in enumerate(relative_entropy.tolist()):
        shift, share = nearest[head]
        found = degenerate.get(head) if degenerate else None
        yield HeadStatistics(
            head=head,
            source='parameters' if gaussian else 'moments',
            center=_finite(center[head]),
            alpha=None if alpha is None else alpha[head].item(),
            covariance=_finite(covariance[head]),
            entropy=relative * math.log(maps.probs.shape[-1]),
            relative_entropy=relative,
            distance=None if math.isnan(distance[head]) else distance[head],
            mass_3x3=mass_3x3[head],
            mass_5x5=mass_5x5[head],
            nearest_shift=shift,
            share=share,
            kind=head_kind(share, relative),
            degenerate=None if degenerate is None else found is not None,
            criterion=found.criterion if found else None,
            why=found.reason if found else None,
            shares=_zoom(shares[head]),
        )


def _parameters(gaussian: GaussianHeads) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """Centres ``(N_h, 2)``, covariances ``(N_h, 2, 2)`` and, if all heads are round, α ``(N_h,)``."""
    center, factor = (part.detach().cpu().double() for part in gaussian)
    inverse, info = torch.linalg.inv_ex(factor)  # Σ = M⁻ᵀ M⁻¹
    covariance = torch.where(info[:, None, None] == 0, inverse.mT @ inverse, float('inf'))
    round_factor = factor[:, :1, :1] * torch.eye(2, dtype=factor.dtype)
    alpha = factor[:, 0, 0].square() / 2 if torch.equal(factor, round_factor) else None  # Σ⁻¹ = 2α·I
    return center, covariance, alpha


def _finite(values: Tensor) -> Optional[tuple]:
    """As tuples; None if a value is not finite."""
    if not values.isfinite().all():
        return None
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in values.tolist())


def _zoom(share: Tensor) -> Tuple[Tuple[Optional[float], ...], ...]:
    """Shares of the shifts −3 … 3."""
    padded = F.pad(share, (ZOOM,) * 4, value=float('nan'))
    row, column = (n // 2 for n in padded.shape)
    zoomed = padded[row - ZOOM : row + ZOOM + 1, column - ZOOM : column + ZOOM + 1]
    return tuple(tuple(None if value != value else value for value in line) for line in zoomed.tolist())
