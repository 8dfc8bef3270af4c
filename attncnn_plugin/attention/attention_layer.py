"""The interface that all attention layers of the package share, for those who look at heads."""

import copy
from typing import NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from .precision import at_least_float32, full_precision
from .window import Window


class GaussianHeads(NamedTuple):
    """Centres and shapes of Gaussian heads, whose score is −½(δ − Δ)ᵀΣ⁻¹(δ − Δ) (C20, eq. 9 and 19).

    Attributes:
        center (Tensor): Δ in tokens, an entry for each axis, ``(N_h, ndim)``.
        factor (Tensor): M in 1/tokens with Σ⁻¹ = MMᵀ, ``(N_h, ndim, ndim)``.
    """

    center: Tensor
    factor: Tensor

    @property
    def inverse_covariance(self) -> Tensor:
        """Σ⁻¹ in 1/tokens², ``(N_h, ndim, ndim)``."""
        # Not matmul: autocast would round it.
        return (self.factor[:, :, None, :] * self.factor[:, None, :, :]).sum(-1)


class AttentionLayer(nn.Module):
    """Attention of queries to keys, both of them the pixels or patches of an image.

    Scores are defined up to a constant for each query. A *null key* is one more key, after those of the grid, that
    stands for what lies outside of the grid; probabilities leave it out, so their rows add up to less than 1.

    Attributes:
        num_heads (int): Number of heads N_h.
        depends_on_content (bool): Whether the probabilities depend on the input.
        has_position_scores (bool): Whether a term of the scores depends on position alone.
        window (Window | None): Where the queries are and how the image is padded, for attention in the place of a
            convolution; None for attention over a grid, whose queries are its tokens.
        padding_mode (str): How a convolution pads the image to see what a head sees at a shift that leaves the grid: a
            hard Gaussian head sees the nearest pixel inside, ``'replicate'``, a null key means ``'zeros'``.
    """

    num_heads: int
    window: Optional[Window] = None

    @property
    def depends_on_content(self) -> bool:
        return False

    @property
    def has_position_scores(self) -> bool:
        return True

    @property
    def padding_mode(self) -> str:
        return 'replicate'

    def gaussian_heads(self) -> Optional[GaussianHeads]:
        """Centres and shapes of the heads, at least float32 and differentiable; None for heads of another kind.

        Where the probabilities depend on content, those of the scores that depend on position alone.
        """
        return None

    def position_share(self) -> Optional[Tensor]:
        """The share σ(λ) of each head's probabilities that is by position, ``(N_h,)``, the rest being by content.

        None where there is no such gate, but the scores by position and by content are added.
        """
        return None

    def attention_probs(self, size: Sequence[int]) -> Tensor:
        """The probabilities of every query for every key, where they depend on position alone.

        Args:
            size (Sequence[int]): Height and width of the grid in tokens.

        Returns:
            Tensor: ``(N_h, Q, K)``, queries and keys row-major, at least float32, without dropout.

        Raises:
            ValueError: The probabilities depend on the input.
        """
        raise NotImplementedError

    @torch.no_grad()
    def exact_attention_probs(self, size: Sequence[int]) -> Tensor:
        """As :meth:`attention_probs`, computed in float64 throughout, on the CPU."""
        return copy.deepcopy(self).cpu().double().attention_probs(size)

    def position_probs(self, size: Sequence[int]) -> Optional[Tensor]:
        """The probabilities by the terms of the scores that depend on position alone.

        Returns:
            Tensor | None: As of :meth:`attention_probs`; None without :attr:`has_position_scores`.
        """
        return self.attention_probs(size)

    def grid_of(self, x: Tensor) -> Tuple[int, int]:
        """Height and width of the grid of keys of an input, tokens ``(B, H, W, D)``."""
        return x.shape[1], x.shape[2]

    def attention_scores(self, x: Tensor) -> Tensor:
        """All scores of an input, ``(B, N_h, Q, K)``, at least float32, those of a null key last.

        Their softmax are the probabilities. With a gate they are the logarithms of these.

        Args:
            x (Tensor): Tokens, ``(B, H, W, D)``.
        """
        raise NotImplementedError

    def content_scores(self, x: Tensor) -> Optional[Tensor]:
        """The scores without position, q·k and u·k of C20's eq. 8, ``(B, N_h, H*W, H*W)``; None without such a term.

        An absolute position encoding, a position bias and a null key are left out. In the place of a convolution the
        keys are those of :meth:`attention_scores`, the zeros of a padding included.
        """
        return None

    def position_scores(self, x: Tensor) -> Optional[Tensor]:
        """The scores with relative position, q·r_δ and v·r_δ of C20's eq. 8, as :meth:`attention_scores`.

        The former depends on the content of the query, not on that of the keys. None without such a term.
        """
        return None

    def value_matrices(self) -> Tensor:
        """The matrix from input to output of each head, W^V W^O transposed, ``(N_h, D_out, D)``, at least float32.

        Raises:
            RuntimeError: A linear map of the layer is more than its weight, for instance an adapter.
        """
        raise NotImplementedError


def head_products(query: Tensor, key: Tensor, num_heads: int) -> Tensor:
    """q·k/√D of every head, in full precision.

    Args:
        query (Tensor): ``(B, N, N_h·D)``.
        key (Tensor): ``(B, N, N_h·D)``, or ``(B, N, D)`` for all heads.
        num_heads (int): N_h.

    Returns:
        Tensor: ``(B, N_h, N, N)``, at least float32.
    """
    if num_heads == 0:
        return at_least_float32(query).new_zeros(len(query), 0, query.shape[1], key.shape[1])
    with full_precision(query.device.type):
        query = at_least_float32(query).unflatten(2, (num_heads, -1)).transpose(1, 2)
        key = at_least_float32(key).unflatten(2, (-1, query.shape[-1])).transpose(1, 2)
        return torch.matmul(query, key.mT) / query.shape[-1] ** 0.5
