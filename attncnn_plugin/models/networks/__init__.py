"""Networks that serve mmpretrain and timm alike; they need timm alone."""
from .self_attention import SelfAttentionBlock, SelfAttentionNetwork, SpaceToDepthStem

__all__ = ['SelfAttentionBlock', 'SelfAttentionNetwork', 'SpaceToDepthStem']
