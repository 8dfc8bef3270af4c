"""The shift operators S_δ of a convolution, (S_δ x)_q = x_{q+δ}, and the maps of attention that they are compared with.

A convolution is Σ_δ S_δ ⊗ W_δ with the kernel's slices W_δ; position-only attention is Σ_h P_h ⊗ V_h (Cordonnier
et al. 2020, section 3).
"""

import math
from typing import Optional, Tuple

import torch
from torch import Tensor, nn

from ..attention.attention_layer import AttentionLayer
from ..attention.window import Window, shown

CHUNK_ELEMENTS = 2**18  # entries of attention maps that are copied at once, 2 MiB of float64


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


def triangle(probs: Tensor, target: Tensor, queries: Tensor, above: Optional[Tensor] = None) -> Tensor:
    """Returns R of the QR decomposition of [P_h | S_δ] at some queries: the same inner products in few rows.

    With R of other queries, ``above``, it is that of all of them together.
    """
    num_heads, _, pixels = probs.shape
    columns = num_heads + len(target)
    triangle = probs.new_zeros(0, columns) if above is None else above
    for some in queries.split(max(1, CHUNK_ELEMENTS // (pixels * columns))):
        shifts = probs.new_zeros(len(some), pixels + 1, len(target))  # pixel 0 is the padding
        shifts.scatter_(1, target[:, some].T[:, None] + 1, 1.0)
        rows = torch.cat([probs[:, some].permute(1, 2, 0), shifts[:, 1:]], dim=2).flatten(0, 1)
        triangle = torch.linalg.qr(torch.cat([triangle, rows]), mode='r').R
    return triangle


def least_squares(maps: Tensor, shifts: Tensor, tolerance: float) -> Tuple[Tensor, int, float]:
    """Returns Φ of the least ‖S − PΦ‖, the number of directions that it uses, and the condition number of P."""
    norms = maps.norm(dim=0)
    norms = torch.where(norms > 0, norms, 1.0)  # a head can see only padding
    left, singular, right = torch.linalg.svd(maps / norms, full_matrices=False)
    kept = singular > tolerance * singular[:1]
    coefficients = right[kept].T @ ((left[:, kept].T @ shifts) / singular[kept, None]) / norms[:, None]
    least = singular[-1].item() if 0 < maps.shape[1] == len(singular) else 0.0
    return coefficients, int(kept.sum()), singular[0].item() / least if least > 0 else float('inf')


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


def check_same_queries(layer: AttentionLayer, window: Window, size: Tuple[int, ...]) -> None:
    """Raises ``ValueError`` for a layer whose queries in an image of ``size`` are not the outputs of a window."""
    own, ndim = layer.window, 2 if layer.window is None else layer.window.ndim
    if window.ndim != ndim:
        raise ValueError(f'layer has {ndim} axes of pixels, but the convolution has {window.ndim}')
    for axis, n in enumerate(size):
        wanted = window.queries(axis, n, 'cpu')
        queries = torch.arange(n, device='cpu') if own is None else own.queries(axis, n, 'cpu')
        if not torch.equal(queries, wanted):
            raise ValueError(
                f'layer has {len(queries)} queries from pixel {queries[0]} on along axis {axis} of {n} pixels, but the '
                f'convolution, {window}, has {len(wanted)} from pixel {wanted[0]} on: one output for each query is '
                "needed, for attention over a grid with stride 1 and padding='same'"
            )


def chosen_queries(window: Window, size: Tuple[int, ...], queries: str, tolerance: float) -> Tensor:
    """Returns the indices of all queries, or of those in the interior; raises ``ValueError`` for wrong arguments."""
    if queries not in ('all', 'interior'):
        raise ValueError(f"queries={shown(queries)} is unknown: choose 'all' or 'interior'")
    if not 0 < tolerance < 1:
        raise ValueError(f'tolerance={tolerance} must be between 0 and 1')
    inside = interior_queries(window, size)
    chosen = (inside if queries == 'interior' else torch.ones_like(inside)).nonzero()[:, 0]
    if not len(chosen):
        raise ValueError(
            f'size={size} has no query with the whole window inside, kernel_size={window.kernel_size} and '
            f"dilation={window.dilation}: give a larger size, or queries='all'"
        )
    return chosen
