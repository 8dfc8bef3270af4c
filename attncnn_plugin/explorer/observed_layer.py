"""What the page holds of the attention of another library's transformer: its probabilities, as the model computes them.

They cannot be computed from fewer terms, as those of this package's layers can: queries and keys may be normalized or
rotated, and scores have biases, masks and scales.
"""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from ..analysis.transformer_attention import TokenPlaces
from .layer_grid import LayerGrid
from .stream import Quantized, rounded_up

MASKED = 1e-20  # of the largest probability: Swin's masks take 100 off a score, e^−100 = 4e-44


class ObservedLayer:
    """The probabilities of a layer for some images.

    Args:
        name (str): The name of the layer in the model.
        label (str): What the page calls it.
        probs (Tensor): As the model computes them, ``(B, N_h, N, N)``, of windows ``(B·windows, N_h, M, M)``.
        places (TokenPlaces): Where the tokens lie.
        others (Sequence[str]): Names of the tokens beside the patches.

    Attributes:
        size (tuple[int, int]): Height H and width W of the grid of patches.
        num_heads (int): Number of heads N_h.
        parts (dict[str, list[str]]): The one part of the layer, ``attention``, see :mod:`.stream`; none without heads.
    """

    def __init__(self, name: str, label: str, probs: Tensor, places: TokenPlaces, others: Sequence[str]) -> None:
        self.size, self.num_heads = places.grid, probs.shape[1]
        self.parts: Dict[str, List[str]] = {'attention': ['probabilities']} if self.num_heads else {}
        self._name, self._label, self._others = name, label, list(others)
        self._windows: Optional[np.ndarray] = None
        self._masked: Optional[np.ndarray] = None
        patches, to_others = (
            by_token(probs.float(), places.prefix)
            if places.windows is None
            else by_windows(probs.float(), places.windows.cpu(), places.grid[0] * places.grid[1])
        )
        self._to_others = to_others.clone()  # no view of all probabilities
        self._largest = patches.amax(-1)
        self._relative = patches / self._largest.clamp(min=torch.finfo(patches.dtype).tiny)[..., None]
        if places.windows is not None:
            self._windows = places.windows.cpu().numpy().astype(np.int16)
            self._masked = (self._relative < MASKED).all(1).all(0).numpy().astype(np.uint8)

    def header(self, step: float, with_errors: bool) -> Dict[str, Any]:
        """The layer in the header of :mod:`.stream`.

        Args:
            step (float): The step of probabilities, relative to the largest one of their query.
            with_errors (bool): Whether to measure the errors of the probabilities, which are 0 otherwise.
        """
        return {
            'label': self._label,
            'name': self._name,
            **LayerGrid.of_tokens(self.size).header(),
            'heads': self.num_heads,
            'centers': None,
            'others': self._others,
            'windows': self._windows,
            'masked': self._masked,
            'parts': {part: self._part(terms, step, with_errors) for part, terms in self.parts.items()},
            'arrays': {},
            'token_arrays': [],
        }

    def _part(self, terms: List[str], step: float, with_errors: bool) -> Dict[str, Any]:
        relative = Quantized(self._relative.numpy(), np.full(len(self._relative), step, np.float32))
        errors = np.zeros(self.num_heads)
        if with_errors:
            errors = np.abs(relative.rounded - relative.values).max(axis=(0, 2, 3))
        return {
            'terms': terms,
            'errors': [rounded_up(error) for error in errors.tolist()],
            'relative': relative,
            'largest': self._largest.numpy(),
            'to_others': self._to_others.numpy(),
        }


def by_token(probs: Tensor, prefix: int) -> Tuple[Tensor, Tensor]:
    """What all tokens give to patches, and to the tokens before them.

    Args:
        probs (Tensor): ``(B, N_h, N, N)``.
        prefix (int): Number of tokens before the patches.

    Returns:
        tuple[Tensor, Tensor]: ``(B, N_h, N, patches)`` and ``(B, N_h, N, prefix)``.
    """
    return probs[..., prefix:], probs[..., :prefix]


def by_windows(probs: Tensor, windows: Tensor, patches: int) -> Tuple[Tensor, Tensor]:
    """What patches give to those of their window, 0 for padding, and to padding, where there is some.

    Args:
        probs (Tensor): ``(B·windows, N_h, M, M)``.
        windows (Tensor): The numbers of the patches in each window, ``(windows, M)``, ``patches`` for padding.
        patches (int): Number of patches.

    Returns:
        tuple[Tensor, Tensor]: ``(B, N_h, patches, M)``, and ``(B, N_h, patches, 1)``, or with 0 entries.
    """
    where = windows.flatten().argsort(stable=True)[:patches]  # padding has the largest number
    queries = probs.unflatten(0, (-1, len(windows))).transpose(1, 2).flatten(2, 3)[:, :, where]
    padding = (windows == patches)[where // windows.shape[1]]  # (patches, M)
    if not padding.any():
        return queries, queries[..., :0]
    return queries.masked_fill(padding, 0), (queries * padding).sum(-1, keepdim=True)
