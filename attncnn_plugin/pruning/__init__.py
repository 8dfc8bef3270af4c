"""Degenerate heads: found, repaired, removed, in plain PyTorch (Cordonnier et al. 2020, appendix E)."""

from .bias_correction import HeadMeans, fold_into_bias, head_means, merge_duplicate
from .criteria import (
    condition_number,
    largest_eigenvalue,
    least_uniform_head,
    relative_entropy,
    relative_entropy_of_maps,
)
from .degenerate_heads import DegeneracyReport, DegenerateHead, degenerate_heads_of_maps, find_degenerate_heads
from .optimizer import replace_parameters
from .repair import reset_heads, singular_penalty

__all__ = [
    'DegeneracyReport',
    'DegenerateHead',
    'HeadMeans',
    'condition_number',
    'degenerate_heads_of_maps',
    'find_degenerate_heads',
    'fold_into_bias',
    'head_means',
    'largest_eigenvalue',
    'least_uniform_head',
    'merge_duplicate',
    'relative_entropy',
    'relative_entropy_of_maps',
    'replace_parameters',
    'reset_heads',
    'singular_penalty',
]
