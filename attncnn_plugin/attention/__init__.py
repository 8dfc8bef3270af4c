"""Attention layers in plain PyTorch. Those over a grid take tokens ``(B, H, W, D)`` and give ``(B, H, W, D_out)``."""

from .attention_layer import AttentionLayer
from .images import ContentImageAttention, QuadraticImageAttention, WindowImageAttention
from .patches import GridBias, PatchAttention
from .state_dicts import StructureError
from .tokens import ContentAttention, GeneralizedQuadraticAttention, LearnedAttention, QuadraticAttention

__all__ = [
    'AttentionLayer',
    'ContentAttention',
    'ContentImageAttention',
    'GeneralizedQuadraticAttention',
    'GridBias',
    'LearnedAttention',
    'PatchAttention',
    'QuadraticAttention',
    'QuadraticImageAttention',
    'StructureError',
    'WindowImageAttention',
]
