"""Which shift each head looks at, and what a Gaussian head gives to the patches of a grid."""

import math
from typing import List, Sequence, Tuple, Union

import torch
from torch import Tensor

from ..layers.shifts import at_grid_shifts
from ..layers.window import shown

Size = Tuple[int, int]
SHIFTS = ('random', 'in turn')


def kernel_shifts(kernel_size: Union[int, Sequence[int]]) -> Tensor:
    """The shifts of a kernel, as those of a convolution with padding ``'same'``, ``(K·K, 2)``: (row, column).

    Raises:
        ValueError: ``kernel_size`` is no number of patches or pair of them.

    Examples:
        >>> kernel_shifts((1, 3)).tolist()
        [[0.0, -1.0], [0.0, 0.0], [0.0, 1.0]]
    """
    sizes = (kernel_size, kernel_size) if isinstance(kernel_size, int) else tuple(kernel_size)
    if len(sizes) != 2 or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ValueError(f'kernel_size={shown(kernel_size)} must be a whole number of at least 1, or a pair of them')
    rows, columns = (torch.arange(size, dtype=torch.float64) - (size - 1) // 2 for size in sizes)
    return torch.cartesian_prod(rows, columns)


def draw_shifts(
    num_heads: Sequence[int], kernel_size: Union[int, Sequence[int]], shifts: str, generator: torch.Generator
) -> List[Tensor]:
    """A shift for each head, one of the kernel's.

    Args:
        num_heads (Sequence[int]): Of each layer.
        kernel_size (int | tuple[int, int]): In patches.
        shifts (str): ``'random'``, or ``'in turn'``: head after head, layer after layer.
        generator (torch.Generator): Draws random ones.

    Returns:
        list[Tensor]: ``(N_h, 2)`` for each layer.

    Raises:
        ValueError: ``kernel_size`` or ``shifts`` is not one of these.
    """
    kernel = kernel_shifts(kernel_size)
    if shifts == 'random':
        index = torch.randint(len(kernel), (sum(num_heads),), generator=generator)
    elif shifts == 'in turn':
        index = torch.arange(sum(num_heads)) % len(kernel)
    else:
        raise ValueError(f'shifts={shown(shifts)} must be one of {SHIFTS}')
    return list(kernel[index].split(list(num_heads)))


def gaussian_scores(shifts: Tensor, alpha: float, size: Size) -> Tensor:
    """−α‖k − q − Δ‖² for all queries and keys of a grid (C20, eq. 9), ``(N_h, patches, patches)``, float64."""
    return at_grid_shifts(-alpha * squared_distances(shifts, size), size)


def squared_distances(shifts: Tensor, size: Size) -> Tensor:
    """‖δ − Δ‖² for each head and each shift δ of a grid, ``(N_h, 2·height − 1, 2·width − 1)``, float64."""
    rows, columns = (torch.arange(1 - n, n, dtype=torch.float64, device=shifts.device) for n in size)
    center = shifts.double()[:, :, None, None]
    return (rows[:, None] - center[:, 0]) ** 2 + (columns - center[:, 1]) ** 2


def log_share_of_peak(alpha: float, patches: int) -> float:
    """log(N / Z) with Z = Σ_δ exp(−α‖δ‖²) over a plane of shifts.

    A token whose score is lower than a head's largest one by this has a share of about 1/N in it, as in uniform
    attention over N patches.
    """
    axis = sum(math.exp(-alpha * shift * shift) for shift in range(-20, 21))
    return max(0.0, math.log(patches) - 2 * math.log(axis))
