"""Datasets in mmpretrain's registry."""

from ..utils.frameworks import require_mmpretrain

require_mmpretrain()

from .digits import Digits  # noqa: E402

__all__ = ['Digits']
