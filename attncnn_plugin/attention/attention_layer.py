"""The interface of all attention layers: their scores, probabilities and values, head by head."""

import copy
import math
from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from .positions import GaussianHeads
from .precision import at_least_float32, full_precision
from .softmax import softmax
from .window import Window


class AttentionLayer(nn.Module):
    """Attention of queries to keys, both of them the pixels or patches of an image.

    Scores are defined up to a constant for each query. A *null key* is one more key, after those of the grid, that
    stands for what lies outside of the grid; the methods that return probabilities leave it out, so that those of a
    query add up to less than 1.

    Attributes:
        num_heads (int): Number of heads N_h.
        window (Window | None): Where the queries are and how the image is padded, for attention instead of a
            convolution; None for attention over a grid, whose queries are its tokens.
        depends_on_content (bool): Whether the probabilities depend on the input.
        has_position_scores (bool): Whether a term of the scores depends only on position.
        padding_mode (str): What a head sees at a shift that leaves the grid, as the padding of a convolution that does
            the same: a hard Gaussian head the nearest pixel inside, ``'replicate'``, a null key ``'zeros'``.
    """

    num_heads: int
    window: Optional[Window] = None
    depends_on_content = False
    has_position_scores = True

    @property
    def padding_mode(self) -> str:
        return 'replicate'

    def gaussian_heads(self) -> Optional[GaussianHeads]:
        """Returns centres and shapes of Gaussian scores by position, at least float32; None for other scores."""
        of_encoding = getattr(getattr(self, 'encoding', None), 'gaussian_heads', None)
        return None if of_encoding is None else of_encoding()

    def position_probs(self, size: Sequence[int]) -> Optional[Tensor]:
        """Returns the softmax of the terms of the scores that depend only on position; None without such a term.

        The probabilities are ``(N_h, Q, K)`` for a grid or an image of ``size``, row-major, at least float32.
        """
        raise NotImplementedError

    def attention_probs(self, size: Sequence[int]) -> Tensor:
        """Returns the probabilities of a layer whose scores depend only on position: :meth:`position_probs`.

        Raises:
            ValueError: The probabilities depend on the input.
        """
        if self.depends_on_content:
            raise ValueError(
                f'the probabilities of {type(self).__name__}({self.extra_repr()}) depend on the input x: use '
                'attention_scores(x).softmax(-1)'
            )
        probs = self.position_probs(size)
        assert probs is not None
        return probs

    @torch.no_grad()
    def exact_attention_probs(self, size: Sequence[int]) -> Tensor:
        """Computes :meth:`attention_probs` in float64 throughout, on the CPU."""
        return copy.deepcopy(self).cpu().double().attention_probs(size)

    def grid_of(self, x: Tensor) -> Tuple[int, ...]:
        """Returns height and width of the grid of keys for an input, tokens ``(B, H, W, D)``."""
        return tuple(x.shape[1:3])

    def attention_scores(self, x: Tensor) -> Tensor:
        """Returns all scores of an input, ``(B, N_h, Q, K)``, at least float32, those of a null key last.

        Their softmax gives the probabilities. It is for layers that depend on content.
        """
        raise NotImplementedError

    @torch.no_grad()
    def probs_of(self, x: Tensor) -> Tensor:
        """Returns the probabilities for an input, without a null key, ``(B, N_h, Q, K)``, at least float32."""
        size = self.grid_of(x)
        if self.depends_on_content:
            return softmax(self.attention_scores(x))[..., : math.prod(size)]
        return self.attention_probs(size).expand(len(x), -1, -1, -1)

    def content_scores(self, x: Tensor) -> Tensor:
        """Returns the scores without position, q·k/√D, without a null key, ``(B, N_h, H*W, H*W)``."""
        raise NotImplementedError

    def position_scores(self, x: Tensor) -> Tensor:
        """Returns the scores with relative position, q·r_δ or v·r_δ of C20's eq. 8, as :meth:`attention_scores`."""
        raise NotImplementedError

    def value_matrices(self) -> Tensor:
        """Returns W^V W^O of each head, transposed, ``(N_h, D_out, D)``, at least float32.

        Raises:
            RuntimeError: A linear map of the layer is more than its weight, for instance an adapter.
        """
        raise NotImplementedError


def check_plain_linear(name: str, linear: nn.Module) -> None:
    """Raises RuntimeError for what is more than a weight and a bias, as an adapter (LoRA) or a parametrization."""
    if type(linear) is not nn.Linear:
        raise RuntimeError(
            f'{name} is a {type(linear).__name__}, but only a plain nn.Linear is its weight: merge adapters and remove '
            'parametrizations first'
        )


def head_products(query: Tensor, key: Tensor, num_heads: int) -> Tensor:
    """Computes q·k/√D of all heads in full precision, for queries ``(B, Q, N_h·D)`` and keys ``(B, K, N_h·D)``.

    They are ``(B, N_h, Q, K)``, at least float32.
    """
    with full_precision(query.device.type):
        query, key = (at_least_float32(x).unflatten(2, (num_heads, -1)).transpose(1, 2) for x in (query, key))
        return query @ (key * key.shape[-1] ** -0.5).mT
