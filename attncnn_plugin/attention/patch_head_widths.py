"""The widths of the heads of attention over patches, as state dicts carry them."""

from typing import Optional, Tuple

from .state_dicts import StateDict, StructureError, too_many_heads

Widths = Tuple[int, Tuple[int, ...]]  # D_k, and D_h of each head


def widths_in(state_dict: StateDict, prefix: str, built_heads: int, qk_dim: int) -> Optional[Widths]:
    """The widths of the heads of a :class:`~attncnn_plugin.attention.PatchAttention` in a state dict.

    Args:
        state_dict (dict[str, Tensor]): With the layer's names, each after ``prefix``.
        prefix (str): Name of the layer with a dot, or empty.
        built_heads (int): The most heads that the layer can take.
        qk_dim (int): D_k where there are no heads.

    Returns:
        tuple[int, tuple[int, ...]] | None: D_k, and D_h of each head; None where entries are missing.

    Raises:
        StructureError: No widths explain the entries, or there are too many heads.
    """
    names = ('position.table', 'query.weight', 'value.weight')
    if not all(prefix + name in state_dict for name in names):
        return None
    num_heads, queries, values = (state_dict[prefix + name].shape[0] for name in names)
    if num_heads > built_heads:
        raise too_many_heads(prefix, num_heads, built_heads)
    if num_heads == 0:
        return qk_dim, ()
    channels = state_dict.get(f'{prefix}value_channels')
    head_dims = [values // num_heads] * num_heads if channels is None else channels.tolist()
    if queries % num_heads or sum(head_dims) != values or len(head_dims) != num_heads:
        raise StructureError(
            f'{prefix}query.weight and value.weight of the state dict have {queries} and {values} rows, which '
            f'{num_heads} heads of widths {head_dims} do not explain: it is damaged'
        )
    return queries // num_heads, tuple(head_dims)
