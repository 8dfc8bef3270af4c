"""Convolutions to attention and back, in plain PyTorch: layers, and all that are wanted of a model.

Over pixels and back as in Cordonnier et al. 2020 (Theorem 1, Lemma 3), over patches as in Li et al. 2021 (Theorems 1, 5
and 6).
"""

from .back import ConvFit, mhsa_to_conv
from .expressible import Expressibility, expressible_shifts
from .models import attention_to_convs, convs_to_attention
from .patch_convolutions import min_heads
from .pixels import ConversionReport, conv_to_mhsa

__all__ = [
    'ConvFit',
    'ConversionReport',
    'Expressibility',
    'attention_to_convs',
    'conv_to_mhsa',
    'convs_to_attention',
    'expressible_shifts',
    'mhsa_to_conv',
    'min_heads',
]
