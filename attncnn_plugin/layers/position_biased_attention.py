"""Attention over patches by content and a relative position bias, with a null key (Li et al. 2021, section 3)."""

from typing import Sequence

import torch.nn.functional as F
from torch import Tensor

from .attention_layer import AttentionLayer
from .position_bias import WindowBias
from .precision import at_least_float32


class PositionBiasedAttention(AttentionLayer):
    """Scores q·k/√D + b_δ over a grid of patches: the base of heads with four matrices and of heads with two.

    Attributes:
        dim (int): Channels D of a token and of a head.
        position (WindowBias): The biases b_δ of every query and key.
    """

    dim: int
    position: WindowBias

    @property
    def depends_on_content(self) -> bool:
        return True

    @property
    def padding_mode(self) -> str:
        return 'zeros'  # by the null key

    def extra_repr(self) -> str:
        return f'dim={self.dim}, num_heads={self.num_heads}'

    def attention_probs(self, size: Sequence[int]) -> Tensor:
        raise ValueError('the probabilities depend on the input x: use attention_scores(x).softmax(-1)')

    def position_probs(self, size: Sequence[int]) -> Tensor:
        return at_least_float32(self.position(size)).softmax(-1)[..., :-1]

    def content_scores(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def position_scores(self, x: Tensor) -> Tensor:
        return self.position(x.shape[1:3]).expand(len(x), -1, -1, -1)

    def attention_scores(self, x: Tensor) -> Tensor:
        return F.pad(self.content_scores(x), (0, 1)) + at_least_float32(self.position(x.shape[1:3]))
