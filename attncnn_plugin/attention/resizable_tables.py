"""Parameters that are tables over a grid: a checkpoint for another grid is resized while it loads."""

from typing import Sequence

from torch import Tensor

from .state_dicts import Restructurable, StateDict


class ResizableTables(Restructurable):
    """A module whose own parameters are tables over a grid. It keeps its size and resizes what it loads."""

    def resizes(self, table: Tensor) -> bool:
        """Whether a loaded table is one of this kind, for any grid."""
        raise NotImplementedError

    def resize(self, table: Tensor, shape: Sequence[int]) -> Tensor:
        """A loaded table in another shape."""
        raise NotImplementedError

    def convert_state_dict(self, state_dict: StateDict, prefix: str) -> None:
        """Resizes the tables of a state dict; those that no grid explains are left to PyTorch, which refuses them."""
        for name, own in self.named_parameters(recurse=False):
            table = state_dict.get(prefix + name)
            if table is not None and table.shape != own.shape and self.resizes(table):
                state_dict[prefix + name] = self.resize(table, tuple(own.shape))
