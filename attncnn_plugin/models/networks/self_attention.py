"""The self-attention network of Cordonnier et al. 2020, behind the mmpretrain backbones and the timm models."""

import warnings
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch
from timm.layers import DropPath, Mlp, calculate_drop_path_rates
from torch import Tensor, nn

from ...convert.to_conv import ConvFit, mhsa_to_conv
from ...layers.grid_attention import GridAttention, PositionAttention
from ...layers.grid_convolution import GridConvolution
from ...layers.linear import check_plain_linear, has_hooks, is_plain_linear
from ...layers.precision import widest_float
from ...layers.prunable_heads import Replacement
from ...layers.separable import is_exporting
from .deployment import Deployment
from .grid_network import GridNetwork, check_drop_path_rate


class SpaceToDepthStem(nn.Module):
    """Invertible 2x2 downsampling, C to 4·C channels, and a linear map to D channels (C20, 4.1).

    Args:
        in_chans (int): Channels C of the image.
        embed_dim (int): Channels D of a token.
    """

    reduction = 2

    def __init__(self, in_chans: int, embed_dim: int, device=None, dtype=None) -> None:
        super().__init__()
        self.proj = nn.Linear(in_chans * self.reduction**2, embed_dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, H/2, W/2, D)``.

        Raises:
            ValueError: The image does not have the stem's channels, or not an even height and width.
        """
        channels = self.proj.in_features // self.reduction**2
        if x.ndim != 4 or x.shape[1] != channels:
            raise ValueError(f'the input has shape {tuple(x.shape)}, but (B, {channels}, H, W) is expected')
        if x.shape[2] % self.reduction or x.shape[3] % self.reduction:
            raise ValueError(
                f'the image of {x.shape[2]}x{x.shape[3]} pixels cannot be cut into blocks of 2x2: '
                'resize or pad it to an even height and width'
            )
        batch, _, height, width = x.shape
        grid = height // self.reduction, width // self.reduction
        x = x.reshape(batch, channels, grid[0], self.reduction, grid[1], self.reduction)
        x = x.permute(0, 2, 4, 1, 3, 5).reshape(batch, *grid, self.proj.in_features)
        return self.proj(x)


class SelfAttentionBlock(nn.Module):
    """Attention, linear map, residual and norm, then feed-forward network, residual and norm (post-norm).

    A state dict carries its structure: that of a block for inference turns the block to one, and one of a block for
    training is merged for a block that is for inference.

    Args:
        dim (int): Channels D.
        attn (nn.Module): The attention, ``(B, H, W, D)`` to the same.
        mlp_dim (int): Hidden channels of the feed-forward network.
        proj_drop (float): Dropout rate after the two sub-layers. Defaults to 0.
        drop_path (float): Stochastic depth rate. Defaults to 0.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        mlp_dim: int,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        device=None,
        dtype=None,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.attn = attn
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)
        self.norm1 = nn.LayerNorm(dim, eps=1e-12, **dd)
        self.mlp = Mlp(dim, mlp_dim, drop=(0.0, proj_drop), **dd)
        self.norm2 = nn.LayerNorm(dim, eps=1e-12, **dd)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.turned_by_loading = False
        self._register_load_state_dict_pre_hook(self._load_structure)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.drop_path(self.proj_drop(self._attend(x))))
        return self.norm2(x + self.drop_path(self.mlp(x)))

    def _attend(self, x: Tensor) -> Tensor:
        """The attention and the linear map after it; with that of the heads as one map where this is cheaper."""
        if not self._merging_is_cheaper(x):
            return self.proj(self.attn(x))
        weight, bias = merge_linear(self.attn.value.weight, self.attn.value.bias, self.proj.weight, self.proj.bias)
        return self.attn(x, (weight, bias))

    def _merging_is_cheaper(self, x: Tensor) -> bool:
        """Whether the product of the maps, N_h·D³ multiply-adds, costs less than the second map of T tokens, T·D²."""
        if not isinstance(x, Tensor) or is_exporting() or not isinstance(self.attn, GridAttention):
            return False
        value = self.attn.value
        if has_hooks(self.attn) or not is_plain_linear(self.proj) or not is_plain_linear(value) or value.bias is None:
            return False
        return x.shape[:3].numel() > value.in_features > 0

    @property
    def is_deployed(self) -> bool:
        """Whether the block is for inference alone."""
        return 'deployed' in self._buffers

    def check_deployable(self, name: str = '') -> None:
        """Whether the block can be switched to inference.

        Args:
            name (str): Of the block, with a dot, for the message. Defaults to none.

        Raises:
            TypeError: The attention is none of this package.
            RuntimeError: One of the two linear maps after the attention is no plain linear layer any more.
        """
        if self.is_deployed:
            return
        if not isinstance(self.attn, GridAttention):
            raise TypeError(
                f'{name}attn is a {type(self.attn).__name__}, but only attention of attncnn_plugin.layers '
                'can be switched to inference'
            )
        check_plain_linear(f'{name}attn.value', self.attn.value)
        check_plain_linear(f'{name}proj', self.proj)

    @torch.no_grad()
    def switch_to_deploy(self) -> None:
        """For inference alone: the two linear maps after the attention become one. timm calls it by this name too.

        Raises:
            TypeError, RuntimeError: See :meth:`check_deployable`.
        """
        self.check_deployable()
        if not self.is_deployed:
            merged = merge_exactly(self.attn.value.weight, self.attn.value.bias, self.proj.weight, self.proj.bias)
            self._put_deployed()
            self.attn.value.weight, self.attn.value.bias = map(nn.Parameter, merged)
        if isinstance(self.attn, GridAttention):
            self.attn.switch_to_deploy()
        self.eval().requires_grad_(False)

    @torch.no_grad()
    def to_conv(self, kernel_size: int, size: Optional[Tuple[int, int]], tolerance: float) -> Optional[ConvFit]:
        """Replaces the attention of a block for inference by the convolution that is nearest to it, if it is near.

        Returns:
            ConvFit | None: How well it fits, None if the error could be larger than ``tolerance``.
        """
        if not isinstance(self.attn, PositionAttention) or not self.attn.position_only or self.attn.num_heads == 0:
            return None
        if size is None:
            size = tuple(min(16, largest) for largest in self.attn.max_size or (16, 16))
        conv, fit = mhsa_to_conv(self.attn, kernel_size, size)
        if fit.bound > tolerance:
            return None
        self.attn = GridConvolution(conv).eval().requires_grad_(False)
        return fit

    def _put_deployed(self) -> None:
        """The structure for inference; a buffer marks it in state dicts."""
        weight = self.proj.weight
        self.register_buffer('deployed', torch.ones((), dtype=torch.bool, device=weight.device))
        self.proj = nn.Identity()
        if self.attn.value.bias is None:
            self.attn.value.bias = nn.Parameter(weight.new_zeros(len(weight)))

    @torch.no_grad()
    def _load_structure(
        self,
        state_dict: dict,
        prefix: str,
        metadata,
        strict,
        missing_keys,
        unexpected_keys,
        error_msgs: List[str],
    ) -> None:
        """Before a state dict is loaded: takes its structure, or merges it."""
        was_deployed = self.is_deployed
        conv = state_dict.get(f'{prefix}attn.conv.weight')
        if conv is not None and conv.ndim == 4:
            like = self.norm1.weight
            layer = nn.Conv2d(
                conv.shape[1],
                conv.shape[0],
                conv.shape[2:],
                padding='same',
                padding_mode='replicate',
                device=like.device,
                dtype=like.dtype,
            )
            if not self.is_deployed:
                self._put_deployed()
            self.attn = GridConvolution(layer)
            self.eval().requires_grad_(False)
        elif isinstance(self.attn, GridConvolution) and f'{prefix}attn.value.weight' in state_dict:
            error_msgs.append(
                f'{prefix}attn is a convolution here, but attention in the state dict: load it into a '
                'model as it was built'
            )
        elif f'{prefix}deployed' in state_dict and not self.is_deployed:
            self._put_deployed()
            self.switch_to_deploy()
        elif self.is_deployed and isinstance(self.attn, GridAttention) and f'{prefix}deployed' not in state_dict:
            names = [f'{prefix}{name}' for name in ('attn.value.weight', 'attn.value.bias', 'proj.weight', 'proj.bias')]
            weight, bias, proj_weight, proj_bias = map(state_dict.get, names)
            if weight is None or proj_weight is None or proj_bias is None:
                pass  # missing keys, as for any other parameter
            elif weight.ndim != 2 or proj_weight.ndim != 2 or proj_weight.shape[1] != len(weight):
                error_msgs.append(
                    f'{names[2]} of the state dict has shape {tuple(proj_weight.shape)} and {names[0]} '
                    f'{tuple(weight.shape)}: the first cannot follow the second, so the state dict is damaged'
                )
            else:
                del state_dict[names[2]], state_dict[names[3]]
                state_dict[names[0]], state_dict[names[1]] = merge_exactly(weight, bias, proj_weight, proj_bias)
                state_dict[f'{prefix}deployed'] = self.deployed
        self.turned_by_loading |= self.is_deployed and not was_deployed


