"""Hooks in mmpretrain's registry."""
from ...utils.frameworks import require_mmpretrain

require_mmpretrain()

from .phase_transition_hook import PhaseTransitionHook  # noqa: E402

__all__ = ['PhaseTransitionHook']
