"""Values and outputs of attention at the start."""

from typing import List, Optional, Union

import torch
from torch import Tensor, nn

from ..layers.window import shown
from .mimetic import mimetic_values
from .parts import Attention

VALUES = ('default', 'identity', 'mimetic')
Values = Union[str, nn.Conv2d]


def check_values(values: Values) -> None:
    """Raises a ValueError for anything else than one of ``VALUES`` or a convolution."""
    if not isinstance(values, nn.Conv2d) and values not in VALUES:
        raise ValueError(f'values={shown(values)} must be one of {VALUES}, or a Conv2d over the patches')


def set_values(attention: Attention, values: Values, shifts: Optional[Tensor], generator: torch.Generator) -> None:
    """Sets W^V and W^O of a layer; biases become 0.

    Args:
        attention (Attention): The layer.
        values (str | nn.Conv2d): ``'default'`` changes nothing; ``'identity'`` gives each head its own channels as they
            are; ``'mimetic'`` as :mod:`~attncnn_plugin.init.mimetic`; from a convolution the heads of a shift have the
            nearest matrices to that of the kernel at this shift, ``(D, D)``, whose rank is that of their channels.
        shifts (Tensor | None): ``(N_h, 2)``, which a convolution needs.
        generator (torch.Generator): Draws those that are random.

    Raises:
        ValueError: Sizes do not fit.
    """
    if isinstance(values, str) and values == 'default':
        return
    if isinstance(values, nn.Conv2d):
        _set_from_convolution(attention, values, shifts)
        return
    weight = attention.weight('v')  # (N_h, d, D)
    width = weight.shape[-1]
    if weight.shape[0] * weight.shape[1] != width:
        raise ValueError(
            f'values={values!r} needs heads of as many channels together as a token has; those of {attention.name} '
            f'have {weight.shape[0] * weight.shape[1]}, a token {width}'
        )
    if values == 'identity':
        value = output = torch.eye(width, dtype=torch.float64)
    else:
        left, strengths, right = torch.linalg.svd(mimetic_values(attention, generator))
        value, output = left * strengths.sqrt(), strengths.sqrt()[:, None] * right
    _set(attention, value, output)


def value_error(attention: Attention, values: Values, shifts: Tensor) -> Optional[float]:
    """‖W − W'‖/‖W‖ of a convolution's matrices and those that the heads have now; None without a convolution.

    Args:
        attention (Attention): The layer.
        values (str | nn.Conv2d): As of :func:`set_values`.
        shifts (Tensor): ``(N_h, 2)``.
    """
    if not isinstance(values, nn.Conv2d):
        return None
    weight = attention.weight('v').double()  # (N_h, d, D)
    outputs = attention.module.proj.weight.data.double().T.reshape_as(weight)
    kernel = values.weight.detach().to(weight)
    left = kernel.permute(2, 3, 1, 0).clone()  # (height, width, D, D), of rows of tokens
    for (row, column), value, output in zip(_positions(kernel, shifts), weight, outputs):
        left[row, column] -= value.T @ output
    return float(left.norm() / kernel.norm().clamp(min=torch.finfo(kernel.dtype).tiny))


def _positions(kernel: Tensor, shifts: Tensor) -> List[List[int]]:
    """Row and column of each head's shift in a kernel ``(…, height, width)``."""
    center = torch.tensor([(n - 1) // 2 for n in kernel.shape[2:]], device=shifts.device)
    return (shifts + center).long().tolist()


def _set(attention: Attention, value: Tensor, output: Tensor) -> None:
    """x W^V for rows of tokens, then W^O: ``(D, N_h·d)`` and ``(N_h·d, D)``."""
    weight = attention.weight('v')
    weight.copy_(value.T.reshape(weight.shape))
    attention.module.proj.weight.data.copy_(output.T)
    for bias in (attention.bias('v'), attention.module.proj.bias):
        if bias is not None:
            bias.data.zero_()


def _set_from_convolution(attention: Attention, conv: nn.Conv2d, shifts: Optional[Tensor]) -> None:
    weight = attention.weight('v')
    heads, head_dim, width = weight.shape
    kernel = conv.weight.detach().double()
    if kernel.shape[:2] != (width, width) or conv.stride != (1, 1) or conv.dilation != (1, 1) or shifts is None:
        raise ValueError(
            f'values={conv} must be a convolution from {width} to {width} channels, those of a token of '
            f'{attention.name}, with stride, dilation and groups of 1, for heads with shifts'
        )
    value, output = kernel.new_zeros(width, heads, head_dim), kernel.new_zeros(heads, head_dim, width)
    positions = _positions(kernel, shifts)
    for row, column in sorted({(row, column) for row, column in positions}):
        if not (0 <= row < kernel.shape[2] and 0 <= column < kernel.shape[3]):
            raise ValueError(
                f'values={conv} has no matrix for a head of {attention.name} that looks at shift '
                f'({row - (kernel.shape[2] - 1) // 2}, {column - (kernel.shape[3] - 1) // 2}): give a kernel_size of '
                f'{tuple(kernel.shape[2:])} to the start'
            )
        of_shift = [head for head, position in enumerate(positions) if position == [row, column]]
        left, strengths, right = torch.linalg.svd(kernel[:, :, row, column].T)  # rows of tokens
        for number, head in enumerate(of_shift):
            part = slice(number * head_dim, (number + 1) * head_dim)
            roots = strengths[part].sqrt()
            value[:, head, : len(roots)] = left[:, part] * roots
            output[head, : len(roots)] = roots[:, None] * right[part]
    _set(attention, value.flatten(1), output.flatten(0, 1))
    if conv.bias is not None and attention.module.proj.bias is not None:
        attention.module.proj.bias.data.copy_(conv.bias.data)
