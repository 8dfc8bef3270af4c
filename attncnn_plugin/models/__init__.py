"""Whole models with timm's interface and entry points, a file each."""

from .cmhsa import CMHSANetwork
from .self_attention import SelfAttentionNetwork

__all__ = ['CMHSANetwork', 'SelfAttentionNetwork']
