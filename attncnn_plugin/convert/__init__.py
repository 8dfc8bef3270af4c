"""Convolutions to attention and back, in plain PyTorch."""

from .expressibility import Expressibility, expressible_shifts
from .fewer_heads import HeadReport
from .head_count import min_heads
from .patches import conv_to_patch_mhsa
from .pixels import conv_to_mhsa
from .to_conv import ConvFit, mhsa_to_conv

__all__ = [
    'ConvFit',
    'Expressibility',
    'HeadReport',
    'conv_to_mhsa',
    'conv_to_patch_mhsa',
    'expressible_shifts',
    'mhsa_to_conv',
    'min_heads',
]
