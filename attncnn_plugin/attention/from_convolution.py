"""Attention that was made from a convolution loads state dicts of the convolution."""

from typing import Any, Callable, Optional

from .prunable_heads import PrunableHeads
from .structure import StateDict, StructureError

CONVOLUTION = 'convolution'


class FromConvolution(PrunableHeads):
    """Heads that a convolution can be converted to; its state dict is converted when it is loaded.

    Attributes:
        from_conv (callable | None): Converts the state dict of the convolution that the layer was made from,
            ``{'weight': …, 'bias': …}``, to one of the layer, given the layer's name in its model besides; it raises
            ``ValueError`` for one that is of another convolution. None where the layer was not made from one.
    """

    from_conv: Optional[Callable[[StateDict, str], StateDict]] = None

    def structure_in(self, state_dict: StateDict, prefix: str) -> Any:
        """The number of heads in a state dict, or that it has a convolution."""
        if f'{prefix}weight' in state_dict and f'{prefix}value.weight' not in state_dict:
            return CONVOLUTION
        return super().structure_in(state_dict, prefix)

    def structure_to_load(self, loaded: Any) -> Any:
        """The number of heads in the state dict; for a convolution all heads that the layer was built with."""
        return self.built_heads if loaded == CONVOLUTION else super().structure_to_load(loaded)

    def convert_state_dict(self, state_dict: StateDict, prefix: str) -> None:
        """Converts the entries of a convolution."""
        name = prefix.rstrip('.')
        if self.from_conv is None:
            raise StructureError(
                f'{name} is attention that was not made from a convolution, and the state dict has a convolution: '
                'convert a model that has loaded it, with convs_to_attention'
            )
        entries = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        try:
            converted = self.from_conv(entries, name)
        except ValueError as error:
            raise StructureError(f'the convolution {name} of the state dict cannot be converted: {error}') from error
        for key in entries:
            del state_dict[prefix + key]
        state_dict.update({prefix + key: value for key, value in converted.items()})
