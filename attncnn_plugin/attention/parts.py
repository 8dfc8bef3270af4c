"""How much is computed at a time on CPUs, whose caches are small."""

from typing import Optional

import torch

# So many scores stay in the cache. With those of an image of 56x56 pixels at once, the heads of a
# `ContentImageAttention` take 2.3 times as long; with those of 50 images of 16x16 tokens, the heads of a
# `ContentAttention` take 1.4 times as long in training.
SCORES_AT_ONCE = 2**19


def parts_at_once(device: torch.device, scores: int) -> Optional[int]:
    """How many parts are computed at a time; None for all, as on other devices and in what is compiled.

    Args:
        device (torch.device): Of the tensors.
        scores (int): Of one part.
    """
    if device.type != 'cpu' or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    return max(1, SCORES_AT_ONCE // max(1, scores))
