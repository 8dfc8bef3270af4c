"""Backbones in mmpretrain's registry."""

from ...utils.frameworks import require_mmpretrain

require_mmpretrain()

from .cmhsa import CMHSA  # noqa: E402
from .self_attention import SAGeneralized, SALearned, SAQuadratic  # noqa: E402

__all__ = ['CMHSA', 'SAGeneralized', 'SALearned', 'SAQuadratic']
