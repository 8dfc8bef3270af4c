"""timm entry points, registered with timm as this package is imported."""

from .cmhsa import CMHSAClassifier
from .self_attention import SelfAttentionClassifier

__all__ = ['CMHSAClassifier', 'SelfAttentionClassifier']
