"""Models that are convolutional at first and attention later."""

from typing import Any, List, Optional, Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class TwoPhases(Protocol):
    """A module whose convolutions become attention: all that the hooks need to know of it."""

    phase: str  # 'conv' or 'attn'

    def to_attention(self, generator: Optional[torch.Generator] = None) -> Any:
        """Turns the convolutions into attention, in place, and returns what was done, which prints.

        Args:
            generator (torch.Generator, optional): Of the CPU, for whatever is drawn: the same on every rank.
        """


def parts_in_phases(model: nn.Module) -> List[TwoPhases]:
    """The modules of a model whose convolutions become attention."""
    return [module for module in model.modules() if isinstance(module, TwoPhases)]
