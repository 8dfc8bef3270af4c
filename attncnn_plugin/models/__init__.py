"""Models: timm entry points, and mmpretrain backbones in :mod:`attncnn_plugin.models.backbones`."""

from .timm_models import CMHSAClassifier, SelfAttentionClassifier

__all__ = ['CMHSAClassifier', 'SelfAttentionClassifier']
