"""The shift operators S_δ of a convolution, ``(S_δ x)_q = x_{q+δ}``, and which of them heads can express.

Heads with maps P_h and matrices V_h are Σ_h P_h ⊗ V_h, a convolution is Σ_δ S_δ ⊗ W_δ with the kernel's slices W_δ
(Cordonnier et al. 2020, section 3 and Lemma 3). Where each S_δ is a combination Σ_h Φ_hδ P_h of the maps,
V_h = Σ_δ Φ_hδ W_δ makes them equal: C20's W^SA = W^conv Φ.
"""

import math
from dataclasses import dataclass
from typing import List, Optional, Tuple

import torch
from torch import Tensor, nn

from ..attention.attention_layer import AttentionLayer
from ..attention.window import Sizes, Window, check_choice, per_axis, same_window

TOLERANCE = 1e-6  # of residuals, and of singular values relative to the largest one
CHUNK_ELEMENTS = 2**18  # entries of attention maps that are copied at once, 2 MiB of float64


@dataclass(frozen=True)
class Expressibility:
    """The shifts of a kernel that lie in the span of a layer's attention maps.

    The layer can be every convolution whose weights are 0 at the missing shifts. A single one whose weights are not can
    be in the span all the same.

    Attributes:
        kernel_size (tuple[int, int]): The kernel size.
        expressible, missing (list[tuple[int, int]]): The (row, column) shifts δ = k − q that can be expressed, with a
            residual of at most 1e-6, and that cannot.
        residual (list[float]): Distance of S_δ from the span of the heads' maps P_h over all chosen queries at once,
            relative to ‖S_δ‖_F, 0 to 1, of each shift of the kernel, row by row.
        error (float): Relative error of the attention that comes nearest to a random kernel, whose weights have
            variance 1: the root of the mean of ‖Σ_δ w_δ E_δ‖² over that of ‖Σ_δ w_δ S_δ‖², where E_δ is what the span
            leaves of S_δ. With N_h heads it is at least √(1 − N_h/K) for K positions.
        worst (float): The largest relative error over all kernels, 1 with fewer heads than positions. The heads span
            every kernel to this error.
        rank (int): Rank of the heads' maps, scaled to norm 1, over all chosen queries at once: the number of singular
            values above 1e-6 of the largest.
    """

    kernel_size: Tuple[int, ...]
    expressible: List[Tuple[int, int]]
    missing: List[Tuple[int, int]]
    residual: List[float]
    error: float
    worst: float
    rank: int

    def __str__(self) -> str:
        random, every = (f'{100 * error if error > TOLERANCE else 0:.3g}%' for error in (self.error, self.worst))
        words = f'the heads span a random {"x".join(map(str, self.kernel_size))} kernel to within {random}, '
        words += f'any to within {every}'
        named = ', '.join(map(str, self.expressible)) if self.missing else ''
        return f'{words}; exactly the shifts {named}' if named else words


@torch.no_grad()
def expressible_shifts(layer: AttentionLayer, kernel_size: Sizes, size: Sizes, queries: str = 'all') -> Expressibility:
    """Finds the shifts of a kernel that a layer can express, whatever its value matrix (C20, Lemma 3 and appendix D).

    As V_h is the same at every query, all kernels can be expressed if and only if each S_δ, over all queries at once,
    is in the span of the P_h. C20 asks the same query by query, with coefficients that may change from query to query:
    necessary, not sufficient.

    Args:
        layer (AttentionLayer): Attention by position over a grid, or an ``ImageAttention`` over two axes whose outputs
            are those of the pixels, one each.
        kernel_size (int | Sequence[int]): Size of the kernel, stride 1, ``padding='same'``.
        size (int | Sequence[int]): Height and width of the grid in tokens.
        queries (str): The queries at which the layer has to be the convolution: ``'interior'``, whose whole window lies
            inside the grid, or ``'all'``, with zero padding: S_δ is 0 where q + δ is outside, while a hard quadratic
            head attends to the nearest pixel there. Defaults to ``'all'``.

    Raises:
        TypeError: ``layer`` is no attention of this package.
        ValueError: The scores of ``layer`` depend on content; it has other queries than the pixels; ``queries`` is
            unknown; no window lies inside the grid, with ``'interior'``.

    Examples:
        Heads at five of the nine shifts of a 3x3 kernel cannot express the other four:

        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=2, num_heads=5)
        >>> layer.encoding.center.data = torch.tensor([[-1.0, 0.0], [0.0, -1.0], [0.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> layer.encoding.sqrt_precision.data = torch.full((5,), 40.0)  # hard heads
        >>> found = expressible_shifts(layer, 3, size=(6, 8), queries='interior')
        >>> found.missing
        [(-1, -1), (-1, 1), (1, -1), (1, 1)]
        >>> print(str(found).split(';')[0])  # of a random kernel, √(4/9) is left
        the heads span a random 3x3 kernel to within 66.7%, any to within 100%
    """
    check_layer(layer)
    size, own = per_axis('size', size, 2), layer.window or same_window((1, 1))
    if own.ndim != 2:
        raise ValueError(f'layer has {own.ndim} axes of pixels, but a kernel of two is asked for')
    for axis, n in enumerate(size):
        if not torch.equal(own.queries(axis, n, 'cpu'), torch.arange(n, device='cpu')):
            raise ValueError(
                f'layer has {own.num_queries(axis, n)} queries along axis {axis} of {n} pixels, {own}: one output for '
                "each query is needed, that of each pixel, as with stride 1 and padding='same'"
            )
    return expressible_shifts_of_maps(layer.exact_attention_probs(size), kernel_size, size, queries)


