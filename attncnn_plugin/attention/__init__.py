"""Attention layers in plain PyTorch. Those over a grid take tokens ``(B, H, W, D)`` and give ``(B, H, W, D_out)``."""

from .attention_layer import AttentionLayer
from .content_images import ContentImageAttention
from .heads import PrunableHeads
from .images import ImageAttention, QuadraticImageAttention, WindowImageAttention
from .patches import GridBias, PatchAttention, WindowBias
from .positions import (
    GaussianHeads,
    GeneralizedQuadraticEncoding,
    LearnedEncoding,
    QuadraticEncoding,
    RelativeTables,
    WindowEncoding,
)
from .state_dicts import Restructurable, StructureError
from .tokens import (
    ContentAttention,
    GeneralizedQuadraticAttention,
    GridAttention,
    LearnedAttention,
    QuadraticAttention,
)
from .window import Window

__all__ = [
    'AttentionLayer',
    'ContentAttention',
    'ContentImageAttention',
    'GaussianHeads',
    'GeneralizedQuadraticAttention',
    'GeneralizedQuadraticEncoding',
    'GridAttention',
    'GridBias',
    'ImageAttention',
    'LearnedAttention',
    'LearnedEncoding',
    'PatchAttention',
    'PrunableHeads',
    'QuadraticAttention',
    'QuadraticEncoding',
    'QuadraticImageAttention',
    'RelativeTables',
    'Restructurable',
    'StructureError',
    'Window',
    'WindowBias',
    'WindowEncoding',
    'WindowImageAttention',
]
