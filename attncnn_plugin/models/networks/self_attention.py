"""The self-attention network of Cordonnier et al. 2020 (C20), behind the mmpretrain backbones and the timm models."""

from typing import Callable, Tuple, Union

import torch
from timm.layers import DropPath, Mlp, calculate_drop_path_rates, to_2tuple
from torch import Tensor, nn

from ...layers.patches import image_to_patches
from ...layers.structure import Restructurable, StateDict, StructureError
from .grid_network import GridNetwork, check_channels, check_drop_path_rate


class SpaceToDepthStem(nn.Module):
    """Invertible downsampling, r x r pixels to r²·C channels, and a linear map to D channels (C20, 4.1).

    Args:
        in_chans (int): Channels C of the image.
        embed_dim (int): Channels D of a token.
        reduction (int): Side r of the square of pixels that becomes a token, C20's invertible pooling width (Table 2).
            Defaults to 2.
    """

    def __init__(self, in_chans: int, embed_dim: int, reduction: int = 2, device=None, dtype=None) -> None:
        super().__init__()
        self.in_chans = in_chans
        self.reduction = reduction
        self.proj = nn.Linear(in_chans * reduction**2, embed_dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, H/r, W/r, D)``.

        Raises:
            ValueError: The image does not have the stem's channels, or its height and width are no multiples of r.
        """
        check_channels(x, self.in_chans)
        return self.proj(image_to_patches(x, (self.reduction, self.reduction)))


def token_grid(img_size: Union[int, Tuple[int, int]], reduction: int) -> Tuple[int, int]:
    """Height and width in tokens of an image, for position tables.

    Raises:
        ValueError: The image cannot be cut into tokens.
    """
    height, width = to_2tuple(img_size)
    if reduction < 1 or min(height, width) < reduction or height % reduction or width % reduction:
        raise ValueError(
            f'img_size={img_size} must be a multiple of reduction={reduction}, the side of the squares of pixels that '
            'become tokens'
        )
    return height // reduction, width // reduction


class SelfAttentionBlock(nn.Module):
    """Attention, linear map, residual and norm, then feed-forward network, residual and norm (post-norm).

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

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.drop_path(self.proj_drop(self.proj(self.attn(x)))))
        return self.norm2(x + self.drop_path(self.mlp(x)))


class SelfAttentionNetwork(Restructurable, GridNetwork):
    """Stem and blocks: images ``(B, C, H, W)`` to features ``(B, H/r, W/r, D)``.

    Args:
        attn_layer (Callable): Makes the attention of a block: called as ``attn_layer(dim, num_heads, attn_drop=…,
            device=…, dtype=…)``, it gives a module ``(B, H, W, D)`` to the same.
        embed_dim (int): Channels D. Defaults to 400.
        depth (int): Number of blocks. Defaults to 6.
        num_heads (int): Number of heads N_h of a block. Defaults to 9.
        mlp_dim (int): Hidden channels of the feed-forward networks. Defaults to 512.
        in_chans (int): Channels C of the image. Defaults to 3.
        proj_drop_rate (float): Dropout rate of hidden states. Defaults to 0.
        attn_drop_rate (float): Dropout rate of attention probabilities. Defaults to 0.
        drop_path_rate (float): Stochastic depth rate of the last block, rising linearly from 0. Defaults to 0.
        reduction (int): Side r of the square of pixels that becomes a token. Defaults to 2.
        share_position (bool): Whether all blocks have the same position tables R and C, as the text of C20 has it (at
            eq. 8), or each its own, as the released code has for its results. A state dict has them once a block all
            the same. Defaults to False.

    Raises:
        ValueError: A size below 1, a rate out of range, or ``share_position`` without learned position tables.
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
        reduction: int = 2,
        share_position: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        if min(embed_dim, depth, mlp_dim, in_chans, reduction) < 1:
            raise ValueError(
                f'embed_dim={embed_dim}, depth={depth}, mlp_dim={mlp_dim}, in_chans={in_chans} and '
                f'reduction={reduction} must be at least 1'
            )
        check_drop_path_rate(drop_path_rate)
        self.stem = SpaceToDepthStem(in_chans, embed_dim, reduction, **dd)
        self.blocks = nn.Sequential(
            *[
                SelfAttentionBlock(
                    embed_dim,
                    attn_layer(embed_dim, num_heads, attn_drop=attn_drop_rate, **dd),
                    mlp_dim,
                    proj_drop=proj_drop_rate,
                    drop_path=drop_path,
                    **dd,
                )
                for drop_path in calculate_drop_path_rates(drop_path_rate, depth)
            ]
        )
        self.norm = nn.Identity()  # every block ends in a norm
        self.share_position = share_position
        if share_position:
            self._share_position_tables()
        self._follow_state_dicts()

    def _share_position_tables(self) -> None:
        layers = [block.attn for block in self.blocks]
        tables = getattr(layers[0], 'position_tables', None)
        if tables is None or not list(tables.parameters()):
            raise ValueError(
                'share_position=True is for learned position tables, which the attention of the blocks does not have: '
                f'{layers[0]}'
            )
        for layer in layers[1:]:
            layer.share_position_tables(tables)

    @property
    def structure(self) -> bool:
        """Whether the blocks share their position tables."""
        return self.share_position

    def structure_in(self, state_dict: StateDict, prefix: str) -> bool:
        """That of the network, which loads shared tables either way.

        Raises:
            StructureError: The tables of the blocks differ, but the network has one for all of them.
        """
        if self.share_position:
            first = {id(p): name for name, p in self.blocks.named_parameters()}
            for name, parameter in self.blocks.named_parameters(remove_duplicate=False):
                pair = name, first[id(parameter)]
                tables = [state_dict.get(f'{prefix}blocks.{own}') for own in pair]
                if None not in tables and name not in first.values() and not torch.equal(*tables):
                    raise StructureError(
                        f'{prefix}blocks.{pair[0]} and {prefix}blocks.{pair[1]} of the state dict differ: its blocks '
                        'have position tables of their own, so build the network with share_position=False'
                    )
        return self.share_position
