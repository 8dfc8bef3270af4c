"""Trainings that survive killed processes, full disks and damaged files: nothing here knows of attention."""

from ...utils.frameworks import require_mmpretrain

require_mmpretrain()

from .atomic_backend import AtomicBackend  # noqa: E402
from .atomic_checkpoint_hook import AtomicCheckpointHook  # noqa: E402
from .epoch_seed_hook import EpochSeedHook  # noqa: E402
from .invalid_loss_hook import InvalidLossHook  # noqa: E402
from .preemption_hook import PreemptionHook  # noqa: E402
from .resumed_validation_hook import ResumedValidationHook  # noqa: E402
from .whole_checkpoint import find_whole_checkpoint  # noqa: E402

__all__ = [
    'AtomicBackend',
    'AtomicCheckpointHook',
    'EpochSeedHook',
    'InvalidLossHook',
    'PreemptionHook',
    'ResumedValidationHook',
    'find_whole_checkpoint',
]
