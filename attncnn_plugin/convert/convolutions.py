"""The kernel, the bias and the window by which a convolution of any class computes."""

import copy
import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Tuple, Union, cast

import torch
from timm.layers import Conv2dSame
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from ..attention.precision import full_precision
from ..attention.window import CONVOLUTIONS, CONVOLVE, SameWindow, Window, same_window

Convolution = Union[nn.Conv1d, nn.Conv2d, nn.Conv3d]
ROUNDING = 1e-9  # of outputs in float64, relative to the largest


@dataclass(frozen=True, eq=False)
class Computed:
    """What a convolution computes: a kernel that a window moves over the image.

    Attributes:
        window (Window): Where the outputs are, and how the image is padded.
        weight (Tensor): The kernel, ``(C_out, C_in/groups, *kernel_size)``; of weights that are standardized, after it.
        bias (Tensor | None): ``(C_out,)``.
        groups (int): Groups of channels.
        own (bool): Whether these are the convolution's own ``weight`` and ``bias``, and nothing is computed of them.
    """

    window: Window
    weight: Tensor
    bias: Optional[Tensor]
    groups: int
    own: bool

    @property
    def in_channels(self) -> int:
        return self.weight.shape[1] * self.groups

    def __call__(self, x: Tensor) -> Tensor:
        """Maps images ``(B, C_in, *size)`` to the output."""
        window, own = self.window, (self.weight, self.bias)
        return CONVOLVE[window.ndim - 1](window.pad(x), *own, window.stride, 0, window.dilation, self.groups)


@torch.no_grad()
def computed(conv: Any) -> Computed:
    """Finds what a convolution of any class computes, by running it.

    A copy with random weights runs on small random images, in float64 on the CPU, in evaluation mode and in training.
    Its outputs must be those of the window that the attributes describe, or of the same window padded to ⌈size/stride⌉
    outputs (timm's ``Conv2dSame``), with the weights that the function of PyTorch was called with.

    Raises:
        TypeError: ``conv`` is no convolution, has no weights yet, not real ones, or hooks; its weight is frozen, but
            not other parameters, such as an adapter's; or it computes something else than its attributes describe.
        ValueError: An attribute is no size.
    """
    kind = f'conv is a {type(conv).__name__}'
    if not isinstance(conv, CONVOLUTIONS):
        raise TypeError(f'{kind}, but only nn.Conv1d, nn.Conv2d and nn.Conv3d can be converted')
    if any(map(is_lazy, conv.parameters())):
        raise TypeError(f'{kind} without weights yet: run it once on an input first')
    if conv._forward_pre_hooks or conv._forward_hooks:
        raise TypeError(f'{kind} with forward hooks, such as old-style weight normalization: remove them first')
    if not conv.weight.is_floating_point():
        raise TypeError(f'the weights of conv are {conv.weight.dtype}, but attention needs real floating numbers')
    trained = [name for name, own in conv.named_parameters() if own.requires_grad and name not in ('weight', 'bias')]
    if trained and isinstance(conv.weight, nn.Parameter) and not conv.weight.requires_grad:
        raise TypeError(f'{kind} with a frozen weight, but {trained[0]} is trained: merge it into the weight first')
    window, generator = Window.of(conv), torch.Generator('cpu').manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64, device='cpu')
    kept = {id(buffer) for buffer in conv.buffers() if not buffer.is_meta}
    in_float64 = partial(moved_copy, device='cpu', dtype=torch.float64)
    trial = copy_with(conv, lambda tensor: in_float64(tensor) if id(tensor) in kept else draw(tensor.shape))
    # Two images that hold the window and its padding: of multiples of the stride, and of one pixel more.
    axes = zip(window.kernel_size, window.stride, window.dilation, window.padding)
    least = [s * math.ceil(max(d * (k - 1) + 1 + s, *(n + 2 for n in padding)) / s) for k, s, d, padding in axes]
    images = [draw((1, conv.weight.shape[1] * conv.groups, *(n + more for n in least))) for more in (0, 1)]
    drawn: List[Any] = [None if own is None else own.detach().clone() for own in (trial.weight, trial.bias)]
    runs = list(itertools.product((False, True), images))
    outputs, (weight, *_), (bias, *_) = zip(*(_run(trial, x, training) for training, x in runs))
    own = all(a is b is None or torch.equal(a, b) for a, b in zip(drawn, (weight, bias)))  # of before it ran
    same = SameWindow(window.kernel_size, window.stride, window.dilation, (), 'zeros')
    for chosen in (window, same):
        what = Computed(chosen, weight, bias, conv.groups, own)
        if all(_near(what(x), output) for (_, x), output in zip(runs, outputs)):
            break
    else:
        names = ('stride', 'padding', 'dilation', 'groups', 'padding_mode')
        raise TypeError(
            f'{kind} that computes something else than the convolution of its attributes, in evaluation mode or in '
            f'training, {", ".join(f"{name}={getattr(conv, name)!r}" for name in names)}: its forward pass or one of '
            'them was replaced; convert a plain convolution with the weights and the padding that it amounts to'
        )
    found: Any = conv.weight, conv.bias
    if not own and not conv.weight.is_meta:
        _, *found = _run(copy_with(conv, in_float64), images[0], False)
    weight, bias = (None if x is None else x.detach().to(conv.weight) for x in found)
    return Computed(chosen, cast(Tensor, weight), bias, conv.groups, own)


