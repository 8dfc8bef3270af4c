"""Hooks in mmpretrain's registry."""
from ...utils.frameworks import require_mmpretrain

require_mmpretrain()

from .atomic_checkpoint_hook import AtomicCheckpointHook  # noqa: E402
from .attention_visualization_hook import AttentionVisualizationHook  # noqa: E402
from .head_pruning_hook import HeadPruningHook  # noqa: E402
from .invalid_loss_hook import InvalidLossHook  # noqa: E402
from .phase_transition_hook import PhaseTransitionHook  # noqa: E402
from .preemption_hook import PreemptionHook  # noqa: E402

__all__ = [
    'AtomicCheckpointHook', 'AttentionVisualizationHook', 'HeadPruningHook', 'InvalidLossHook', 'PhaseTransitionHook',
    'PreemptionHook'
]
