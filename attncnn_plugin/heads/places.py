"""Which token is which patch, followed through the functions that move tokens: views, rolls, windows, gathered parts.

Each entry of a tensor has a number. That of a place is positive, and says the image, row and column, of a pixel or of
the output of the last convolution; that of a token beside the grid, such as a class token or a register, is negative;
padding has 0. What a function moves, it moves of the numbers too. A linear map keeps those of its first channel.
Images of further arguments have numbers with a fraction, which tells their tokens from those of the first.
"""

import math
import string
from dataclasses import dataclass
from typing import Any, Iterator, List, Optional, Set, Tuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..attention.window import Window

SIDE = 2**16  # rows and columns of an image at most
HIDDEN = 1e-30  # of a probability; a mask of −100 leaves less
MOVES = {
    *('__getitem__', 'cat', 'concat', 'concatenate', 'chunk', 'contiguous', 'expand', 'expand_as', 'flatten', 'flip'),
    *('gather', 'hsplit', 'vsplit', 'index_select', 'masked_select', 'movedim', 'moveaxis', 'narrow', 'pad', 'permute'),
    *('pixel_shuffle', 'pixel_unshuffle', 'ravel', 'repeat', 'repeat_interleave', 'reshape', 'reshape_as', 'roll'),
    *('rot90', 'select', 'split', 'split_with_sizes', 'squeeze', 'stack', 'swapaxes', 'swapdims', 'take_along_dim'),
    *('tensor_split', 'tile', 'transpose', 'unbind', 'unflatten', 'unfold', 'unsqueeze', 'view', 'view_as', '__get__'),
    *('amax', 'max'),  # of several places it keeps the last
}
WRITES = {
    *('__setitem__', 'copy_', 'index_copy', 'index_put', 'masked_scatter', 'scatter'),
    *('select_scatter', 'slice_scatter'),
}
PRODUCTS = {'linear', 'matmul', '__matmul__', 'bmm'}
GRIDS = 'conv', 'pool', 'interpolate'  # in the names of functions that make another grid


