"""What the heads of a layer form together: a convolution, a dilated or sparse one, a mixture.

Nine hard heads on the shifts of a 3x3 kernel are a convolution (Cordonnier et al. 2020, Theorem 1).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Optional, Sequence

from .nearest_convolution import BestConvolution, ConvolutionErrors
from .shift_statistics import Shift, ShiftMaps, same_window

EXACT = 1e-6  # relative error below which a convolution is the layer, and is written as 0


@dataclass(frozen=True)
class LayerKind:
    """The kind of a layer by what its heads form together; as a string, in words.

    Attributes:
        kind (str): One of

            - ``'convolution'``: the layer is one convolution. Either all heads are hard and their shifts fill a
              rectangular window. Or one of the best convolutions leaves a relative error below 1e-6, whatever the heads
              are, on a grid with a query whose whole window is inside. If both are true, the window of the hard heads
              is named. An exception is an ``ImageAttention`` which needs more than the shifts of its hard heads to be a
              convolution: then its own window is named.
            - ``'dilated'``: the same, but there are holes between the shifts, all of the same size.
            - ``'sparse'``: all heads are hard, on some shifts of a window only.
            - ``'mixture'``: anything else.
            - ``'empty'``: there are no heads.
        hard, soft, uniform (int): Number of heads of each kind, see :class:`~attncnn_plugin.analysis.HeadStatistics`.
        num_shifts (int | None): Number of different shifts of the hard heads; None where they are not named.
        kernel_size, dilation, offset (tuple[int, int] | None): The window, see :func:`lattice_of`; None for a mixture.
        stride (tuple[int, int]): Of the queries.
        error (float | None): Relative error of the best convolution with the shifts of the hard heads alone, or with
            the named window, see :class:`.nearest_convolution.BestConvolution`; None for
            a mixture.
    """

    kind: str
    hard: int
    soft: int
    uniform: int
    num_shifts: Optional[int] = None
    kernel_size: Optional[Shift] = None
    dilation: Optional[Shift] = None
    offset: Optional[Shift] = None
    stride: Shift = (1, 1)
    error: Optional[float] = None

    def __str__(self) -> str:
        if self.kind == 'empty':
            return 'no heads: the layer is its bias'
        if self.kernel_size is None or self.dilation is None or self.error is None:
            counts = [(self.hard, 'hard'), (self.soft, 'soft'), (self.uniform, 'uniform')]
            return f'mixture, {", ".join(f"{n} {name}" for n, name in counts if n)}'
        error = f'error {error_text(self.error)}'
        if self.kind == 'sparse':
            words = [f'sparse convolution, {self.num_shifts} shifts of {size_text(self.kernel_size)}', error]
        else:
            words = [f'one convolution, {size_text(self.kernel_size)}', error]
        if max(self.dilation) > 1:
            steps = {step for step, n in zip(self.dilation, self.kernel_size) if n > 1}
            words.append(f'dilated by {steps.pop() if len(steps) == 1 else size_text(self.dilation)}')
        if max(self.stride) > 1:
            words.append(f'stride {self.stride[0] if len(set(self.stride)) == 1 else size_text(self.stride)}')
        if self.offset != (0, 0):
            words.append(f'centred at {self.offset}')
        if self.soft + self.uniform:
            words.append(f'by {self.hard} hard, {self.soft} soft and {self.uniform} uniform heads')
        return ', '.join(words)


def kind_of_layer(
    maps: ShiftMaps,
    kinds: Sequence[str],
    nearest: Sequence[Shift],
    errors: ConvolutionErrors,
    convolutions: Sequence[BestConvolution],
) -> LayerKind:
    """Returns the kind of a layer.

    Args:
        maps (ShiftMaps): Its maps.
        kinds, nearest (Sequence): The kind and the nearest shift of each head.
        errors (ConvolutionErrors): What convolutions leave of it.
        convolutions (Sequence[BestConvolution]): The best ones.
    """
    window = maps.window or same_window((1, 1))
    hard, soft, uniform = (kinds.count(kind) for kind in ('hard', 'soft', 'uniform'))
    mixture = LayerKind('mixture', hard, soft, uniform, stride=(window.stride[0], window.stride[1]))
    exact = next((entry for entry in convolutions if entry.error < EXACT and entry.interior_error is not None), None)
    if hard == len(kinds):
        error = errors.of_shifts(nearest)
        # The small rest of the heads of an ImageAttention lies in its window: it is a part of the kernel.
        if error is not None and (error < EXACT or exact is None or maps.window is None):
            lattice = lattice_of(nearest)
            return replace(
                mixture,
                kind=('dilated' if max(lattice.dilation) > 1 else 'convolution') if lattice.full else 'sparse',
                num_shifts=len(set(nearest)),
                kernel_size=lattice.kernel_size,
                dilation=lattice.dilation,
                offset=lattice.offset,
                error=error,
            )
    if exact is None:
        return mixture
    rows, columns = (step if n > 1 else 1 for step, n in zip(window.dilation, exact.kernel_size))
    return replace(
        mixture,
        kind='dilated' if max(rows, columns) > 1 else 'convolution',
        kernel_size=exact.kernel_size,
        dilation=(rows, columns),
        offset=(0, 0),
        error=exact.error,
    )


class Lattice(NamedTuple):
    """The window that holds some shifts: first + i·dilation, i from 0 to kernel_size − 1, along rows and columns.

    Attributes:
        kernel_size, dilation (tuple[int, int]): Of (rows, columns); the dilation of an axis with one entry is 1.
        offset (tuple[int, int]): Shift of the window's place from that of ``nn.Conv2d`` with ``padding='same'``.
        full (bool): Whether each shift of the window is one of them.
    """

    kernel_size: Shift
    dilation: Shift
    offset: Shift
    full: bool


def lattice_of(shifts: Sequence[Shift]) -> Lattice:
    """Returns the least lattice that holds some shifts: a full one, or their bounding box with dilation 1.

    Examples:
        >>> lattice_of([(0, -2), (0, 0), (0, 2)])
        Lattice(kernel_size=(1, 3), dilation=(1, 2), offset=(0, 0), full=True)
        >>> lattice_of([(0, 0), (1, 1)]).full
        False
    """
    axes = [sorted(set(axis)) for axis in zip(*shifts)]
    steps = [values[1] - values[0] if len(values) > 1 else 1 for values in axes]
    full = len(set(shifts)) == len(axes[0]) * len(axes[1]) and all(
        values == list(range(values[0], values[-1] + 1, step)) for values, step in zip(axes, steps)
    )
    if not full:
        steps = [1, 1]
    sizes = [(values[-1] - values[0]) // step + 1 for values, step in zip(axes, steps)]
    offsets = [values[0] + step * (n - 1) // 2 for values, step, n in zip(axes, steps, sizes)]
    return Lattice((sizes[0], sizes[1]), (steps[0], steps[1]), (offsets[0], offsets[1]), full)


def size_text(size: Sequence[int]) -> str:
    """Returns a size in words.

    Examples:
        >>> size_text((3, 5))
        '3x5'
    """
    return 'x'.join(map(str, size))


def error_text(error: float) -> str:
    """Returns a relative error in words: 0 below 1e-6.

    Examples:
        >>> error_text(1e-7), error_text(0.12345)
        ('0', '0.123')
    """
    return '0' if error < EXACT else f'{error:.3g}'
