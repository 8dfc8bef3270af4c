"""Self-attention over patches with one matrix for a head's scores and one for its output.

The products of the matrices of Li et al. 2021 (L21, eq. 1 and 2), which are all that heads as wide as a token need.
"""

from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch.nn.functional as F
from torch import Tensor, nn

from .attention_layer import head_products
from .cache import GridCache
from .linear import check_plain_linear
from .position_bias import WindowBias
from .position_biased_attention import PositionBiasedAttention
from .precision import Device, Dtype, at_least_float32, widest_float
from .structure import Restructurable, StateDict, StructureError


class MergedPatchAttention(Restructurable, PositionBiasedAttention):
    """:class:`~attncnn_plugin.layers.PatchAttention` with the matrices of a head multiplied (C20, Lemma 1, remark).

    A head as wide as the token needs the products alone: A_h = W^Q_h W^K_hᵀ for its scores x_q A_h x_kᵀ/√D + b_δ, and
    W^V_h W^O_h for its output. Keys and values are the tokens themselves, the same for all heads, so that heads are no
    more than further queries. A state dict of a ``PatchAttention`` will do: its matrices are multiplied when loaded.

    Args:
        dim (int): Channels D of a token and of a head.
        num_heads (int): Number of heads N_h.
        position (WindowBias): The relative position bias.
        out_dim (int, optional): Channels of the output. Defaults to ``dim``.
        bias (bool): Whether the output has a bias. Defaults to True.
        attn_drop (float): Dropout rate of the attention probabilities. Defaults to 0.

    Attributes:
        query_key (nn.Linear): A_h, D to N_h·D.
        value_out (nn.Linear): W^V_h W^O_h, N_h·D to ``out_dim``.
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
        self.attn_drop = attn_drop
        self.position = position
        self.query_key = nn.Linear(dim, num_heads * dim, bias=False, **dd)
        self.value_out = nn.Linear(num_heads * dim, dim if out_dim is None else out_dim, bias, **dd)
        self._cache: Optional[GridCache] = None
        self.reset_parameters()
        self._follow_state_dicts()

    def reset_parameters(self) -> None:
        for linear in (self.query_key, self.value_out):
            # An entry is a sum of D products of two from N(0, 0.02²).
            nn.init.trunc_normal_(linear.weight, std=0.02**2 * self.dim**0.5)
        if self.value_out.bias is not None:
            nn.init.zeros_(self.value_out.bias)
        self.position.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, D)`` to ``(B, H, W, D_out)``, for any H and W."""
        dropout = self.attn_drop if self.training else 0.0
        return attend_merged(x, self.query_key, self.value_out, self._bias(x.shape[1:3]), dropout)

    def content_scores(self, x: Tensor) -> Tensor:
        tokens = x.flatten(1, 2)
        return head_products(self.query_key(tokens), tokens, self.num_heads)  # x_q A_h x_k

    def value_matrices(self) -> Tensor:
        check_plain_linear('value_out', self.value_out)
        return at_least_float32(self.value_out.weight.unflatten(1, (self.num_heads, -1)).transpose(0, 1))

    def switch_to_deploy(self) -> None:
        """For inference: evaluation mode, no gradients, and position biases computed once for a grid size."""
        self.eval().requires_grad_(False)
        self._cache = GridCache()

    def _bias(self, size: Sequence[int]) -> Tensor:
        """The position biases in the order of the queries, ``(H·W·N_h, H·W + 1)``."""
        if self._cache is None:
            return self._token_major_bias(size)
        return self._cache(self.position, self._token_major_bias, size)

    def _token_major_bias(self, size: Sequence[int]) -> Tensor:
        return token_major(self.position(size))

    @property
    def structure(self) -> str:
        """``'merged'``, always."""
        return 'merged'

    def structure_in(self, state_dict: StateDict, prefix: str) -> Optional[str]:
        """``'separate'`` for the four matrices of a ``PatchAttention``."""
        if not all(f'{prefix}{name}.weight' in state_dict for name in ('query', 'key', 'value', 'out')):
            return None
        return 'separate'

    def can_take(self, structure: str) -> bool:
        """Never: the layer multiplies the matrices that it loads."""
        return False

    def convert_state_dict(self, state_dict: StateDict, prefix: str) -> None:
        """The entries of a ``PatchAttention`` to those of this layer."""
        out_dim, heads_dim = self.value_out.weight.shape
        shapes = dict.fromkeys(('query', 'key', 'value'), (heads_dim, self.dim))
        weights = []
        for name, shape in {**shapes, 'out': (out_dim, heads_dim)}.items():
            weight = state_dict[f'{prefix}{name}.weight']
            if weight.shape != shape:
                raise StructureError(
                    f'{prefix}{name}.weight of the state dict has shape {tuple(weight.shape)}, but the attention of '
                    f'num_heads={self.num_heads} and dim={self.dim} has {shape}'
                )
            weights.append(weight)
        for name in (*shapes, 'out'):
            del state_dict[f'{prefix}{name}.weight']
        # In float64, where the device has it, and rounded once.
        wide = (weight.to(widest_float(weight)) for weight in weights)
        query, key, value, out = wide
        merged = merge_matrices(query, key, value, out, self.num_heads)
        products = (product.to(weights[0].dtype).contiguous() for product in merged)
        state_dict[f'{prefix}query_key.weight'], state_dict[f'{prefix}value_out.weight'] = products
        if f'{prefix}out.bias' in state_dict:
            state_dict[f'{prefix}value_out.bias'] = state_dict.pop(f'{prefix}out.bias')


