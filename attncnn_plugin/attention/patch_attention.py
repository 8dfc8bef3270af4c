"""Self-attention over patches with a relative position bias (Li et al. 2021 (L21), sections 3 and 4)."""

from typing import Any, Dict, Optional, Sequence, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention_layer import head_products
from .biased_attention import attend_biased, attend_biased_of_widths
from .heads import HeadParameters, PrunableHeads, resize_parameter
from .linear import check_plain_linear
from .patch_head_widths import widths_in
from .position_bias import WindowBias
from .precision import Device, Dtype, at_least_float32
from .softmax import softmax
from .state_dicts import StateDict


class PatchAttention(PrunableHeads):
    """Multi-head self-attention over a grid of tokens (L21, eq. 1 and 2).

    Scores are q·k/√D_k + b_δ; queries, keys and values have no biases, so that a null key can be zero. A state dict
    carries the widths of its heads: those of other widths, and of fewer heads, change the layer as it is loaded.

    Args:
        dim (int): Channels D of a token.
        num_heads (int): Number of heads N_h.
        position (WindowBias): The relative position bias.
        out_dim (int, optional): Channels of the output. Defaults to ``dim``.
        bias (bool): Whether the output has a bias. Defaults to True.
        attn_drop (float): Dropout rate of the attention probabilities. Defaults to 0.
        head_dim (int | Sequence[int], optional): Channels D_h of a head's values, for all heads or for each. Defaults
            to ``dim``, as L21's heads.
        qk_dim (int, optional): Channels D_k of a head's queries and keys. Defaults to ``dim``.

    Raises:
        ValueError: A width below 1, or a number of them that is not the number of heads.

    Attributes:
        query, key (nn.Linear): W^Q and W^K, D to N_h·D_k.
        value (nn.Linear): W^V, D to Σ D_h, head after head.
        out (nn.Linear): W^O, Σ D_h to ``out_dim``.
        head_dims (tuple[int, ...]): D_h of each head.
        value_channels (Tensor): The same for state dicts, ``(N_h,)``, where heads differ; no such buffer otherwise.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        position: WindowBias,
        out_dim: Optional[int] = None,
        bias: bool = True,
        attn_drop: float = 0.0,
        head_dim: Union[int, Sequence[int], None] = None,
        qk_dim: Optional[int] = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        super().__init__()
        if head_dim is None or isinstance(head_dim, int):
            head_dims: Sequence[int] = [dim if head_dim is None else head_dim] * num_heads
        else:
            head_dims = head_dim
        if len(head_dims) != num_heads or min(head_dims, default=1) < 1:
            raise ValueError(
                f'head_dim={head_dim} must be at least 1, one for all heads or one for each of the {num_heads}'
            )
        if qk_dim is not None and qk_dim < 1:
            raise ValueError(f'qk_dim={qk_dim} must be at least 1')
        self.dim = dim
        self.qk_dim = dim if qk_dim is None else qk_dim
        self.out_dim = dim if out_dim is None else out_dim
        self.attn_drop = attn_drop
        self.position = position
        self.query = nn.Linear(dim, num_heads * self.qk_dim, bias=False, **dd)
        self.key = nn.Linear(dim, num_heads * self.qk_dim, bias=False, **dd)
        self.value = nn.Linear(dim, sum(head_dims), bias=False, **dd)
        self.out = nn.Linear(sum(head_dims), self.out_dim, bias, **dd)
        self._init_heads(num_heads)
        self._set_head_dims(head_dims)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.query, self.key, self.value, self.out):
            nn.init.trunc_normal_(linear.weight, std=0.02)
        if self.out.bias is not None:
            nn.init.zeros_(self.out.bias)
        self.position.reset_parameters()

    def extra_repr(self) -> str:
        widths = self.head_dims[0] if len(set(self.head_dims)) == 1 else self.head_dims
        return f'dim={self.dim}, num_heads={self.num_heads}, head_dim={widths}, qk_dim={self.qk_dim}'

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, D)`` to ``(B, H, W, D_out)``, for any H and W."""
        batch, height, width, dim = x.shape
        if self.num_heads == 0:
            return self.out(x[..., :0])
        bias = self.position((height, width))
        dropout = self.attn_drop if self.training else 0.0
        # (N, B, D), so that the heads of all images, (B·N_h, N, D_k), are a view of what the linear maps put out.
        tokens = x.reshape(batch, height * width, dim).transpose(0, 1).contiguous()
        query, key = (
            linear(tokens).unflatten(2, (self.num_heads, self.qk_dim)).permute(1, 2, 0, 3)
            for linear in (self.query, self.key)
        )
        if len(set(self.head_dims)) == 1:
            value = self.value(tokens).unflatten(2, (self.num_heads, -1)).permute(1, 2, 0, 3)
            heads = attend_biased(query, key, value, bias, dropout).transpose(1, 2)
        else:
            values = self.value(tokens).transpose(0, 1).split(self.head_dims, dim=2)
            heads = attend_biased_of_widths(query, key, values, bias, dropout)
        return self.out(heads.reshape(batch, height, width, self.out.in_features))

    @property
    def depends_on_content(self) -> bool:
        return True

    @property
    def padding_mode(self) -> str:
        return 'zeros' if self.position.null_key else 'replicate'

    def attention_probs(self, size: Sequence[int]) -> Tensor:
        raise ValueError('the probabilities depend on the input x: use attention_scores(x).softmax(-1)')

    def position_probs(self, size: Sequence[int]) -> Tensor:
        return softmax(at_least_float32(self.position(size)))[..., : size[0] * size[1]]

    def position_scores(self, x: Tensor) -> Tensor:
        return self.position(x.shape[1:3]).expand(len(x), -1, -1, -1)

    def attention_scores(self, x: Tensor) -> Tensor:
        bias = at_least_float32(self.position(x.shape[1:3]))
        return F.pad(self.content_scores(x), (0, bias.shape[-1] - bias.shape[-2])) + bias

    def content_scores(self, x: Tensor) -> Tensor:
        tokens = x.flatten(1, 2)
        return head_products(self.query(tokens), self.key(tokens), self.num_heads)

    def value_matrices(self) -> Tensor:
        for name in ('value', 'out'):
            check_plain_linear(name, getattr(self, name))
        values = at_least_float32(self.value.weight).split(self.head_dims)  # (D_h, D)
        outs = at_least_float32(self.out.weight).split(self.head_dims, dim=1)  # (D_out, D_h)
        if not values:
            return at_least_float32(self.value.weight).new_zeros(0, self.out_dim, self.dim)
        return torch.stack([out @ value for value, out in zip(values, outs)])

    @property
    def output(self) -> Any:
        return self.out

    def head_parameters(self) -> HeadParameters:
        return {
            'query.weight': (0, self.qk_dim),
            'key.weight': (0, self.qk_dim),
            'value.weight': (0, self.head_dims),
            'out.weight': (1, self.head_dims),
            'position.table': (0, 1),
        }

    def follow(self, state_dict: StateDict, prefix: str) -> bool:
        """Takes the number of heads of a state dict, and the widths D_k of their queries and D_h of their values."""
        widths = widths_in(state_dict, prefix, self.built_heads, self.qk_dim)
        if widths in (None, (self.qk_dim, self.head_dims)):
            return False
        assert widths is not None
        qk_dim, head_dims = widths
        for name in ('query', 'key'):
            resize_parameter(self, f'{name}.weight', 0, len(head_dims) * qk_dim)
        resize_parameter(self, 'value.weight', 0, sum(head_dims))
        resize_parameter(self, 'out.weight', 1, sum(head_dims))
        resize_parameter(self, 'position.table', 0, len(head_dims))
        self.qk_dim, self.num_heads = qk_dim, len(head_dims)
        self._set_head_dims(head_dims)
        return True

    def _keep(self, heads: Sequence[int]) -> None:
        super()._keep(heads)
        self._set_head_dims([self.head_dims[head] for head in heads])

    def _set_head_dims(self, head_dims: Sequence[int]) -> None:
        self.head_dims = tuple(head_dims)
        self._buffers.pop('value_channels', None)
        if len(set(head_dims)) > 1:
            device = self.value.weight.device
            # Of a model without memory too it has its values: whoever loads a state dict reads them.
            self.register_buffer(
                'value_channels', torch.tensor(self.head_dims, device='cpu' if device.type == 'meta' else device)
            )
