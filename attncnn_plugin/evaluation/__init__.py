"""Metrics in mmpretrain's registry."""

from ..utils.frameworks import require_mmpretrain

require_mmpretrain()

from .cross_entropy import CrossEntropy  # noqa: E402

__all__ = ['CrossEntropy']
