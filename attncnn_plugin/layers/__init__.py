"""Attention layers in plain PyTorch. They map pixel grids ``(B, H, W, D)`` to ``(B, H, W, D_out)``."""
from .attention import GeneralizedQuadraticAttention, LearnedAttention, QuadraticAttention
from .content_attention import ContentAttention
from .encodings import (AbsoluteEncoding, GeneralizedQuadraticEncoding, LearnedEncoding, QuadraticEncoding,
                        RelativeTables)

__all__ = [
    'AbsoluteEncoding', 'ContentAttention', 'GeneralizedQuadraticAttention', 'GeneralizedQuadraticEncoding',
    'LearnedAttention', 'LearnedEncoding', 'QuadraticAttention', 'QuadraticEncoding', 'RelativeTables'
]
