"""Self-attention over patches with one matrix for a head's scores and one for its output.

The products of the matrices of Li et al. 2021 (L21, eq. 1 and 2), which are all that heads as wide as a token need.
"""

from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from .attention_layer import head_products
from .linear import check_plain_linear
from .patch_head_widths import widths_in
from .position_bias import WindowBias
from .position_biased_attention import PositionBiasedAttention, attend_merged, token_major
from .precision import Device, Dtype, at_least_float32, widest_float
from .prunable_heads import HeadParameters
from .structure import StateDict, StructureError, too_many_heads

Structure = Tuple[str, int]


class MergedPatchAttention(PositionBiasedAttention):
    """:class:`~attncnn_plugin.layers.PatchAttention` with the matrices of a head multiplied (C20, Lemma 1, remark).

    A head as wide as the token needs the products alone: A_h = W^Q_h W^K_hᵀ for its scores x_q A_h x_kᵀ/√D + b_δ, and
    W^V_h W^O_h for its output. Keys and values are the tokens themselves, the same for all heads, so that heads are no
    more than further queries. A state dict of a ``PatchAttention`` will do: its matrices are multiplied when loaded.

    Args:
        dim (int): Channels D of a token.
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
        self._init_heads(num_heads)
        self.reset_parameters()

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
        bias = self._bias(self._token_major_bias, x.shape[1:3])
        return attend_merged(x, self.query_key, self.value_out, bias, dropout)

    def content_scores(self, x: Tensor) -> Tensor:
        tokens = x.flatten(1, 2)
        return head_products(self.query_key(tokens), tokens, self.num_heads)  # x_q A_h x_k

    def value_matrices(self) -> Tensor:
        check_plain_linear('value_out', self.value_out)
        return at_least_float32(self.value_out.weight.unflatten(1, (self.num_heads, self.dim)).transpose(0, 1))

    @property
    def output(self) -> Any:
        return self.value_out

    def head_parameters(self) -> HeadParameters:
        return {'query_key.weight': (0, self.dim), 'value_out.weight': (1, self.dim), 'position.table': (0, 1)}

    def _token_major_bias(self, size: Sequence[int]) -> Tensor:
        return token_major(self.position(size))

    @property
    def structure(self) -> Structure:
        """Heads with two matrices, and their number."""
        return 'merged', self.num_heads

    def structure_in(self, state_dict: StateDict, prefix: str) -> Optional[Structure]:
        """The same of a state dict; ``'separate'`` for the four matrices of a ``PatchAttention``."""
        table = state_dict.get(f'{prefix}position.table')
        names = {'merged': ('query_key', 'value_out'), 'separate': ('query', 'key', 'value', 'out')}
        for kind, linears in names.items():
            if table is not None and all(f'{prefix}{name}.weight' in state_dict for name in linears):
                if len(table) > self.built_heads:
                    raise too_many_heads(prefix, len(table), self.built_heads)
                return kind, len(table)
        return None

    def structure_to_load(self, loaded: Structure) -> Structure:
        """Two matrices for as many heads as the state dict has: the layer multiplies four that it loads."""
        return 'merged', loaded[1]

    def take_structure(self, structure: Structure) -> None:
        """Takes a number of heads; the values are yet to be loaded."""
        super().take_structure(structure[1])

    def convert_state_dict(self, state_dict: StateDict, prefix: str) -> None:
        """The entries of a ``PatchAttention`` to those of this layer."""
        names = ('query', 'key', 'value', 'out')
        widths = widths_in(state_dict, prefix, self.built_heads, self.dim)
        assert widths is not None  # structure_in has seen the entries
        qk_dim, head_dims = widths
        out_dim = self.value_out.weight.shape[0]
        shapes = dict.fromkeys(('query', 'key'), (len(head_dims) * qk_dim, self.dim))
        shapes.update(value=(sum(head_dims), self.dim), out=(out_dim, sum(head_dims)))
        for name in names:
            weight = state_dict[f'{prefix}{name}.weight']
            if weight.shape != shapes[name]:
                raise StructureError(
                    f'{prefix}{name}.weight of the state dict has shape {tuple(weight.shape)}, but the attention of '
                    f'num_heads={self.num_heads} and dim={self.dim} has {shapes[name]}'
                )
        weights = [state_dict.pop(f'{prefix}{name}.weight') for name in names]
        state_dict.pop(f'{prefix}value_channels', None)
        # In float64, where the device has it, and rounded once.
        query, key, value, out = (weight.to(widest_float(weight)) for weight in weights)
        merged = merge_matrices(query, key, value, out, head_dims)
        products = (product.to(weights[0].dtype).contiguous() for product in merged)
        state_dict[f'{prefix}query_key.weight'], state_dict[f'{prefix}value_out.weight'] = products
        if f'{prefix}out.bias' in state_dict:
            state_dict[f'{prefix}value_out.bias'] = state_dict.pop(f'{prefix}out.bias')


def merge_matrices(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, head_dims: Sequence[int]
) -> Tuple[Tensor, Tensor]:
    """The products of a head's matrices, as weights of linear layers.

    Args:
        query, key (Tensor): Weights of W^Q and W^K, ``(N_h·D_k, D)``.
        value (Tensor): Weight of W^V, ``(Σ D_h, D)``.
        out (Tensor): Weight of W^O, ``(D_out, Σ D_h)``.
        head_dims (Sequence[int]): D_h of each head.

    Returns:
        tuple[Tensor, Tensor]: Weights of A_h = W^Q_h W^K_hᵀ √(D/D_k), ``(N_h·D, D)``, for scores that are divided by
        √D, and of W^V_h W^O_h, ``(D_out, N_h·D)``.
    """
    num_heads, dim = len(head_dims), query.shape[1]
    if num_heads == 0:
        return query, out
    query, key = (weight.unflatten(0, (num_heads, -1)) for weight in (query, key))
    query_key = key.transpose(1, 2) @ query  # A_hᵀ, for a weight is the transposed matrix
    if query.shape[1] != dim:
        query_key = query_key * (dim / query.shape[1]) ** 0.5
    if len(set(head_dims)) == 1:
        values = value.unflatten(0, (num_heads, -1))
        outs = out.unflatten(1, (num_heads, -1)).permute(1, 2, 0)  # (N_h, D_h, D_out)
        value_out = (values.transpose(1, 2) @ outs).flatten(0, 1).t()  # W^V_h W^O_h
    else:
        heads = zip(value.split(list(head_dims)), out.split(list(head_dims), dim=1))
        value_out = torch.cat([head_out @ head_value for head_value, head_out in heads], dim=1)
    return query_key.flatten(0, 1), value_out