def copy_with(conv: Any, new: Callable[[Tensor], Tensor]) -> Any:
    """Copies a convolution, and each of its parameters and buffers by a function."""
    known: Dict[int, Any] = {id(buffer): new(buffer) for buffer in conv.buffers()}
    for parameter in conv.parameters():
        known[id(parameter)] = own = nn.Parameter(new(parameter), requires_grad=parameter.requires_grad)
        vars(own).update(vars(parameter))
    for module in conv.modules():  # plain tensors are shared: deepcopy refuses those that were computed
        known.update({id(value): value for value in vars(module).values() if isinstance(value, Tensor)})
    return copy.deepcopy(conv, known)


def moved_copy(x: Tensor, device: Any, dtype: torch.dtype) -> Tensor:
    """Copies a tensor to a device, unless it has no values, and to a dtype, if its numbers are floating-point."""
    dtype = dtype if x.is_floating_point() else x.dtype
    return x.detach().to(x.device if x.is_meta else device, dtype, copy=True)


class _Calls(TorchFunctionMode):
    """Notes weight and bias of each convolution that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: List[Tuple[Tensor, Optional[Tensor]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CONVOLVE:
            named = {**dict(zip(('input', 'weight', 'bias'), args)), **(kwargs or {})}
            self.found.append((named['weight'], named.get('bias')))
        return func(*args, **(kwargs or {}))


def _run(trial: Any, x: Tensor, training: bool) -> Tuple[Any, Tensor, Optional[Tensor]]:
    """Runs a convolution in a mode; returns its output, and the weight and bias it was computed with."""
    for module in trial.modules():
        module.training = training
    try:
        with torch.random.fork_rng([]), full_precision('cpu'), _Calls() as calls:
            output = trial(x)
        ((weight, bias),) = calls.found
    except Exception as error:  # whatever its code raises
        raise TypeError(
            f'conv is a {type(trial).__name__} that computes no single convolution of an image of {tuple(x.shape[2:])} '
            f'pixels in float64 on the CPU: {type(error).__name__}: {error}'
        ) from error
    return output, weight, bias


def _near(expected: Tensor, output: Any) -> bool:
    same_shape = isinstance(output, Tensor) and output.shape == expected.shape
    return same_shape and bool((output - expected).abs().max() <= ROUNDING * expected.abs().max())


def convolution_with(like: Computed) -> Convolution:
    """Builds the convolution of PyTorch, or timm's ``Conv2dSame``, that computes this, with these tensors.

    Raises:
        ValueError: No convolution has such a window.
    """
    window = like.window
    kind: Any = CONVOLUTIONS[window.ndim - 1]
    options: Dict[str, Any] = dict(dilation=window.dilation, groups=like.groups, bias=like.bias is not None)
    if isinstance(window, SameWindow):
        kind, known = Conv2dSame, window.ndim == 2
    else:
        options.update(padding=window.padding_argument, padding_mode=window.padding_mode)
        same = same_window(window.kernel_size, window.padding_mode, window.dilation)
        known = options['padding'] != 'same' or window == same
    if not known:
        raise ValueError(
            f'the window of layer is padded by {window.padding} with stride {window.stride}, which no convolution has: '
            "it pads both sides alike, or with stride 1 as padding='same'"
        )
    arguments = like.in_channels, len(like.weight), window.kernel_size, window.stride
    conv = kind(*arguments, device='meta', **options)
    conv.weight = nn.Parameter(like.weight)
    conv.bias = None if like.bias is None else nn.Parameter(like.bias)
    return conv


def block_norms(slices: Tensor, groups: int) -> Tensor:
    """Returns the spectral norm of each of N slices, ``(C_out, C_in/groups, N)``: the largest of its groups.

    ‖W‖₂² is the largest eigenvalue of WWᵀ and of WᵀW, which take less time than the singular values of W.
    """
    scale = slices.abs().amax().clamp(min=torch.finfo(slices.dtype).tiny)  # squares neither overflow nor vanish
    blocks = (slices / scale).unflatten(0, (groups, -1)).movedim(-1, 0)  # (N, group, out, in)
    if blocks.shape[-2] > blocks.shape[-1]:
        blocks = blocks.mT
    return scale * torch.linalg.eigvalsh(blocks @ blocks.mT)[..., -1].clamp(min=0).sqrt().amax(1)
