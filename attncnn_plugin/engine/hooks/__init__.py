"""Hooks in mmpretrain's registry that prune heads, turn convolutions into attention, and show what heads do."""

from ...utils.frameworks import require_mmpretrain

require_mmpretrain()

from .attention_visualization_hook import AttentionVisualizationHook  # noqa: E402
from .follow_state_dict_hook import FollowStateDictHook  # noqa: E402
from .head_pruning_hook import HeadPruningHook  # noqa: E402
from .phase_transition_hook import PhaseTransitionHook  # noqa: E402

__all__ = ['AttentionVisualizationHook', 'FollowStateDictHook', 'HeadPruningHook', 'PhaseTransitionHook']
