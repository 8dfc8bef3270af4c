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
from ..layers.transformer_heads import SHARED_BIASES
from .parts import Attention
from .shifts import Size, log_share_of_peak, squared_distances


def bias_of(network: Any, attention: Attention) -> Optional[Any]:
    """The module with the relative position bias of some attention: it itself, one of its own, or one of all layers."""
    module = attention.module
    if isinstance(getattr(module, 'relative_position_bias_table', None), nn.Parameter):
        return module
    if getattr(module, 'rel_pos', None) is not None:
        return module.rel_pos
    shared = [getattr(network, name, None) for name in SHARED_BIASES]
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
    has_index = isinstance(getattr(bias, 'relative_position_index', None), Tensor)
    if isinstance(table, nn.Parameter) and table.ndim == 2 and has_index:
        _set_table(bias, table.data, shifts, alpha)
    elif isinstance(getattr(bias, 'bias_act', None), nn.Identity) and hasattr(bias, 'mlp'):
        _set_mlp(bias, attention.name, shifts, alpha)
    else:
        raise ValueError(
            f'the position bias of {attention.name}, a {type(bias).__name__}, has neither a table '
            '(shifts, heads) with an index nor an MLP whose outputs are not bounded: it cannot be −α‖δ − Δ‖²'
        )
    attention.set_queries_and_keys(torch.zeros_like(attention.weight('q')), attention.weight('k').clone())


def window_of(bias: Any) -> Size:
    """Height and width of the window, or of the whole grid, for which a bias is.

    Raises:
        ValueError: It does not say.
    """
    if getattr(bias, 'window_size', None) is None:
        raise ValueError(f'{type(bias).__name__} has a position bias, but no window_size that says for which grid')
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
    """An MLP that is piecewise linear between the shifts, Σ_i c_i relu(±(u − u_i)) on each axis u.

    −α‖δ − Δ‖² is a sum of two functions of one axis each. Hinges at the shifts make any such function; those of a head
    open away from its centre, so that all c_i have the same sign, and the dropout of the MLP changes scores near the
    centre little.
    """
    size = window_of(bias)
    coordinates = bias.rel_coords_log.double()  # (2·height − 1, 2·width − 1, 2), of q − k
    wanted = _wanted(shifts.to(coordinates.device), alpha, size, bias.prefix_tokens > 0).flip(1, 2).flatten(1)
    hinges = []  # for each: axis, sign, knot, and which heads have it
    for axis, n in enumerate(size):
        values = coordinates.select(1 - axis, 0)[:, axis]
        center = values[(n - 1 - shifts[:, axis].long()).clamp(0, 2 * n - 2)]  # of each head
        hinges += [(axis, 1.0, u, center <= u) for u in values[:-1] if u >= center.min()]
        hinges += [(axis, -1.0, u, center >= u) for u in values[1:] if u <= center.max()]
    fc1, fc2 = bias.mlp.fc1, bias.mlp.fc2
    copies = fc1.out_features // max(len(hinges), 1)  # of each, for the dropout
    if fc1.bias is None or fc2.bias is None or copies == 0:
        raise ValueError(
            f'the MLP of the position bias of {name} has {fc1.out_features} hidden channels, and biases: '
            f'{fc1.bias is not None and fc2.bias is not None}; with biases and {len(hinges)} of them it can be '
            f'−α‖δ − Δ‖² on {size[0]}×{size[1]} patches'
        )
    weight, offset = torch.zeros(len(hinges), 2).to(coordinates), torch.zeros(len(hinges)).to(coordinates)
    for row, (axis, sign, knot, _) in enumerate(hinges):
        weight[row, axis], offset[row] = sign, -sign * knot
    hidden = torch.relu(coordinates.flatten(0, 1) @ weight.T + offset)  # (shifts, hinges)
    fc2.weight.data.zero_()  # hidden channels without a hinge keep their random weights, and learn
    used = copies * len(hinges)
    fc1.weight.data[:used].copy_(weight.repeat(copies, 1))
    fc1.bias.data[:used].copy_(offset.repeat(copies))
    for head, scores in enumerate(wanted):
        own = torch.stack([heads[head] for *_, heads in hinges])
        design = torch.nn.functional.pad(hidden[:, own], (0, 1), value=1.0)
        solution = torch.linalg.lstsq(design, scores[:, None]).solution[:, 0]
        fc2.weight.data[head, :used][own.repeat(copies)] = (solution[:-1] / copies).repeat(copies).to(fc2.weight)
        fc2.bias.data[head] = solution[-1]
