"""Datasets and the augmentation of small images in mmpretrain's registries."""

from ..utils.frameworks import require_mmpretrain

require_mmpretrain()

from .balanced_subset import BalancedSubset  # noqa: E402
from .digits import Digits  # noqa: E402
from .flip_and_shift import FlipAndShift  # noqa: E402

__all__ = ['BalancedSubset', 'Digits', 'FlipAndShift']
