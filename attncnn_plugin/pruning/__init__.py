"""Degenerate heads: found, repaired, removed, in plain PyTorch."""

from .bias_correction import fold_into_bias, head_means, merge_duplicate
from .criteria import (
    condition_number,
    largest_eigenvalue,
    least_uniform_head,
    relative_entropy,
    reset_heads,
    singular_penalty,
)
from .degenerate_heads import DegenerateHead, LayerReport, find_degenerate_heads
from .optimizer import replace_parameters

__all__ = [
    'DegenerateHead',
    'LayerReport',
    'condition_number',
    'find_degenerate_heads',
    'fold_into_bias',
    'head_means',
    'largest_eigenvalue',
    'least_uniform_head',
    'merge_duplicate',
    'relative_entropy',
    'replace_parameters',
    'reset_heads',
    'singular_penalty',
]
