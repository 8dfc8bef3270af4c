"""The window that a convolution moves over an image."""

import math
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, List, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .precision import Device

Sizes = Union[int, Sequence[int]]  # a number for each axis, or one for all
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONVOLVE = (F.conv1d, F.conv2d, F.conv3d)


@dataclass(frozen=True)
class Window:
    """Sizes of a convolution, one entry for each axis of the image.

    Output o of an axis is the query at pixel q = o·stride + anchor − padding before; the kernel's entry i is its
    shift δ = i·dilation − anchor. With the padding ``'same'`` of ``nn.Conv2d``, q = o.

    Attributes:
        kernel_size, stride, dilation (tuple[int, ...]): As of ``nn.Conv2d``.
        padding (tuple[tuple[int, int], ...]): Pixels added before and after.
        padding_mode (str): ``'zeros'``, ``'replicate'``, ``'reflect'`` or ``'circular'``.
    """

    kernel_size: Tuple[int, ...]
    stride: Tuple[int, ...]
    dilation: Tuple[int, ...]
    padding: Tuple[Tuple[int, int], ...]
    padding_mode: str

    @classmethod
    def of(cls, conv: Any) -> 'Window':
        """Returns the window that the attributes of a convolution describe; an integer stands for all axes.

        Raises:
            ValueError: One of them is no size.
        """
        kernel_size, ndim = tuple(conv.weight.shape[2:]), conv.weight.ndim - 2
        stride, dilation = per_axis('stride', conv.stride, ndim), per_axis('dilation', conv.dilation, ndim)
        if conv.padding == 'same':
            return replace(same_window(kernel_size, conv.padding_mode, dilation), stride=stride)
        padding = per_axis('padding', 0 if conv.padding == 'valid' else conv.padding, ndim, least=0)
        return cls(kernel_size, stride, dilation, tuple((n, n) for n in padding), conv.padding_mode)

    @property
    def ndim(self) -> int:
        return len(self.kernel_size)

    @property
    def anchor(self) -> Tuple[int, ...]:
        """Place of the query within the window, its middle, in pixels from its first one."""
        return tuple(d * (k - 1) // 2 for d, k in zip(self.dilation, self.kernel_size))

    def shifts(self) -> Tensor:
        """Returns δ of every kernel position, row-major, ``(K, ndim)``."""
        axes = [torch.arange(k, device='cpu') * d - a for k, d, a in zip(self.kernel_size, self.dilation, self.anchor)]
        return torch.cartesian_prod(*axes).reshape(-1, self.ndim)

    def padding_of(self, axis: int, size: int) -> Tuple[int, int]:
        """Returns the pixels added before and after an axis of ``size`` pixels."""
        return self.padding[axis]

    def num_queries(self, axis: int, size: int) -> int:
        """Returns the number of outputs along an axis; raises ``ValueError`` for an image smaller than the window."""
        before, after = self.padding_of(axis, size)
        room = size + before + after - self.dilation[axis] * (self.kernel_size[axis] - 1) - 1
        if room < 0:
            raise ValueError(
                f'an image of {size} pixels along axis {axis}, padded by {before} and {after}, is smaller than the '
                f'window of {self.kernel_size[axis]} with dilation {self.dilation[axis]}'
            )
        return room // self.stride[axis] + 1

    def queries(self, axis: int, size: int, device: Device = None) -> Tensor:
        """Returns the pixel q of every output along an axis of ``size`` pixels; it can lie in the padding."""
        number = torch.arange(self.num_queries(axis, size), device=device)
        return number * self.stride[axis] + self.anchor[axis] - self.padding_of(axis, size)[0]

    def interior(self, axis: int, size: int) -> Tensor:
        """Returns whether the window of each query along an axis of ``size`` pixels is inside of it, ``(Q,)``."""
        first = self.queries(axis, size, 'cpu') - self.anchor[axis]
        return (first >= 0) & (first + self.dilation[axis] * (self.kernel_size[axis] - 1) < size)

    def shifts_to_pixels(self, size: Sequence[int], device: Device = None) -> List[Tensor]:
        """Returns δ from every query to every pixel of the padded image, ``(Q, K)`` for each axis."""
        shifts = []
        for axis, pixels in enumerate(size):
            before, after = self.padding_of(axis, pixels)
            keys = torch.arange(-before, pixels + after, device=device)
            shifts.append(keys - self.queries(axis, pixels, device)[:, None])
        return shifts

    @property
    def padding_argument(self) -> Union[str, Tuple[int, ...]]:
        """The argument ``padding`` of ``nn.Conv2d``: numbers, or ``'same'``, which puts the odd pixel after."""
        if all(before == after for before, after in self.padding):
            return tuple(before for before, _ in self.padding)
        return 'same'

    def pad(self, x: Tensor) -> Tensor:
        """Returns ``x``, ``(B, C, *size)``, padded."""
        pairs = [self.padding_of(axis, n) for axis, n in enumerate(x.shape[2:])]
        amounts = [n for pair in reversed(pairs) for n in pair]
        if not any(amounts):
            return x
        return F.pad(x, amounts, mode='constant' if self.padding_mode == 'zeros' else self.padding_mode)


@dataclass(frozen=True)
class SameWindow(Window):
    """A window padded to ⌈size/stride⌉ outputs, the odd pixel after (TensorFlow's ``'SAME'``), without ``padding``."""

    @property
    def padding_argument(self) -> Union[str, Tuple[int, ...]]:
        raise AttributeError('the padding depends on the size of the image')

    def padding_of(self, axis: int, size: int) -> Tuple[int, int]:
        extent = self.dilation[axis] * (self.kernel_size[axis] - 1) + 1
        outputs = math.ceil(size / self.stride[axis])
        total = max((outputs - 1) * self.stride[axis] + extent - size, 0)
        return total // 2, total - total // 2


def same_window(
    kernel_size: Tuple[int, ...], padding_mode: str = 'zeros', dilation: Tuple[int, ...] = (1, 1)
) -> Window:
    """Returns the window of a convolution with ``padding='same'`` of PyTorch, whose stride is 1.

    Examples:
        >>> same_window((1, 3), dilation=(1, 2)).shifts().tolist()
        [[0, -2], [0, 0], [0, 2]]
    """
    added = [d * (k - 1) for d, k in zip(dilation, kernel_size)]
    padding = tuple((n // 2, n - n // 2) for n in added)  # the odd pixel comes after
    return Window(kernel_size, (1,) * len(added), dilation, padding, padding_mode)


def shown(value: Any) -> str:
    """Formats an argument for an error message; tensors and arrays, in lists too, are shown by their shapes.

    Examples:
        >>> shown(torch.zeros(2, 3)), shown([1, 'a']), shown([torch.zeros(2), 'a'])
        ('<Tensor of shape (2, 3)>', "[1, 'a']", "[<Tensor of shape (2,)>, 'a']")
    """
    if getattr(value, 'ndim', 0):
        return f'<{type(value).__name__} of shape {tuple(value.shape)}>'
    if isinstance(value, (list, tuple)) and any(getattr(entry, 'ndim', 0) for entry in value):
        return f'[{", ".join(map(shown, value))}]'
    return repr(value)


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises ``ValueError`` for an argument that is none of its choices."""
    if value not in choices:
        raise ValueError(f'{name}={shown(value)} is unknown: choose one of {tuple(choices)}')


def per_axis(name: str, value: Sizes, ndim: int, least: int = 1) -> Tuple[int, ...]:
    """Returns a number for each of ``ndim`` axes; raises ``ValueError`` unless all are integers ≥ ``least``."""
    values: Tuple[Any, ...] = tuple(value) if isinstance(value, (tuple, list)) else (value,) * ndim
    whole = all(isinstance(n, Integral) and not isinstance(n, bool) and int(n) >= least for n in values)
    if len(values) != ndim or not whole:
        kind = 'a positive integer' if least else 'an integer of at least 0'
        raise ValueError(f'{name}={shown(value)} must be {kind}, or one for each of {ndim} axes')
    return tuple(int(n) for n in values)
