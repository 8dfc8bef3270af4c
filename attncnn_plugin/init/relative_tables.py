"""Gaussian heads of relative position biases: b_δ = −α‖δ − Δ‖² (C20, eq. 9), exact.

Queries are 0, so that the scores are the biases alone. Keys are random, so that queries learn: with both at 0 neither
would have a gradient. Entries of a table for class tokens stay as they are. Where there are some, a constant is added
to those of the patches: it changes nothing among patches, and leaves class tokens the share of about 1/N that they have
in uniform attention.
"""

from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..layers.shifts import at_grid_shifts
from .parts import Attention
from .shifts import Size, log_share_of_peak, squared_distances

SHARED = ('shared_rel_pos', 'rel_pos_bias')


def bias_of(network: Any, attention: Attention) -> Optional[Any]:
    """The module with the relative position bias of some attention: it itself, one of its own, or one of all layers."""
    module = attention.module
    if isinstance(getattr(module, 'relative_position_bias_table', None), nn.Parameter):
        return module
    if getattr(module, 'rel_pos', None) is not None:
        return module.rel_pos
    shared = [getattr(network, name, None) for name in SHARED]
    return next((bias for bias in shared if isinstance(bias, nn.Module)), None)


def start_relative(bias: Any, attention: Attention, shifts: Tensor, alpha: float) -> None:
    """Sets a bias and the queries of its attention.

    Args:
        bias: From :func:`bias_of`.
        attention (Attention): It.
        shifts (Tensor): ``(N_h, 2)``.
        alpha (float): α.

    Raises:
        ValueError: The bias is given by something else than a table or an MLP whose outputs are not bounded.
    """
    table = getattr(bias, 'relative_position_bias_table', None)
    if isinstance(table, nn.Parameter) and table.ndim == 2:
        _set_table(bias, table.data, shifts, alpha)
    elif isinstance(getattr(bias, 'bias_act', None), nn.Identity) and hasattr(bias, 'mlp'):
        _set_mlp(bias, attention.name, shifts, alpha)
    else:
        raise ValueError(
            f'the position bias of {attention.name}, a {type(bias).__name__}, has neither a table '
            '(shifts, heads) nor an MLP whose outputs are not bounded: it cannot be −α‖δ − Δ‖²'
        )
    attention.set_queries_and_keys(torch.zeros_like(attention.weight('q')), attention.weight('k').clone())


def window_of(bias: Any) -> Size:
    """Height and width of the window, or of the whole grid, for which a bias is."""
    height, width = bias.window_size
    return int(height), int(width)


def _wanted(shifts: Tensor, alpha: float, size: Size, has_prefix: bool) -> Tensor:
    """b_δ, ``(N_h, 2·height − 1, 2·width − 1)``, float64."""
    constant = log_share_of_peak(alpha, size[0] * size[1]) if has_prefix else 0.0
    return constant - alpha * squared_distances(shifts, size)


def _set_table(bias: Any, table: Tensor, shifts: Tensor, alpha: float) -> None:
    size = window_of(bias)
    patches = size[0] * size[1]
    index = bias.relative_position_index
    tokens = round(index.numel() ** 0.5)
    index = index.reshape(tokens, tokens)[tokens - patches :, tokens - patches :]  # class tokens come first
    scores = at_grid_shifts(_wanted(shifts.to(table.device), alpha, size, tokens > patches), size)
    table[index] = scores.permute(1, 2, 0).to(table)


def _set_mlp(bias: Any, name: str, shifts: Tensor, alpha: float) -> None:
    """An MLP that is piecewise linear between the shifts, on each axis: Σ_i c_i relu(±u − u_i) at the shifts u_i.

    −α‖δ − Δ‖² is a sum of two functions of one axis each. A hinge at each shift of an axis makes any function of it.
    """
    size = window_of(bias)
    coordinates = bias.rel_coords_log.double()  # (2·height − 1, 2·width − 1, 2), of q − k
    wanted = _wanted(shifts.to(coordinates.device), alpha, size, bias.prefix_tokens > 0).flip(1, 2)
    fc1, fc2 = bias.mlp.fc1, bias.mlp.fc2
    knots = []  # (axis, sign, knot)
    for axis in (0, 1):
        values = coordinates.select(1 - axis, 0)[:, axis]
        knots += [(axis, 1.0, float(u)) for u in values if 0 <= u < values.max()]
        knots += [(axis, -1.0, -float(u)) for u in values if values.min() < u <= 0]
    if fc1.bias is None or fc2.bias is None or len(knots) > fc1.out_features:
        raise ValueError(
            f'the MLP of the position bias of {name} has {fc1.out_features} hidden channels, and biases: '
            f'{fc1.bias is not None and fc2.bias is not None}; with biases and {len(knots)} of them it can be '
            f'−α‖δ − Δ‖² on {size[0]}×{size[1]} patches'
        )
    weight, offset = fc1.weight.data, fc1.bias.data
    for row, (axis, sign, knot) in enumerate(knots):
        weight[row] = 0
        weight[row, axis], offset[row] = sign, -knot
    hidden = torch.relu(coordinates.flatten(0, 1) @ weight.double().T + offset.double())[:, : len(knots)]
    design = torch.nn.functional.pad(hidden, (0, 1), value=1.0)
    solution = torch.linalg.lstsq(design, wanted.flatten(1).T).solution  # (knots + 1, N_h)
    fc2.weight.data.zero_()  # hidden channels without a knot keep their random weights, and learn
    fc2.weight.data[:, : len(knots)] = solution[:-1].T.to(weight)
    fc2.bias.data.copy_(solution[-1])
