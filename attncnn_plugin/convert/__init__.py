"""Convolutions to attention and back, in plain PyTorch."""
from .pixels import conv_to_mhsa

__all__ = ['conv_to_mhsa']
