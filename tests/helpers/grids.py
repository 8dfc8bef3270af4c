"""Attention over grids of tokens as a function of images, and linear functions of images as dense matrices."""

import itertools
import math

import torch

from attncnn_plugin.attention import QuadraticAttention

SHIFTS = list(itertools.product((-1, 0, 1), repeat=2))


def gaussian_layer(dim, centers, alpha=800.0, **settings):
    """A layer with heads of one width α at the given centres."""
    layer = QuadraticAttention(dim, len(centers), **settings)
    with torch.no_grad():
        layer.encoding.center.copy_(torch.tensor(centers))
        layer.encoding.sqrt_precision.fill_(math.sqrt(2 * alpha))
    return layer


def on_images(layer):
    """Attention over a grid, ``(B, H, W, D)``, as a function of images, ``(B, D, H, W)``."""
    return lambda x: layer(x.movedim(1, -1)).movedim(-1, 1)


def matrix(function, channels, size):
    """The matrix of a linear map of images, ``(C_out, Q, C_in, pixels)``, from its values on basis images."""
    dim = channels * math.prod(size)
    basis = torch.eye(dim, dtype=torch.float64).reshape(dim, channels, *size)
    with torch.no_grad():
        values = function(basis) - function(torch.zeros_like(basis[:1]))
    return values.flatten(2).permute(1, 2, 0).unflatten(2, (channels, -1))


def shift_operators(conv, size):
    """S_δ of a convolution's geometry: what it makes of an image with one-hot kernels, ``(K, Q, pixels)``."""
    settings = dict(padding_mode=conv.padding_mode, bias=False, dtype=torch.float64)
    single = type(conv)(1, 1, conv.kernel_size, conv.stride, conv.padding, conv.dilation, **settings)
    operators = []
    for position in itertools.product(*map(range, conv.kernel_size)):
        with torch.no_grad():
            single.weight.zero_()
            single.weight[(0, 0, *position)] = 1
        operators.append(matrix(single, 1, size)[0, :, 0])
    return torch.stack(operators)
