"""The self-attention network of Cordonnier et al. 2020, behind the mmpretrain backbones and the timm models."""
from typing import Callable, List, Optional, Sequence, Tuple, Union

from timm.layers import DropPath, Mlp, calculate_drop_path_rates
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor, nn


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


class SelfAttentionNetwork(nn.Module):
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

    output_fmt = 'NHWC'  # of forward_features, as timm says it

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
        if not 0 <= drop_path_rate < 1:
            raise ValueError(f'drop_path_rate={drop_path_rate} must be from 0 to below 1')
        self.grad_checkpointing = False
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

    def forward_features(self, x: Tensor) -> Tensor:
        """Images ``(B, C, H, W)`` to the features of the last block, ``(B, H/2, W/2, D)``."""
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x) if self.grad_checkpointing else block(x)
        return x

    def forward_intermediates(
            self,
            x: Tensor,
            indices: Optional[Union[int, Sequence[int]]] = None,
            norm: bool = False,
            stop_early: bool = False,
            output_fmt: str = 'NCHW',
            intermediates_only: bool = False,
    ) -> Union[List[Tensor], Tuple[Tensor, List[Tensor]]]:
        """Features of several blocks.

        Args:
            x (Tensor): Images ``(B, C, H, W)``.
            indices (int | Sequence[int], optional): The last n blocks for an int, the blocks of a sequence,
                all of them for None, the default.
            norm (bool): Not used: every block ends in a norm.
            stop_early (bool): Whether to leave out the blocks after the last wanted one. Defaults to False.
            output_fmt (str): ``'NCHW'`` or ``'NHWC'`` intermediates. Defaults to ``'NCHW'``.
            intermediates_only (bool): Whether to return the intermediates alone. Defaults to False.

        Returns:
            The features of the last block that ran, ``(B, H/2, W/2, D)``, and the list of intermediates in the
            order of the blocks; or the list alone.
        """
        if output_fmt not in ('NCHW', 'NHWC'):
            raise ValueError(f"output_fmt={output_fmt!r} is unknown: choose 'NCHW' or 'NHWC'")
        take_indices, last = feature_take_indices(len(self.blocks), indices)
        intermediates = []
        x = self.stem(x)
        for i, block in enumerate(self.blocks[:last + 1] if stop_early else self.blocks):
            x = checkpoint(block, x) if self.grad_checkpointing else block(x)
            if i in take_indices:
                intermediates.append(x.permute(0, 3, 1, 2) if output_fmt == 'NCHW' else x)
        return intermediates if intermediates_only else (x, intermediates)
