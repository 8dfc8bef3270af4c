"""What the heads of a layer form together: one convolution, a dilated or sparse one, or a mixture."""

from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple

from ...pruning.degenerate_heads import THRESHOLDS

HARD = 0.9  # share of its nearest shift from which a head is hard
UNIFORM = THRESHOLDS['entropy']  # relative entropy above which a head is uniform
EXACT = 1e-6  # relative error below which a convolution is the layer, and is written as 0

Shift = Tuple[int, int]


def head_kind(share: float, relative_entropy: float) -> str:
    """``'hard'`` if the nearest shift gets 0.9 or more, else ``'uniform'`` if the entropy is above 0.99 of that of
    uniform attention, else ``'soft'``.

    Args:
        share (float): That of the nearest shift, see :class:`.head_report_types.HeadStatistics`.
        relative_entropy (float): The same.
    """
    if share >= HARD:
        return 'hard'
    return 'uniform' if relative_entropy > UNIFORM else 'soft'


@dataclass(frozen=True)
class Lattice:
    """Shifts first + i·dilation, i from 0 to kernel_size − 1, along rows and along columns.

    Attributes:
        kernel_size, dilation (tuple[int, int]): Of (rows, columns); the dilation of an axis with one entry is 1.
        offset (tuple[int, int]): Shift of the window's place from that of ``nn.Conv2d`` with ``padding='same'``.
        full (bool): Whether each of its shifts is there.
    """

    kernel_size: Shift
    dilation: Shift
    offset: Shift
    full: bool

    @classmethod
    def of(cls, shifts: Sequence[Shift]) -> 'Lattice':
        """The least lattice that holds these shifts: a full one, or their bounding box with dilation 1."""
        axes = [sorted(set(axis)) for axis in zip(*shifts)]
        steps = [values[1] - values[0] if len(values) > 1 else 1 for values in axes]
        full = len(set(shifts)) == len(axes[0]) * len(axes[1]) and all(
            values == list(range(values[0], values[-1] + 1, step)) for values, step in zip(axes, steps)
        )
        if not full:
            steps = [1, 1]
        kernel_size = tuple((values[-1] - values[0]) // step + 1 for values, step in zip(axes, steps))
        offset = tuple(values[0] + step * (n - 1) // 2 for values, step, n in zip(axes, steps, kernel_size))
        return cls(kernel_size, tuple(steps), offset, full)

    @property
    def dilated(self) -> bool:
        return max(self.dilation) > 1


@dataclass(frozen=True)
class LayerKind:
    """What the heads of a layer form, in words as a string.

    Attributes:
        kind (str): One of

            - ``'convolution'``: all heads are hard and their shifts fill a rectangular window; or one of the best
              convolutions leaves a relative error below 1e-6, whatever the heads are, on a grid with a query whose
              whole window is inside. Where both are so with different windows, the former is named, of an
              ``ImageAttention`` the latter.
            - ``'dilated'``: the same with a regular lattice with holes.
            - ``'sparse'``: all heads are hard, on some shifts of a window only.
            - ``'mixture'``: anything else.
            - ``'empty'``: there are no heads.
            - ``'converted'``: a convolution of ``switch_to_deploy`` has taken the place of the heads.
        hard, soft, uniform (int): Number of heads of each kind, see :func:`head_kind`.
        num_shifts (int | None): Number of different shifts of the hard heads that it names, None without.
        kernel_size, dilation, offset (tuple[int, int] | None): The window, see :class:`Lattice`; None for a mixture.
        stride (tuple[int, int]): Of the queries.
        error (float | None): Relative error of the best convolution by these shifts and no others, see
            :class:`.head_report_types.BestConvolution`; None for a mixture.
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
        if self.kind == 'converted':
            return f'a convolution of {by(self.kernel_size)} shifts'
        if self.kind == 'mixture':
            counts = [(self.hard, 'hard'), (self.soft, 'soft'), (self.uniform, 'uniform')]
            return f'mixture, {", ".join(f"{n} {name}" for n, name in counts if n)}'
        error = f'error {error_text(self.error)}'
        if self.kind == 'sparse':
            words = [f'sparse convolution, {self.num_shifts} shifts of {by(self.kernel_size)}', error]
        else:
            words = [f'one convolution, {by(self.kernel_size)}', error]
        if max(self.dilation) > 1:
            steps = {step for step, n in zip(self.dilation, self.kernel_size) if n > 1}
            words.append(f'dilated by {steps.pop() if len(steps) == 1 else by(self.dilation)}')
        if max(self.stride) > 1:
            words.append(f'stride {self.stride[0] if len(set(self.stride)) == 1 else by(self.stride)}')
        if self.offset != (0, 0):
            words.append(f'centred at {self.offset}')
        if self.soft + self.uniform:
            words.append(f'by {self.hard} hard, {self.soft} soft and {self.uniform} uniform heads')
        return ', '.join(words)


def by(size: Sequence[int]) -> str:
    """``'3x5'``"""
    return 'x'.join(map(str, size))


def error_text(error: float) -> str:
    """A relative error in words: 0 below 1e-6."""
    return '0' if error < EXACT else f'{error:.3g}'


def count_kinds(kinds: List[str]) -> dict:
    return {kind: kinds.count(kind) for kind in ('hard', 'soft', 'uniform')}
