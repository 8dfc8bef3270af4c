"""Networks that serve mmpretrain and timm alike; they need timm alone."""

from .cmhsa import CMHSABlock, CMHSANetwork, PatchConvolution, PatchStem
from .grid_network import GridNetwork
from .self_attention import SelfAttentionBlock, SelfAttentionNetwork, SpaceToDepthStem, token_grid

__all__ = [
    'CMHSABlock',
    'CMHSANetwork',
    'GridNetwork',
    'PatchConvolution',
    'PatchStem',
    'SelfAttentionBlock',
    'SelfAttentionNetwork',
    'SpaceToDepthStem',
    'token_grid',
]
