"""Attention layers in plain PyTorch. On grids ``(B, H, W, D)`` they give ``(B, H, W, D_out)``."""
from .attention import GeneralizedQuadraticAttention, LearnedAttention, QuadraticAttention
from .content_attention import ContentAttention
from .encodings import (AbsoluteEncoding, GeneralizedQuadraticEncoding, LearnedEncoding, QuadraticEncoding,
                        RelativeTables, WindowEncoding)
from .image_attention import ImageAttention, QuadraticImageAttention, WindowImageAttention
from .merged_attention import MergedPatchAttention
from .patch_attention import GridBias, PatchAttention, WindowBias
from .window import Window

__all__ = [
    'AbsoluteEncoding', 'ContentAttention', 'GeneralizedQuadraticAttention', 'GeneralizedQuadraticEncoding',
    'GridBias', 'ImageAttention', 'LearnedAttention', 'LearnedEncoding', 'MergedPatchAttention', 'PatchAttention',
    'QuadraticAttention', 'QuadraticEncoding', 'QuadraticImageAttention', 'RelativeTables', 'Window', 'WindowBias',
    'WindowEncoding', 'WindowImageAttention'
]
