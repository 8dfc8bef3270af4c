"""Parameters that are tables over a grid: a checkpoint for another grid is resized while it loads."""

import logging
from typing import Any, Dict, Hashable, Optional, Sequence, Tuple

from torch import Tensor

from .structure import Restructurable, StateDict

logger = logging.getLogger(__name__)

Shapes = Tuple[Tuple[str, Tuple[int, ...]], ...]


class ResizableTables(Restructurable):
    """A module whose own parameters are tables over a grid. It keeps its size and resizes what it loads."""

    def resizes(self, table: Tensor) -> bool:
        """Whether a loaded table is one of this kind, for any grid."""
        raise NotImplementedError

    def resize(self, table: Tensor, shape: Sequence[int]) -> Tensor:
        """A loaded table in another shape."""
        raise NotImplementedError

    @property
    def shapes(self) -> Shapes:
        """The shapes of the tables by name."""
        return tuple((name, tuple(table.shape)) for name, table in self.named_parameters(recurse=False))

    def shapes_in(self, state_dict: StateDict, prefix: str) -> Shapes:
        """The shapes of the tables in a state dict; the module's own for those that no grid explains."""
        loaded = self._loaded(state_dict, prefix)
        return tuple((name, tuple(loaded[name].shape) if name in loaded else own) for name, own in self.shapes)

    @property
    def structure(self) -> Hashable:
        """:attr:`shapes`."""
        return self.shapes

    def structure_in(self, state_dict: StateDict, prefix: str) -> Optional[Hashable]:
        """:meth:`shapes_in`."""
        return self.shapes_in(state_dict, prefix)

    def structure_to_load(self, loaded: Any) -> Any:
        """The module keeps its size."""
        return self.structure

    def convert_state_dict(self, state_dict: StateDict, prefix: str) -> None:
        """Resizes the tables of a state dict."""
        own = dict(self.shapes)
        for name, table in self._loaded(state_dict, prefix).items():
            if tuple(table.shape) != own[name]:
                logger.info('Resize %s%s from %s to %s.', prefix, name, tuple(table.shape), own[name])
                state_dict[prefix + name] = self.resize(table, own[name])

    def _loaded(self, state_dict: StateDict, prefix: str) -> Dict[str, Tensor]:
        tables = {name: state_dict.get(prefix + name) for name, _ in self.shapes}
        return {name: table for name, table in tables.items() if table is not None and self.resizes(table)}
