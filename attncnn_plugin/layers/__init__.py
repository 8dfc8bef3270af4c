"""Attention layers in plain PyTorch. On grids ``(B, H, W, D)`` they give ``(B, H, W, D_out)``."""

from .content_attention import ContentAttention
from .encodings import GeneralizedQuadraticEncoding, LearnedEncoding, QuadraticEncoding, WindowEncoding
from .grid_attention import GeneralizedQuadraticAttention, LearnedAttention, QuadraticAttention
from .image_attention import ImageAttention, QuadraticImageAttention, WindowImageAttention
from .merged_patch_attention import MergedPatchAttention
from .patch_attention import PatchAttention
from .position_bias import GridBias, WindowBias
from .position_tables import AbsoluteEncoding, RelativeTables
from .window import Window

__all__ = [
    'AbsoluteEncoding',
    'ContentAttention',
    'GeneralizedQuadraticAttention',
    'GeneralizedQuadraticEncoding',
    'GridBias',
    'ImageAttention',
    'LearnedAttention',
    'LearnedEncoding',
    'MergedPatchAttention',
    'PatchAttention',
    'QuadraticAttention',
    'QuadraticEncoding',
    'QuadraticImageAttention',
    'RelativeTables',
    'Window',
    'WindowBias',
    'WindowEncoding',
    'WindowImageAttention',
]