def merge_linear(
    first_weight: Tensor,
    first_bias: Optional[Tensor],
    weight: Tensor,
    bias: Tensor,
) -> Tuple[Tensor, Tensor]:
    """Weight and bias of two linear layers in a row, W (W₁ x + b₁) + b."""
    return weight @ first_weight, bias if first_bias is None else torch.addmv(bias, weight, first_bias)


def merge_exactly(*maps: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    """:func:`merge_linear` in float64 (where the device has it), rounded once."""
    wide = (None if tensor is None else tensor.to(widest_float(tensor)) for tensor in maps)
    return tuple(merged.to(maps[0].dtype) for merged in merge_linear(*wide))


class SelfAttentionNetwork(GridNetwork):
    """Stem and blocks: images ``(B, C, H, W)`` to features ``(B, H/2, W/2, D)``.

    Args:
        attn_layer (Callable): Makes the attention of a block: called as ``attn_layer(dim, num_heads, attn_drop=…,
            attn_impl=…, device=…, dtype=…)``, it gives a module ``(B, H, W, D)`` to the same.
        embed_dim (int): Channels D. Defaults to 400.
        depth (int): Number of blocks. Defaults to 6.
        num_heads (int): Number of heads N_h of a block. Defaults to 9.
        mlp_dim (int): Hidden channels of the feed-forward networks. Defaults to 512.
        in_chans (int): Channels C of the image. Defaults to 3.
        proj_drop_rate (float): Dropout rate of hidden states. Defaults to 0.
        attn_drop_rate (float): Dropout rate of attention probabilities. Defaults to 0.
        drop_path_rate (float): Stochastic depth rate of the last block, rising linearly from 0. Defaults to 0.
        attn_impl (str): ``'auto'``, ``'dense'`` or ``'separable'``, see
            :class:`~attncnn_plugin.layers.grid_attention.GridAttention`. Defaults to ``'auto'``.
    """

    def __init__(
        self,
        attn_layer: Callable[..., nn.Module],
        embed_dim: int = 400,
        depth: int = 6,
        num_heads: int = 9,
        mlp_dim: int = 512,
        in_chans: int = 3,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        attn_impl: str = 'auto',
        device=None,
        dtype=None,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        if min(embed_dim, depth, mlp_dim, in_chans) < 1:
            raise ValueError(
                f'embed_dim={embed_dim}, depth={depth}, mlp_dim={mlp_dim} and in_chans={in_chans} must be at least 1'
            )
        check_drop_path_rate(drop_path_rate)
        self.stem = SpaceToDepthStem(in_chans, embed_dim, **dd)
        self.blocks = nn.Sequential(
            *[
                SelfAttentionBlock(
                    embed_dim,
                    attn_layer(embed_dim, num_heads, attn_drop=attn_drop_rate, attn_impl=attn_impl, **dd),
                    mlp_dim,
                    proj_drop=proj_drop_rate,
                    drop_path=drop_path,
                    **dd,
                )
                for drop_path in calculate_drop_path_rates(drop_path_rate, depth)
            ]
        )
        self.norm = nn.Identity()  # every block ends in a norm

    def train(self, mode: bool = True) -> 'SelfAttentionNetwork':
        if mode and any(block.turned_by_loading for block in self.blocks):
            warnings.warn(
                'the network took the structure for inference of the state dict that it loaded: its blocks do not '
                'train. Load the checkpoint from before switch_to_deploy() to train it further'
            )
            for block in self.blocks:
                block.turned_by_loading = False
        return super().train(mode)

    def switch_to_deploy(
        self,
        to_conv: Optional[float] = None,
        kernel_size: int = 3,
        size: Optional[Tuple[int, int]] = None,
    ) -> Deployment:
        """For inference alone: merges linear maps and keeps what depends on the grid alone by its size, in place.

        The output stays as it was, but for attention that is replaced by a convolution. No parameter trains any more.
        mmpretrain's ``reparameterize_model.py`` calls it by this name.

        Args:
            to_conv (float, optional): Attention that depends on positions alone is replaced by its convolution where
                that errs by no more than this, for inputs of norm 1, see :class:`~attncnn_plugin.convert.ConvFit`;
                0 up to rounding is for heads that attend to a single pixel. Defaults to None, no replacement.
            kernel_size (int): Kernel size of these convolutions. Defaults to 3.
            size (tuple[int, int], optional): The grid, in tokens, on which they are fitted and for which the error
                holds. Defaults to 16 pixels an axis, or what the position tables cover.

        Returns:
            Deployment: What was done.

        Raises:
            TypeError: The attention of a block is none of this package. Nothing is changed then, nor below.
            RuntimeError: A linear map is no plain linear layer any more.
            ValueError: ``to_conv`` is negative, or ``size`` is larger than the position tables.
        """
        if to_conv is not None and not to_conv >= 0:
            raise ValueError(f'to_conv={to_conv} must be at least 0, or None for no convolution')
        for i, block in enumerate(self.blocks):
            block.check_deployable(f'blocks.{i}.')
            largest = getattr(block.attn, 'max_size', None)
            if to_conv is not None and size is not None and largest and (size[0] > largest[0] or size[1] > largest[1]):
                raise ValueError(
                    f'size={size} is larger than the {largest} that the position tables of blocks.{i} were built for'
                )
        before = sum(p.numel() for p in self.parameters())
        merged = tuple(i for i, block in enumerate(self.blocks) if not block.is_deployed)
        for block in self.blocks:
            block.switch_to_deploy()
        convolutions = {}
        for i, block in enumerate(self.blocks):
            fit = None if to_conv is None else block.to_conv(kernel_size, size, to_conv)
            if fit is not None:
                convolutions[i] = fit
        self.eval().requires_grad_(False)
        return Deployment(merged, before, sum(p.numel() for p in self.parameters()), convolutions)

    def prune_heads(
        self,
        heads: Dict[int, Sequence[int]],
        allow_empty: bool = False,
    ) -> Dict[nn.Parameter, Replacement]:
        """Removes heads of some blocks, see :meth:`~attncnn_plugin.layers.prunable_heads.PrunableHeads.prune_heads`.

        Args:
            heads (dict[int, Sequence[int]]): The heads to remove of each block, counted among those it has now.
            allow_empty (bool): Whether a block may lose all heads, which leaves its attention the bias. Defaults to
                False.

        Returns:
            dict[Parameter, Replacement]: What took the place of each old parameter.

        Raises:
            ValueError: A block or a head that is not there, or all heads of a block; nothing is removed then.
        """
        for block, indices in heads.items():
            if not isinstance(block, int) or not 0 <= block < len(self.blocks):
                raise ValueError(f'heads={heads} names block {block!r}, but the blocks are 0 to {len(self.blocks) - 1}')
            if isinstance(self.blocks[block].attn, GridConvolution):
                raise ValueError(f'heads={heads} names block {block}, whose attention was replaced by a convolution')
            self.blocks[block].attn.check_heads(indices, allow_empty)
        replaced = {}
        for block, indices in heads.items():
            replaced.update(self.blocks[block].attn.prune_heads(indices, allow_empty))
        return replaced
