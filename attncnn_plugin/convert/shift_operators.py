"""The shift operators S_δ of a convolution, (S_δ x)_q = x_{q+δ}, and the maps of attention that they are compared with.

A convolution is Σ_δ S_δ ⊗ W_δ with the kernel's slices W_δ; position-only attention is Σ_h P_h ⊗ V_h (Cordonnier
et al. 2020, section 3).
"""

import math
from typing import Optional, Tuple

import torch
from torch import Tensor, nn

from ..attention.attention_layer import AttentionLayer
from ..attention.window import Window


def targets(window: Window, size: Tuple[int, ...]) -> Tensor:
    """Returns the pixel that each query sees at each kernel position, ``(K, Q)``, −1 in zero padding: S_δ as indices.

    Examples:
        >>> window = Window.of(torch.nn.Conv1d(1, 1, 3, padding=1))
        >>> targets(window, (4,)).tolist()
        [[-1, 0, 1, 2], [0, 1, 2, 3], [1, 2, 3, -1]]
    """
    queries = [window.queries(axis, n, 'cpu') for axis, n in enumerate(size)]
    pixel = torch.arange(1.0, 1 + math.prod(size), dtype=torch.float64, device='cpu')  # from 1: 0 is padding
    padded = window.pad(pixel.reshape(1, 1, *size))[0, 0].long() - 1
    query = torch.cartesian_prod(*queries).reshape(-1, window.ndim)
    before = torch.tensor([window.padding_of(axis, n)[0] for axis, n in enumerate(size)], device='cpu')
    place = window.shifts()[:, None] + query + before  # q + δ in the padded image, (K, Q, ndim)
    return padded[place.unbind(-1)]


def interior_queries(window: Window, size: Tuple[int, ...]) -> Tensor:
    """Returns whether each query of an image has its whole window inside, ``(Q,)``."""
    axes = [window.interior(axis, n) for axis, n in enumerate(size)]
    return torch.cartesian_prod(*axes).reshape(-1, len(axes)).all(1)


def inverse_of_shifts(target: Tensor) -> Tensor:
    """Returns the pseudo-inverse of the matrix of all ⟨S_δ, S_δ'⟩, ``(K, K)``, which count queries of equal targets."""
    gram = torch.stack([((target == row) & (row >= 0)).sum(1) for row in target]).double()
    return torch.linalg.pinv(gram, hermitian=True)


def fit_shifts(probs: Tensor, target: Tensor, inverse: Optional[Tensor] = None) -> Tensor:
    """Returns the c that minimize ‖P_h − Σ_δ c_{h,δ} S_δ‖_F for each head, ``(N_h, K)``; the smallest of several.

    P is ``(N_h, Q, pixels)``, float64, S as of :func:`targets`, and ``inverse`` that of :func:`inverse_of_shifts`.
    """
    index = target.clamp(min=0).expand(len(probs), -1, -1).mT
    product = (probs.gather(2, index) * (target >= 0).T).sum(1)  # ⟨P_h, S_δ⟩, (N_h, K), sums over queries
    return product @ (inverse_of_shifts(target) if inverse is None else inverse)


def check_position_only(layer: nn.Module) -> None:
    """Raises TypeError for no attention of this package, ValueError for attention that depends on its input."""
    if not isinstance(layer, AttentionLayer):
        raise TypeError(
            f'layer is a {type(layer).__name__}, but only attention layers of this package have heads with '
            'probabilities of positions: head_importance and attention_maps take other attention'
        )
    if layer.depends_on_content:
        raise ValueError(
            f'the probabilities of layer, {type(layer).__name__}({layer.extra_repr()}), depend on the input: only '
            'those of position-only attention do not'
        )