def merge_matrices(query: Tensor, key: Tensor, value: Tensor, out: Tensor, num_heads: int) -> Tuple[Tensor, Tensor]:
    """The products of a head's matrices, as weights of linear layers.

    Args:
        query, key, value (Tensor): Weights of W^Q, W^K and W^V, ``(N_h·D, D)``.
        out (Tensor): Weight of W^O, ``(D_out, N_h·D)``.
        num_heads (int): Number of heads N_h.

    Returns:
        tuple[Tensor, Tensor]: Weights of A_h = W^Q_h W^K_hᵀ, ``(N_h·D, D)``, and of W^V_h W^O_h, ``(D_out, N_h·D)``.
    """
    query, key, value = (weight.unflatten(0, (num_heads, -1)) for weight in (query, key, value))
    out = out.unflatten(1, (num_heads, -1)).permute(1, 2, 0)  # (N_h, D, D_out)
    query_key = key.transpose(1, 2) @ query  # A_hᵀ, for a weight is the transposed matrix
    value_out = value.transpose(1, 2) @ out  # W^V_h W^O_h
    return query_key.flatten(0, 1), value_out.flatten(0, 1).t()


def token_major(bias: Tensor) -> Tensor:
    """``(N_h, N, N + 1)`` to ``(N·N_h, N + 1)``, head after head of a token."""
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
        query_key, value_out (Callable): The linear maps by the matrices of :func:`merge_matrices`.
        bias (Tensor): Biases of the scores, the null key last, ``(H·W·N_h, H·W + 1)``.
        dropout (float): Dropout rate of the probabilities.
    """
    batch, height, width, dim = x.shape
    tokens = x.reshape(batch, 1, height * width, dim)
    # One head, whose queries are x_q A_h, head after head of a token: (B, 1, N·N_h, D) lies as the linear map puts it.
    queries = query_key(x).reshape(batch, 1, bias.shape[0], dim)
    heads = attend_with_null_key(queries, tokens, tokens, bias[None], dropout)
    return value_out(heads.reshape(batch, height, width, bias.shape[0] // (height * width) * dim))


def attend_with_null_key(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """softmax(q·k/√D + b) v with a null key, whose q·k is 0 and whose value is 0.

    Args:
        query (Tensor): ``(B, N_h, Q, D)``.
        key, value (Tensor): ``(B, N_h, K, D)``.
        bias (Tensor): b, at least float32, the null key last, ``(N_h, Q, K + 1)``.
        dropout (float): Dropout rate of the probabilities.

    Returns:
        Tensor: ``(B, N_h, Q, D)``.
    """
    if query.device.type != 'cpu':
        null = (0, 0, 0, 1)  # one more key and value, of zeros
        return F.scaled_dot_product_attention(
            query, F.pad(key, null), F.pad(value, null), attn_mask=bias.to(query.dtype)[None], dropout_p=dropout
        )
    # On CPUs the fused kernel has no gradient of the biases; without one more key there are fewer copies to train.
    scores = F.pad(query @ (key * key.shape[-1] ** -0.5).transpose(-2, -1), (0, 1)) + bias
    probs = F.dropout(scores.softmax(-1), dropout).to(value.dtype)
    return probs[..., :-1] @ value