@torch.no_grad()
def expressible_shifts_of_maps(probs: Tensor, kernel_size: Sizes, size: Sizes, queries: str = 'all') -> Expressibility:
    """Finds the shifts that attention maps span, ``(N_h, H*W, H*W)`` on the CPU, as :func:`expressible_shifts` does."""
    window, size = same_window(per_axis('kernel_size', kernel_size, 2)), per_axis('size', size, 2)
    check_choice('queries', queries, ('all', 'interior'))
    probs, target = probs.double(), targets(window, size)
    inside = (target >= 0).all(0)
    chosen = (inside if queries == 'interior' else torch.ones_like(inside)).nonzero()[:, 0]
    if not len(chosen):
        raise ValueError(
            f'size={size} has no query with the whole window inside, kernel_size={window.kernel_size}: give a larger '
            "size, or queries='all'"
        )
    maps, shifts = _triangle(probs, target, chosen).split([len(probs), len(target)], dim=1)
    norms = maps.norm(dim=0)
    basis, singular, _ = torch.linalg.svd(maps / torch.where(norms > 0, norms, 1.0), full_matrices=False)
    span = basis[:, singular > TOLERANCE * singular[:1]]  # a head can see only padding
    # The S_δ are orthogonal. ‖S_δ‖² counts queries: it is 0 for a shift that leaves the grid from all.
    lengths, left = shifts.norm(dim=0), shifts - span @ (span.T @ shifts)
    error, left = (left.norm() / lengths.norm()).item(), left / lengths.clamp_min(1)
    worst, residual = torch.linalg.matrix_norm(left, 2).item(), left.norm(dim=0)
    near = residual <= TOLERANCE
    expressible, missing = ([(row, column) for row, column in window.shifts()[some].tolist()] for some in (near, ~near))
    return Expressibility(window.kernel_size, expressible, missing, residual.tolist(), error, worst, span.shape[1])


def _triangle(probs: Tensor, target: Tensor, queries: Tensor) -> Tensor:
    """Returns R of the QR decomposition of [P_h | S_δ] at some queries: the same inner products in few rows."""
    num_heads, _, pixels = probs.shape
    columns = num_heads + len(target)
    triangle = probs.new_zeros(0, columns)
    for some in queries.split(max(1, CHUNK_ELEMENTS // (pixels * columns))):
        shifts = probs.new_zeros(len(some), pixels + 1, len(target))  # pixel 0 is the padding
        shifts.scatter_(1, target[:, some].T[:, None] + 1, 1.0)
        rows = torch.cat([probs[:, some].permute(1, 2, 0), shifts[:, 1:]], dim=2).flatten(0, 1)
        triangle = torch.linalg.qr(torch.cat([triangle, rows]), mode='r').R
    return triangle


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


def check_layer(layer: nn.Module) -> None:
    """Raises TypeError for no attention of this package."""
    if not isinstance(layer, AttentionLayer):
        raise TypeError(
            f'layer is a {type(layer).__name__}, but only attention layers of this package have heads with '
            'probabilities of positions: head_importance and attention_maps take other attention'
        )
