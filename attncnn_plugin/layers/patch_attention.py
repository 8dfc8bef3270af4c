"""Self-attention over patches with a relative position bias and a null key (Li et al. 2021, sections 3 and 4)."""

import copy
from typing import Any, Dict, Optional, Tuple

import torch.nn.functional as F
from torch import Tensor, nn

from .attention_layer import head_products
from .linear import check_plain_linear, product_is_cheaper
from .merged_patch_attention import (
    MergedPatchAttention,
    attend_merged,
    attend_with_null_key,
    merge_matrices,
    token_major,
)
from .position_bias import WindowBias
from .position_biased_attention import PositionBiasedAttention
from .precision import Device, Dtype, at_least_float32


class PatchAttention(PositionBiasedAttention):
    """Multi-head self-attention over a grid of tokens (L21, eq. 1 and 2), heads as wide as the token: D_h = D.

    Scores are q·k/√D + b_δ; queries, keys and values have no biases, so that the null key can be zero.

    Args:
        dim (int): Channels D of a token and of a head.
        num_heads (int): Number of heads N_h.
        position (WindowBias): The relative position bias.
        out_dim (int, optional): Channels of the output. Defaults to ``dim``.
        bias (bool): Whether the output has a bias. Defaults to True.
        attn_drop (float): Dropout rate of the attention probabilities. Defaults to 0.

    Attributes:
        query, key, value (nn.Linear): W^Q, W^K and W^V, D to N_h·D.
        out (nn.Linear): W^O, N_h·D to ``out_dim``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        position: WindowBias,
        out_dim: Optional[int] = None,
        bias: bool = True,
        attn_drop: float = 0.0,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        super().__init__()
        self.dim = dim
        self.num_heads = num_heads
        self.out_dim = dim if out_dim is None else out_dim
        self.attn_drop = attn_drop
        self.position = position
        self.query = nn.Linear(dim, num_heads * dim, bias=False, **dd)
        self.key = nn.Linear(dim, num_heads * dim, bias=False, **dd)
        self.value = nn.Linear(dim, num_heads * dim, bias=False, **dd)
        self.out = nn.Linear(num_heads * dim, self.out_dim, bias, **dd)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.query, self.key, self.value, self.out):
            nn.init.trunc_normal_(linear.weight, std=0.02)
        if self.out.bias is not None:
            nn.init.zeros_(self.out.bias)
        self.position.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, D)`` to ``(B, H, W, D_out)``, for any H and W."""
        batch, height, width, dim = x.shape
        bias = self.position((height, width))
        dropout = self.attn_drop if self.training else 0.0
        if self._merges(batch * height * width):
            query_key, value_out = merge_matrices(*self._weights(), self.num_heads)
            return attend_merged(
                x,
                lambda tokens: F.linear(tokens, query_key),
                lambda heads: F.linear(heads, value_out, self.out.bias),
                token_major(bias),
                dropout,
            )
        # (N, B, D), so that the heads of all images, (B·N_h, N, D), are a view of what the linear maps put out.
        tokens = x.reshape(batch, height * width, dim).transpose(0, 1).contiguous()
        query, key, value = (
            linear(tokens).unflatten(2, (self.num_heads, dim)).permute(1, 2, 0, 3)
            for linear in (self.query, self.key, self.value)
        )
        heads = attend_with_null_key(query, key, value, bias, dropout)
        return self.out(heads.transpose(1, 2).reshape(batch, height, width, self.out.in_features))

    def merge(self) -> MergedPatchAttention:
        """The same attention with the matrices of a head multiplied; this layer stays as it is.

        Raises:
            RuntimeError: One of its linear maps is no plain linear layer any more.
        """
        for name in ('query', 'key', 'value', 'out'):
            check_plain_linear(name, getattr(self, name))
        merged = MergedPatchAttention(
            self.dim,
            self.num_heads,
            copy.deepcopy(self.position),
            out_dim=self.out_dim,
            bias=self.out.bias is not None,
            attn_drop=self.attn_drop,
            device='meta',  # no random numbers are drawn
            dtype=self.out.weight.dtype,
        ).to_empty(device=self.out.weight.device)
        merged.load_state_dict(self.state_dict())
        merged.requires_grad_(self.out.weight.requires_grad).train(self.training)
        return merged

    def content_scores(self, x: Tensor) -> Tensor:
        tokens = x.flatten(1, 2)
        return head_products(self.query(tokens), self.key(tokens), self.num_heads)

    def value_matrices(self) -> Tensor:
        for name in ('value', 'out'):
            check_plain_linear(name, getattr(self, name))
        value = at_least_float32(self.value.weight).unflatten(0, (self.num_heads, -1))  # (N_h, D, D)
        out = at_least_float32(self.out.weight).unflatten(1, (self.num_heads, -1)).transpose(0, 1)  # (N_h, D_out, D)
        return out @ value

    def _weights(self) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.query.weight, self.key.weight, self.value.weight, self.out.weight

    def _merges(self, tokens: int) -> bool:
        """Whether the products of the matrices cost less than they save in a pass over T tokens.

        W^Q W^Kᵀ costs N_h·D³ multiply-adds and saves N_h·T·D², W^V W^O costs N_h·D²·D_out and saves N_h·T·D².
        """
        square = self.num_heads * self.dim**2
        layers = (self.query, self.key, self.value, self.out)
        return product_is_cheaper(layers, tokens, 2 * square, square * (self.dim + self.out_dim))
