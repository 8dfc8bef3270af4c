"""Attention layers in plain PyTorch. Those over a grid take tokens ``(B, H, W, D)`` and give ``(B, H, W, D_out)``."""

from .attention_layer import AttentionLayer, GaussianHeads
from .content_attention import ContentAttention
from .content_images import ContentImageAttention
from .encodings import (
    GeneralizedQuadraticEncoding,
    LearnedEncoding,
    QuadraticEncoding,
    WindowEncoding,
)
from .grid_attention import GeneralizedQuadraticAttention, GridAttention, LearnedAttention, QuadraticAttention
from .heads import PrunableHeads
from .images import ImageAttention, QuadraticImageAttention, WindowImageAttention
from .patches import GridBias, PatchAttention, WindowBias
from .position_tables import AbsoluteEncoding, RelativeTables
from .state_dicts import Restructurable, StructureError
from .window import Window

__all__ = [
    'AbsoluteEncoding',
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
