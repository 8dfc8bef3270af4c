"""Models that are convolutional at first and attention later (L21, section 4)."""

from typing import Any, List, Optional, Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class TwoPhases(Protocol):
    """A module whose convolutions become attention."""

    phase: str  # 'conv' or 'attn'

    def to_attention(self, generator: Optional[torch.Generator] = None) -> Any:
        """Turns the convolutions into attention, in place, and returns what was done, which prints.

        Args:
            generator (torch.Generator, optional): Of the CPU, for whatever is drawn: the same on every rank.
        """


def parts_in_phases(model: nn.Module, phase: Optional[str] = None) -> List[TwoPhases]:
    """Returns the modules of a model whose convolutions become attention: all, or those that are in a phase."""
    parts = [module for module in model.modules() if isinstance(module, TwoPhases)]
    return [part for part in parts if phase in (None, part.phase)]


def to_attention(model: nn.Module, seed: int = 0) -> List[Any]:
    """Turns all convolutions of a model that can turn into attention, in place.

    The second phase needs an optimizer of its own, and a new wrapper for distributed training: build both afterwards.
    Ranks that give the same seed have the same model. To resume the second phase, build the model of the first, call
    :func:`attncnn_plugin.follow_state_dict` with the checkpoint, then build the optimizer and load both.

    Args:
        model (nn.Module): Any model, not wrapped for distributed training.
        seed (int): Of what is drawn, such as the keys of attention by content. Defaults to 0.

    Returns:
        list: What each part returned; empty where there was nothing to turn.
    """
    changes = [part.to_attention(torch.Generator().manual_seed(seed)) for part in parts_in_phases(model, 'conv')]
    model.zero_grad(set_to_none=True)
    return changes
