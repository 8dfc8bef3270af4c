"""Heads that a model can do without: found and removed, in plain PyTorch.

Degenerate heads are those of Cordonnier et al. 2020, appendix E, unimportant ones those of Michel et al. 2019.
"""

from ..heads.found import masked_heads
from .ablation import HeadAblation, head_ablation
from .degenerate import JudgedHeads, find_degenerate_heads
from .importance import count_multiply_adds, head_costs, head_importance, least_important
from .optimizers import replace_parameters
from .prune import prunable_heads, prune_heads

__all__ = [
    'JudgedHeads',
    'HeadAblation',
    'count_multiply_adds',
    'find_degenerate_heads',
    'head_ablation',
    'head_costs',
    'head_importance',
    'least_important',
    'masked_heads',
    'prunable_heads',
    'prune_heads',
    'replace_parameters',
]
