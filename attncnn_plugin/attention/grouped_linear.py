"""The linear map of heads whose channels come in groups, as those of a convolution."""

import math
from typing import Optional

import torch
from torch import Tensor, nn

from .precision import Device, Dtype


class GroupedLinear(nn.Module):
    """A linear map of the channels of all heads, where an output reads the channels of its group alone.

    It has as many weights as the kernel of a convolution with N_h positions and as many groups.

    Args:
        in_channels (int): Channels C of a head.
        out_channels (int): Channels of the output.
        num_heads (int): Number of heads N_h.
        groups (int): Number of groups, of which both numbers of channels are multiples.
        bias (bool): Whether the output has a bias. Defaults to True.

    Attributes:
        weight (Parameter): ``(out_channels, N_h·C/groups)``, head after head.
        bias (Parameter | None): ``(out_channels,)``.
    """

    bias: Optional[nn.Parameter]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_heads: int,
        groups: int,
        bias: bool = True,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self.groups = groups
        per_group = in_channels // groups
        self.in_channels = in_channels
        self.weight = nn.Parameter(torch.empty(out_channels, num_heads * per_group, device=device, dtype=dtype))
        self.register_parameter(
            'bias', nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all from U(−1/√n, 1/√n), n inputs an output, as ``nn.Linear``."""
        limit = 1 / math.sqrt(max(1, self.weight.shape[1]))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -limit, limit)

    def extra_repr(self) -> str:
        out_channels, inputs = self.weight.shape
        return f'{out_channels} outputs of {inputs} inputs each, groups={self.groups}, bias={self.bias is not None}'

    def forward(self, heads: Tensor) -> Tensor:
        """``(…, N_h, Q, C)`` to ``(…, Q, out_channels)``; nothing is copied if the heads lie as ``(…, C, N_h, Q)``."""
        heads = heads.movedim(-1, -3).unflatten(-3, (self.groups, -1)).flatten(-3, -2)  # (…, groups, C/groups·N_h, Q)
        weight = self._by_group().transpose(-2, -1).flatten(-2)  # (groups, out_channels/groups, C/groups·N_h)
        output = (weight.to(heads.dtype) @ heads).flatten(-3, -2).transpose(-2, -1)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def head_matrices(self) -> Tensor:
        """The matrix of each head with the zeros between its groups, ``(N_h, out_channels, C)``."""
        weight = self._by_group()
        dense = torch.einsum('gohi,gf->hgofi', weight, torch.eye(self.groups).to(weight))
        return dense.flatten(3, 4).flatten(1, 2)

    def _by_group(self) -> Tensor:
        """``(groups, out_channels/groups, N_h, C/groups)``."""
        weight = self.weight.unflatten(0, (self.groups, -1))
        return weight.unflatten(2, (-1, self.in_channels // self.groups))
