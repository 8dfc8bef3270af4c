"""Models: timm entry points here, mmpretrain backbones in :mod:`attncnn_plugin.models.backbones`."""
from .timm_models import SelfAttentionClassifier

__all__ = ['SelfAttentionClassifier']
