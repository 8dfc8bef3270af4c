"""Random numbers that a resumed run has in common with one that was never stopped."""

import random

import numpy as np
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmpretrain.registry import HOOKS


@HOOKS.register_module()
class EpochSeedHook(Hook):
    """Draws the random numbers of each epoch from the seed of the run, the epoch and the rank alone.

    Checkpoints of mmengine hold no random state, so dropout and augmentation of a resumed run are others. With this
    hook a run that goes on from the checkpoint of an epoch ends with the same weights as one that was never stopped,
    where the computations themselves are deterministic. The data loader must have ``num_workers=0``, or workers that
    are started anew for each epoch (``persistent_workers=False``). A run that goes on within an epoch, as after
    ``PreemptionHook``, has other random numbers until the end of that epoch.

    Examples:
        >>> default_hooks = dict(epoch_seed=dict(type='EpochSeedHook'))
        >>> randomness = dict(seed=0)
    """

    priority = 'VERY_LOW'  # after the hooks that draw random numbers of their own

    def before_train_epoch(self, runner) -> None:
        """Seeds Python, numpy and PyTorch."""
        sequence = np.random.SeedSequence([runner.seed, runner.epoch, get_rank()])
        seed = int(sequence.generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
