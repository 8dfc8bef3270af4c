"""Backbones in mmpretrain's registry."""
from ...utils.frameworks import require_mmpretrain

require_mmpretrain()

from .self_attention import SAGeneralized, SALearned, SAQuadratic  # noqa: E402

__all__ = ['SAGeneralized', 'SALearned', 'SAQuadratic']