class Followed:
    """The numbers of the tensors of a forward pass."""

    def __init__(self) -> None:
        self.numbers: Any = WeakTensorKeyDictionary()
        self.beside = 0  # tokens beside the grid so far
        self.number = 0  # of images that came as arguments

    def of(self, tensor: Any) -> Optional[Tensor]:
        """Returns the numbers of a tensor's entries, of its shape; None where they are unknown."""
        return self.numbers.get(tensor) if isinstance(tensor, Tensor) else None

    def begin(self, images: Any) -> None:
        """Numbers the pixels of images ``(B, C, H, W)``, or of the frames of videos."""
        is_plain = isinstance(images, Tensor) and not images.is_nested
        if is_plain and images.ndim in (4, 5) and images.is_floating_point():
            self.numbers[images] = new_numbers(images, None, self.number / 16)
            self.number += 1

    def follow(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Finds the numbers of the output of a function."""
        if not self.number and 'conv' in func.__name__ and args:  # of images that came as keyword arguments
            self.begin(args[0])
        everything = flat((*args, *kwargs.values()))
        tensors = [own for own in everything if own in self.numbers]
        if not tensors:
            return
        first, name = tensors[0], func.__name__
        if is_one_of(func, MOVES):
            self.move(func, args, kwargs, output)
        elif is_one_of(func, WRITES):
            if any(own is not args[0] for own in tensors):  # of what has no numbers it takes the place
                self.move(func, args, kwargs, args[0] if output is None else output, writes=True)
        elif func is torch.einsum:
            self.sum_up(args, output)
        elif name.endswith('_like') or any(word in name for word in ('new_', 'index_', 'scatter')):
            self.numbers.pop(output, None)  # other values, or sums of several places
        elif not isinstance(output, Tensor) or not output.is_floating_point():
            return
        elif name in PRODUCTS:
            rows = first_of(self.numbers[first], name == 'linear' or isinstance(everything[-1], nn.Parameter))
            if first is everything[0] and output.shape[:-1] == first.shape[:-1] and rows is not None:
                self.numbers[output] = rows[..., None].expand(output.shape)
        elif any(kind in name for kind in GRIDS):
            self.renumber(first, output)
        else:
            self.take_over(tensors[::-1], [output] * len(tensors))

    def renumber(self, grid: Tensor, output: Tensor) -> None:
        """Numbers what a convolution or a pooling made of a grid, anew where it has another size."""
        if output.ndim == grid.ndim > 2 and len(output) == len(grid):
            before, same = self.numbers[grid], output.shape[2:] == grid.shape[2:]
            self.numbers[output] = before[:, :1].expand(output.shape) if same else new_numbers(output, before)

    def take_over(self, tensors: Any, others: Any) -> None:
        """Gives other tensors, of the same values, the numbers of tensors."""
        for own, other in zip(flat(tensors), flat(others)):
            if own in self.numbers and own.shape == other.shape:
                self.numbers[other] = self.numbers[own]

    def move(self, func: Any, args: Any, kwargs: Any, output: Any, writes: bool = False) -> None:
        """Moves the numbers as a function moved the tensors, into a copy of those of its first argument or not."""
        try:
            first, *others = map(self.like, args)
            first = first.clone() if writes else first
            moved = func(first, *others, **{name: self.like(own) for name, own in kwargs.items()})
        except (RuntimeError, TypeError, ValueError, IndexError):  # it takes no float64, or asks for memory of its own
            return
        for own, found in zip(flat([output]), flat([first if moved is None else moved])):
            if own.shape == found.shape:
                self.numbers[own] = found

    def like(self, own: Any) -> Any:
        """Returns an argument of a function, where tensors of floats are their numbers."""
        if isinstance(own, (list, tuple)):
            return type(own)(map(self.like, own)) if any(isinstance(part, Tensor) for part in own) else own
        if not isinstance(own, Tensor) or not own.is_floating_point():
            return own
        found = self.of(own)
        return self.new_tokens(own) if found is None else found

    def new_tokens(self, tokens: Tensor) -> Tensor:
        """Numbers tokens ``(B, N, D)`` that come to a grid, and what else comes as padding."""
        number = tokens.shape[1] if tokens.ndim == 3 else 0
        found = -torch.arange(1, number + 1, device=tokens.device, dtype=torch.float64) - self.beside
        self.beside += number
        return (found[:, None] if number else tokens.new_zeros((), dtype=torch.float64)).expand(tokens.shape)

    def sum_up(self, args: Any, output: Tensor) -> None:
        """Numbers what ``torch.einsum`` gave by the first of its operands that has numbers."""
        operands = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
        inputs, of_output = axes_of(args[0], operands)
        for own, axes in zip(operands, inputs):
            numbers = self.of(own)
            for axis in [axis for axis in axes if axis not in of_output]:
                numbers = first_of(None if numbers is None else numbers.movedim(axes.index(axis), -1))
                axes = axes.replace(axis, '')
            if numbers is not None:
                kept = [axis for axis in of_output if axis in axes]
                numbers = numbers.permute([axes.index(axis) for axis in kept])
                for place, axis in enumerate(of_output):
                    numbers = numbers if axis in axes else numbers.unsqueeze(place)
                self.numbers[output] = numbers.expand(output.shape)
                return


@dataclass(frozen=True, eq=False)
class Places:
    """The places of the queries and keys of an attention.

    Attributes:
        queries, keys (Tensor | None): Their numbers, ``(B, Q)`` and ``(B, K)``, where B counts windows too; None where
            they could not be followed.
    """

    queries: Optional[Tensor] = None
    keys: Optional[Tensor] = None

    @property
    def are_windows(self) -> bool:
        """Whether the queries are places only, in another order than row-major, or in several windows of an image."""
        if self.queries is None or not (self.queries >= 0).all():
            return False
        image, place, _ = cells(self.queries)
        in_order = (place == torch.arange(place.shape[1], device=place.device)).all()
        return len(place) != int(image.max()) + 1 or not bool(in_order)

    def by_image(self, probs: Tensor) -> Iterator[Tuple[Tensor, 'Places']]:
        """Yields the probabilities of the windows of each image, and their places."""
        assert self.queries is not None and self.keys is not None
        image = cells(self.queries)[0].amax(1)
        for number in range(int(image.max()) + 1):
            first = number * SIDE**2
            numbers = (own[image == number] - (own[image == number] > 0) * first for own in (self.queries, self.keys))
            yield probs[image == number], Places(*numbers)

    def sees(self, probs: Tensor) -> Tensor:
        """Says which keys each query sees in windows, ``(B, Q, K)``: the places in its window, on its side of a seam.

        A window has a seam where the grid was rolled, and its two sides lie apart. Keys on the other side count where
        they get more than a mask leaves. On the same side each counts, however little it gets.

        Args:
            probs (Tensor): ``(B, N_h, Q, K)``.
        """
        assert self.queries is not None and self.keys is not None
        whole = torch.cat([self.queries, self.keys], 1)
        _, place, grid = cells(whole)
        side = torch.zeros_like(place)
        for coordinate in (place // grid[1], place % grid[1]):
            ordered, order = coordinate.where(place >= 0, coordinate.amax(1, keepdim=True)).sort(1)
            gaps = ordered.diff(dim=1)
            step = gaps.where(gaps > 0, SIDE).amin()  # more than 1 in windows of tokens that lie apart
            seams = nn.functional.pad((gaps > step).cumsum(1), (1, 0))
            side = side * whole.shape[1] + seams.gather(1, order.argsort(1))
        of_queries, of_keys = side.split([self.queries.shape[1], self.keys.shape[1]], 1)
        near = of_queries[:, :, None] == of_keys[:, None]
        return (near | (probs.amax(1) > HIDDEN)) & (self.keys > 0)[:, None]

    def on_grid(self, probs: Tensor) -> Optional[Tuple[Tensor, Tuple[int, int]]]:
        """Returns probabilities between all places, row-major, ``(B, N_h, H·W, H·W)``, and (H, W).

        What is no place is left out, and between windows they are 0. It is None where the queries are not all places
        of a grid, once each, or the keys are of another grid.

        Args:
            probs (Tensor): ``(B, N_h, Q, K)``, in windows ``(B·windows, N_h, Q, K)``.
        """
        if self.queries is None or self.keys is None:
            return None
        (image, query, grid), (of_key, key, of_keys) = cells(self.queries), cells(self.keys)
        number, images = math.prod(grid), int(image.max()) + 1
        own = image.amax(1, keepdim=True)
        if not ((of_key == own) | (key < 0)).all() or not ((image == own) | (query < 0)).all():
            return None  # frames of a video attend to one another
        once = (image * number + query)[query >= 0].bincount(minlength=images * number) == 1
        if grid != of_keys or len(once) != images * number or not once.all():
            return None
        # The last row and column, which index −1 is, take what is no place.
        whole = probs.new_zeros(images, number + 1, number + 1, probs.shape[1])
        whole[image[:, :, None], query[:, :, None], key[:, None]] = probs.permute(0, 2, 3, 1)
        return whole[:, :-1, :-1].permute(0, 3, 1, 2), grid


def cells(numbers: Tensor) -> Tuple[Tensor, Tensor, Tuple[int, int]]:
    """Returns the image and the place in the grid, row-major, of each number, −1 beside it, and the grid (H, W).

    Only rows and columns with places count: after four patches have become one, every second is there.
    """
    whole = (numbers - 1).long()
    rows, row = (whole // SIDE % SIDE)[numbers > 0].unique(return_inverse=True)
    columns, column = (whole % SIDE)[numbers > 0].unique(return_inverse=True)
    place = torch.full_like(whole, -1)
    place[numbers > 0] = row * len(columns) + column
    return (whole // SIDE**2).clamp(min=0), place, (len(rows), len(columns))


def places_of_grid(images: int, grid: Tuple[int, ...], window: Optional[Window] = None) -> Places:
    """Returns the places of tokens that are a grid, row-major, of which those are queries where a window is."""
    numbers = new_numbers(torch.empty(images, 1, *grid, device='cpu'), None)[:, 0]
    queries = numbers
    for axis, side in enumerate(grid if window is not None else ()):
        place = window.queries(axis, side, 'cpu')
        queries = queries.index_select(axis + 1, place.clamp(0, side - 1)).movedim(axis + 1, -1)
        queries = queries.masked_fill((place < 0) | (place >= side), 0).movedim(-1, axis + 1)  # in the padding
    return Places(queries.flatten(1), numbers.flatten(1))


def new_numbers(grid: Tensor, before: Optional[Tensor], fraction: float = 0) -> Tensor:
    """Returns the numbers of the places of ``(B, C, …, H, W)``; frames of a video lie one below the other.

    The images are those of ``before``, the numbers of what the grid was computed from; or new ones, with a fraction.
    """
    sides = grid.shape[2:]
    place: Any = torch.arange(math.prod(sides[:-1]), device=grid.device, dtype=torch.float64)[:, None] * SIDE
    place = place + torch.arange(sides[-1], device=grid.device) + 1
    if before is None:
        image = torch.arange(len(grid), device=grid.device, dtype=torch.float64) * SIDE**2 + fraction
    else:
        last = before.flatten(1).amax(1)
        image = last // SIDE**2 * SIDE**2 + last % 1
    return (image.view(-1, *[1] * (grid.ndim - 1)) + place.view(sides)).expand(grid.shape)


def first_of(numbers: Optional[Tensor], may_differ: bool = False) -> Optional[Tensor]:
    """Returns the numbers of tokens ``(…, D)`` by those of their first channel; None where channels must not differ."""
    if numbers is None or not numbers.shape[-1]:
        return None
    first = numbers[..., :1]
    same = may_differ or not numbers.stride(-1) or ((numbers == first) | (numbers == 0)).all()
    return first[..., 0] if same else None


def is_one_of(func: Any, names: Set[str]) -> bool:
    """Says whether a function has one of some names, or changes a tensor in place as one of them does."""
    return func.__name__ in names or func.__name__.rstrip('_') in names


def axes_of(equation: Any, operands: Any) -> Tuple[List[str], str]:
    """Returns the axes of the operands of ``torch.einsum``, and those of its output, with letters for ``...``.

    It is ``([], '')`` where the equation is a list.

    Examples:
        >>> axes_of('...qk, ...kd -> ...qd', [torch.ones(2, 3, 5, 5), torch.ones(2, 3, 5, 4)])
        (['YZqk', 'YZkd'], 'YZqd')
    """
    if not isinstance(equation, str):
        return [], ''
    given, arrow, of_output = equation.replace(' ', '').partition('->')
    free = [letter for letter in string.ascii_uppercase if letter not in given]
    inputs, longest = [], ''
    for axes, own in zip(given.split(','), operands):
        dots = ''.join(free[len(free) - own.ndim + len(axes.replace('...', '')) :]) if '...' in axes else ''
        longest = max(longest, dots, key=len)
        inputs.append(axes.replace('...', dots))
    if not arrow:
        every = ''.join(inputs)
        of_output = '...' + ''.join(sorted(axis for axis in set(given) - set('.,') if every.count(axis) == 1))
    return inputs, of_output.replace('...', longest)


def flat(values: Any) -> List[Tensor]:
    """Returns the tensors among values and in their lists, at any depth."""
    found: List[Tensor] = []
    for own in values:
        found += flat(own) if isinstance(own, (list, tuple)) else [own] if isinstance(own, Tensor) else []
    return found
