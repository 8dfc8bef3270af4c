"""Heads that a model can do without: found, repaired, removed, in plain PyTorch.

Degenerate heads are those of Cordonnier et al. 2020, appendix E, unimportant ones those of Michel et al. 2019.
"""

from .amount import head_costs, least_important
from .bias_correction import HeadMeans, fold_into_bias, head_means, merge_duplicate
from .criteria import (
    condition_number,
    largest_eigenvalue,
    least_uniform_head,
    relative_entropy,
    relative_entropy_of_maps,
)
from .degenerate_heads import (
    DegeneracyReport,
    DegenerateHead,
    degenerate_heads_of_maps,
    degenerate_heads_of_observed,
    find_degenerate_heads,
)
from .heads import prunable_heads, prune_heads
from .importance import head_importance
from .observed import ObservedAttention
from .optimizer import replace_parameters
from .repair import reset_heads, singular_penalty

__all__ = [
    'DegeneracyReport',
    'DegenerateHead',
    'HeadMeans',
    'ObservedAttention',
    'condition_number',
    'degenerate_heads_of_maps',
    'degenerate_heads_of_observed',
    'find_degenerate_heads',
    'fold_into_bias',
    'head_costs',
    'head_importance',
    'head_means',
    'largest_eigenvalue',
    'least_important',
    'least_uniform_head',
    'merge_duplicate',
    'prunable_heads',
    'prune_heads',
    'relative_entropy',
    'relative_entropy_of_maps',
    'replace_parameters',
    'reset_heads',
    'singular_penalty',
]
