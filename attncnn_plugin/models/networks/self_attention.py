"""The self-attention network of Cordonnier et al. 2020, behind the mmpretrain backbones and the timm models."""
from typing import Callable, Dict, Sequence

from timm.layers import DropPath, Mlp, calculate_drop_path_rates
from torch import Tensor, nn

from ...layers.heads import Replacement
from .grid import GridNetwork, check_drop_path_rate


class SpaceToDepthStem(nn.Module):
    """Invertible 2x2 downsampling, C to 4·C channels, and a linear map to D channels (C20, 4.1).

    Args:
        in_chans (int): Channels C of the image.
        embed_dim (int): Channels D of a token.
    """

    reduction = 2

    def __init__(self, in_chans: int, embed_dim: int, device=None, dtype=None) -> None:
        super().__init__()
        self.proj = nn.Linear(in_chans * self.reduction ** 2, embed_dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, H/2, W/2, D)``.

        Raises:
            ValueError: The image does not have the stem's channels, or not an even height and width.
        """
        channels = self.proj.in_features // self.reduction ** 2
        if x.ndim != 4 or x.shape[1] != channels:
            raise ValueError(f'the input has shape {tuple(x.shape)}, but (B, {channels}, H, W) is expected')
        if x.shape[2] % self.reduction or x.shape[3] % self.reduction:
            raise ValueError(
                f'the image of {x.shape[2]}x{x.shape[3]} pixels cannot be cut into blocks of 2x2: '
                'resize or pad it to an even height and width')
        batch, _, height, width = x.shape
        grid = height // self.reduction, width // self.reduction
        x = x.reshape(batch, channels, grid[0], self.reduction, grid[1], self.reduction)
        x = x.permute(0, 2, 4, 1, 3, 5).reshape(batch, *grid, self.proj.in_features)
        return self.proj(x)


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
            proj_drop: float = 0.,
            drop_path: float = 0.,
            device=None,
            dtype=None,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.attn = attn
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)
        self.norm1 = nn.LayerNorm(dim, eps=1e-12, **dd)
        self.mlp = Mlp(dim, mlp_dim, drop=(0., proj_drop), **dd)
        self.norm2 = nn.LayerNorm(dim, eps=1e-12, **dd)
        self.drop_path = DropPath(drop_path) if drop_path > 0. else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.drop_path(self.proj_drop(self.proj(self.attn(x)))))
        return self.norm2(x + self.drop_path(self.mlp(x)))


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
            :class:`~attncnn_plugin.layers.attention.GridAttention`. Defaults to ``'auto'``.
    """

    def __init__(
            self,
            attn_layer: Callable[..., nn.Module],
            embed_dim: int = 400,
            depth: int = 6,
            num_heads: int = 9,
            mlp_dim: int = 512,
            in_chans: int = 3,
            proj_drop_rate: float = 0.,
            attn_drop_rate: float = 0.,
            drop_path_rate: float = 0.,
            attn_impl: str = 'auto',
            device=None,
            dtype=None,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        if min(embed_dim, depth, mlp_dim, in_chans) < 1:
            raise ValueError(
                f'embed_dim={embed_dim}, depth={depth}, mlp_dim={mlp_dim} and in_chans={in_chans} must be at least 1')
        check_drop_path_rate(drop_path_rate)
        self.stem = SpaceToDepthStem(in_chans, embed_dim, **dd)
        self.blocks = nn.Sequential(*[
            SelfAttentionBlock(
                embed_dim,
                attn_layer(embed_dim, num_heads, attn_drop=attn_drop_rate, attn_impl=attn_impl, **dd),
                mlp_dim,
                proj_drop=proj_drop_rate,
                drop_path=drop_path,
                **dd) for drop_path in calculate_drop_path_rates(drop_path_rate, depth)
        ])
        self.norm = nn.Identity()  # every block ends in a norm

    def prune_heads(
            self,
            heads: Dict[int, Sequence[int]],
            allow_empty: bool = False,
    ) -> Dict[nn.Parameter, Replacement]:
        """Removes heads of some blocks, see :meth:`~attncnn_plugin.layers.heads.PrunableHeads.prune_heads`.

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
            self.blocks[block].attn.check_heads(indices, allow_empty)
        replaced = {}
        for block, indices in heads.items():
            replaced.update(self.blocks[block].attn.prune_heads(indices, allow_empty))
        return replaced
