"""Attention over patches by content and a relative position bias (Li et al. 2021, section 3)."""

from typing import Callable, Optional, Sequence

import torch.nn.functional as F
from torch import Tensor

from .biased_attention import attend_biased
from .cache import GridCache
from .position_bias import WindowBias
from .precision import at_least_float32
from .prunable_heads import PrunableHeads


class PositionBiasedAttention(PrunableHeads):
    """Scores q·k/√D_k + b_δ over a grid of patches: the base of heads with four matrices and of heads with two.

    Attributes:
        dim (int): Channels D of a token.
        position (WindowBias): The biases b_δ of every query and key, with or without a null key.
    """

    dim: int
    position: WindowBias
    _cache: Optional[GridCache] = None

    @property
    def depends_on_content(self) -> bool:
        return True

    @property
    def padding_mode(self) -> str:
        return 'zeros' if self.position.null_key else 'replicate'

    def extra_repr(self) -> str:
        return f'dim={self.dim}, num_heads={self.num_heads}'

    def attention_probs(self, size: Sequence[int]) -> Tensor:
        raise ValueError('the probabilities depend on the input x: use attention_scores(x).softmax(-1)')

    def position_probs(self, size: Sequence[int]) -> Tensor:
        return at_least_float32(self.position(size)).softmax(-1)[..., : size[0] * size[1]]

    def content_scores(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def position_scores(self, x: Tensor) -> Tensor:
        return self.position(x.shape[1:3]).expand(len(x), -1, -1, -1)

    def attention_scores(self, x: Tensor) -> Tensor:
        bias = at_least_float32(self.position(x.shape[1:3]))
        return F.pad(self.content_scores(x), (0, bias.shape[-1] - bias.shape[-2])) + bias

    def switch_to_deploy(self) -> None:
        """For inference: evaluation mode, no gradients, and position biases computed once for a grid size."""
        self.eval().requires_grad_(False)
        self._cache = GridCache()

    def _bias(self, function: Callable[[Sequence[int]], Tensor], size: Sequence[int]) -> Tensor:
        """``function(size)`` of the position biases; in a layer for inference, computed once."""
        return function(size) if self._cache is None else self._cache(self.position, function, size)


def token_major(bias: Tensor) -> Tensor:
    """``(N_h, N, K)`` to ``(N·N_h, K)``, head after head of a token."""
    return bias.transpose(0, 1).flatten(0, 1)


def attend_merged(
    x: Tensor,
    query_key: Callable[[Tensor], Tensor],
    value_out: Callable[[Tensor], Tensor],
    bias: Tensor,
    dropout: float,
) -> Tensor:
    """Attention by the products of a head's matrices, ``(B, H, W, D)`` to ``(B, H, W, D_out)``.

    Args:
        x (Tensor): Tokens, ``(B, H, W, D)``.
        query_key, value_out (Callable): The linear maps by the products of a head's matrices.
        bias (Tensor): Biases of the scores of :func:`token_major`, a null key last, ``(H·W·N_h, K)``.
        dropout (float): Dropout rate of the probabilities.
    """
    batch, height, width, dim = x.shape
    tokens = x.reshape(batch, 1, height * width, dim)
    # One head, whose queries are x_q A_h, head after head of a token: (B, 1, N·N_h, D) lies as the linear map puts it.
    queries = query_key(x).reshape(batch, 1, bias.shape[0], dim)
    heads = attend_biased(queries, tokens, tokens, bias[None], dropout)
    return value_out(heads.reshape(batch, height, width, bias.shape[0] // (height * width) * dim))
