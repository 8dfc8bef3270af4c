"""Tables with an entry for each shift δ = k − q from a query to a key."""

import logging
from typing import Any, Callable, Dict, Mapping, Sequence

import torch
from torch import Tensor, nn

from .precision import widest_float

logger = logging.getLogger(__name__)


def over_axes(parts: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor] = torch.add) -> Tensor:
    """Combines ``(N, Q, K)`` of each axis, as factors or summands, to that of all pixels, row-major."""
    total = parts[0]
    for part in parts[1:]:
        total = combine(total[:, :, None, :, None], part[:, None, :, None, :]).flatten(3).flatten(1, 2)
    return total


def windows(values: Tensor, size: int) -> Tensor:
    """Returns all windows of ``size`` neighbours in the last dimension, ``(…, windows, size)``, as a view."""
    if torch.compiler.is_compiling():  # unfold would make the size a constant of the graph
        start = torch.arange(values.shape[-1] - size + 1, device=values.device)
        return values[..., start[:, None] + torch.arange(size, device=values.device)]
    return values.unfold(-1, size, 1)


def at_shifts(values: Tensor, size: int) -> Tensor:
    """Looks up ``values`` of the shifts 1 − size … size − 1 for all queries and keys, ``(…, size, size)``."""
    return windows(values.flip(-1), size).flip(-1)  # from the last key to the first: δ + 1 is the next query's δ


def at_grid_shifts(table: Tensor, size: Sequence[int]) -> Tensor:
    """Looks up a table ``(N, 2·H − 1, 2·W − 1)`` for all queries and keys of a grid, ``(N, H*W, H*W)``."""
    columns = at_shifts(table, size[1]).movedim(1, -1)  # (N, q2, k2, δ1)
    return at_shifts(columns, size[0]).permute(0, 3, 1, 4, 2).flatten(3).flatten(1, 2)


def resize_shifts(table: Tensor, length: int) -> Tensor:
    """Resizes a table of vectors of shifts to another number of shifts, ``(2·source + 1, D)`` to ``(length, D)``.

    Fewer shifts are the middle of the table. For more, the old vectors are put at distances that grow geometrically, 1,
    1 + r, 1 + r + r², …, up to the largest new shift, and interpolated in between: near shifts keep their vectors and
    far ones are spread, as in mmpretrain.
    """
    source, target = table.shape[0] // 2, length // 2
    if source == 0:  # only shift 0
        return table.expand(length, -1)
    # Bisection for r: 1 + r + … + r^(source − 1) = target; 1 for fewer shifts, which are entries of the table.
    low, high = 1.0, target ** (1 / max(source - 1, 1))
    for _ in range(60):
        ratio = (low + high) / 2
        low, high = (ratio, high) if sum(ratio**step for step in range(source)) < target else (low, ratio)
    distance = torch.tensor([low**step for step in range(source)], dtype=torch.float64, device='cpu').cumsum(0)
    position = torch.cat([-distance.flip(0), distance.new_zeros(1), distance])
    shift = torch.arange(-target, target + 1, dtype=torch.float64, device='cpu').clamp(position[0], position[-1])
    left = torch.searchsorted(position, shift).clamp(min=1) - 1
    weight = ((shift - position[left]) / (position[left + 1] - position[left]))[:, None]
    wide, left = table.to(widest_float(table)), left.to(table.device)
    return torch.lerp(wide[left], wide[left + 1], weight.to(wide)).to(table.dtype)


def resize_shift_table(table: Tensor, lengths: Mapping[int, int]) -> Tensor:
    """Resizes a table, such as biases ``(N_h, rows, columns)``, to so many shifts along some of its axes."""
    for axis, length in lengths.items():
        if table.shape[axis] != length:
            vectors = table.movedim(axis, 0)
            table = resize_shifts(vectors.flatten(1), length).unflatten(1, vectors.shape[1:]).movedim(0, axis)
    return table


def resize_loaded(axes: Sequence[int], module: nn.Module, state_dict: Dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Resizes a module's tables in a state dict for another grid, which have odd numbers of shifts along some axes."""
    for name, own in module.named_parameters(recurse=False):
        loaded: Any = state_dict.get(prefix + name)
        if isinstance(loaded, Tensor) and loaded.ndim == own.ndim and all(loaded.shape[axis] % 2 for axis in axes):
            state_dict[prefix + name] = resize_shift_table(loaded, {axis: own.shape[axis] for axis in axes})
            if loaded.shape != own.shape:
                logger.info('Resize %s%s from %s to %s shifts.', prefix, name, [*loaded.shape], [*own.shape])
