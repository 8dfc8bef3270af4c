"""Backbones in mmpretrain's registry."""

from ...utils.frameworks import require_mmpretrain

require_mmpretrain()

from .cmhsa import CMHSA  # noqa: E402
from .conv_to_attention import ConvToAttention, conv_to_attention  # noqa: E402
from .self_attention import SAGeneralized, SALearned, SAQuadratic  # noqa: E402

__all__ = ['CMHSA', 'ConvToAttention', 'SAGeneralized', 'SALearned', 'SAQuadratic', 'conv_to_attention']
