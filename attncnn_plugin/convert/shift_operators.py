"""The shift operators S_δ of a convolution, (S_δ x)_q = x_{q+δ}, and the maps of attention that they are compared with.

A convolution is Σ_δ S_δ ⊗ W_δ with the kernel's slices W_δ; attention by positions alone is Σ_h P_h ⊗ V_h (Cordonnier
et al. 2020, section 3).
"""

import copy
import math
from typing import Sequence, Tuple

import torch
from torch import Tensor, nn

from ..attention.attention_layer import AttentionLayer
from ..attention.content_images import ContentImageAttention
from ..attention.window import Window


def targets(window: Window, size: Tuple[int, ...]) -> Tensor:
    """Returns the pixel that each query of an image sees at each kernel position: the shift operators S_δ as indices.

    Args:
        window (Window): The window of the convolution.
        size (tuple[int, ...]): Size of the image along each axis.

    Returns:
        Tensor: Row-major indices, ``(K, Q)``, −1 in zero padding.

    Raises:
        ValueError: The image is too small for the window or for its padding mode.

    Examples:
        >>> window = Window.of(torch.nn.Conv1d(1, 1, 3, padding=1))
        >>> targets(window, (4,)).tolist()
        [[-1, 0, 1, 2], [0, 1, 2, 3], [1, 2, 3, -1]]
    """
    paddings = [window.padding_of(axis, n) for axis, n in enumerate(size)]
    for axis, (n, padding) in enumerate(zip(size, paddings)):
        least = {'reflect': max(padding) + 1, 'circular': max(padding)}.get(window.padding_mode, 1)
        if n < least:
            raise ValueError(
                f'size={size} is too small for padding_mode={window.padding_mode!r} with {max(padding)} pixels of '
                f'padding: axis {axis} needs {least} pixels at least'
            )
    queries = [window.queries(axis, n) for axis, n in enumerate(size)]
    pixel = torch.arange(1.0, 1 + math.prod(size), dtype=torch.float64)  # from 1: 0 is padding
    padded = window.pad(pixel.reshape(1, 1, *size))[0, 0].long() - 1
    query = torch.cartesian_prod(*queries).reshape(-1, window.ndim)
    before = torch.tensor([before for before, _ in paddings])
    place = window.shifts()[:, None] + query + before  # q + δ in the padded image, (K, Q, ndim)
    return padded[place.unbind(-1)]


def interior_queries(window: Window, size: Tuple[int, ...]) -> Tensor:
    """Returns whether each query of an image has its whole window inside, ``(Q,)``.

    Args:
        window (Window): The window of the convolution.
        size (tuple[int, ...]): Size of the image along each axis.

    Examples:
        >>> window = Window.of(torch.nn.Conv1d(1, 1, 3, padding=1))
        >>> interior_queries(window, (4,)).tolist()
        [False, True, True, False]
    """
    shifts = window.shifts()
    first, last = shifts[0], shifts[-1]
    inside = torch.ones(1, dtype=torch.bool)
    for axis, n in enumerate(size):
        query = window.queries(axis, n)
        inside = (inside[:, None] & (query + first[axis] >= 0) & (query + last[axis] < n)).flatten()
    return inside


def fit_shifts(probs: Tensor, target: Tensor) -> Tensor:
    """Returns the coefficients c that minimize ‖P_h − Σ_δ c_{h,δ} S_δ‖_F for each head.

    Args:
        probs (Tensor): P in float64, ``(N_h, Q, pixels)``.
        target (Tensor): S, see :func:`targets`, ``(K, Q)``.

    Returns:
        Tensor: c, ``(N_h, K)``; the smallest where several fit equally well.

    Examples:
        >>> target = targets(Window.of(torch.nn.Conv1d(1, 1, 3, padding=1)), (4,))
        >>> uniform = torch.full((1, 4, 4), 0.25, dtype=torch.float64)
        >>> fit_shifts(uniform, target).tolist()
        [[0.25, 0.25, 0.25]]
    """
    inside = target >= 0
    # The normal equations. Both sides are sums over queries: ⟨S_δ, S_δ'⟩ counts those with the same target.
    gram = torch.stack([((target == row) & (row >= 0)).sum(1) for row in target]).double()
    index = target.clamp(min=0).expand(len(probs), -1, -1).mT
    product = (probs.gather(2, index) * inside.T).sum(1)  # ⟨P_h, S_δ⟩, (N_h, K)
    return product @ torch.linalg.pinv(gram, hermitian=True)


def check_position_only(layer: nn.Module) -> None:
    """Refuses a layer that is not attention by positions alone.

    Raises:
        TypeError: ``layer`` is no attention of this package.
        ValueError: Its probabilities depend on its input.
    """
    if not isinstance(layer, AttentionLayer):
        raise TypeError(
            f'layer is a {type(layer).__name__}, but only attention layers of this package have heads with '
            'probabilities of positions'
        )
    if layer.depends_on_content:
        raise ValueError(
            f'the probabilities of layer, {type(layer).__name__}({layer.extra_repr()}), depend on the input: only '
            "those of attention by positions alone do not, of a ContentAttention with terms=('vr',)"
        )


def ignores_content(layer: nn.Module) -> bool:
    """Returns whether attention by content has no queries or no keys yet: all images have the same probabilities."""
    return isinstance(layer, ContentImageAttention) and not (layer.query.weight.any() and layer.key.weight.any())


@torch.no_grad()
def exact_probs(layer: AttentionLayer, size: Sequence[int]) -> Tensor:
    """Returns the probabilities of attention that does not see content (yet), ``(N_h, Q, pixels)``, float64."""
    if not isinstance(layer, ContentImageAttention):
        return layer.exact_attention_probs(size)
    exact = copy.deepcopy(layer).cpu().double()
    image = torch.zeros(1, layer.in_channels, *size, dtype=torch.float64)
    return exact.attention_scores(image)[0, ..., :-1].exp()  # without the null key
