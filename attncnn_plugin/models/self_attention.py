"""Self-attention networks that can be convolutional networks (Cordonnier et al. 2020, C20).

Paper: `On the Relationship between Self-Attention and Convolutional Layers` - https://arxiv.org/abs/1911.03584

This module registers them with timm: ``timm.create_model('sa_quadratic_cifar')``.
"""

from typing import Any, Callable, Dict

from timm.layers import DropPath, Mlp, calculate_drop_path_rates
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from ..attention import ContentAttention, GeneralizedQuadraticAttention, LearnedAttention, QuadraticAttention
from .interface import CIFAR, NETWORK, SpaceToDepthStem, TimmNetwork, build, check_sizes, token_grid, trained

__all__ = ['SelfAttentionBlock', 'SelfAttentionNetwork']


class SelfAttentionBlock(nn.Module):
    """Mixes tokens by attention, then channels by an MLP, each with a residual and then a norm (post-norm)."""

    def __init__(self, dim: int, attn: nn.Module, mlp_dim: int, proj_drop: float, drop_path: float, **dd: Any) -> None:
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


class SelfAttentionNetwork(TimmNetwork):
    """Classifies images by blocks of attention over squares of r×r pixels (C20, 4.1).

    It also loads state dicts of pruned networks, and resizes learned position tables of another size.

    Args:
        attn_layer (Callable): Builds the attention of a block, ``(B, H, W, D)`` to the same: called as
            ``attn_layer(dim, num_heads, attn_drop=…, device=…, dtype=…, **attn_kwargs)``.
        embed_dim (int): Channels D. Defaults to 400.
        depth (int): Number of blocks. Defaults to 6.
        num_heads (int): Number of heads N_h of a block. Defaults to 9.
        mlp_dim (int): Hidden channels of the feed-forward networks. Defaults to 512.
        num_classes (int): Number of classes, 0 for pooled features. Defaults to 10.
        in_chans (int): Channels C of the image. Defaults to 3.
        reduction (int): Side r of the square of pixels that becomes a token. Defaults to 2.
        global_pool (str): timm's name of the pooling, ``''`` for none. Defaults to ``'avg'``.
        drop_rate (float): Dropout rate before the classifier. Defaults to 0.
        proj_drop_rate (float): Dropout rate of hidden states; 0.1 in C20. Defaults to 0.
        attn_drop_rate (float): Dropout rate of attention probabilities; 0.1 in C20. Defaults to 0.
        drop_path_rate (float): Stochastic depth rate of the last block, rising linearly from 0. Defaults to 0.
        attn_kwargs: Further arguments of the attention.

    Raises:
        ValueError: A size below 1, or a rate out of range.
        TypeError: An argument that neither the network nor its attention has.
    """

    undecayed = ('encoding.center', 'encoding.sqrt_precision')  # as in the released code of C20

    def __init__(
        self,
        attn_layer: Callable[..., nn.Module] = QuadraticAttention,
        embed_dim: int = 400,
        depth: int = 6,
        num_heads: int = 9,
        mlp_dim: int = 512,
        num_classes: int = 10,
        in_chans: int = 3,
        reduction: int = 2,
        global_pool: str = 'avg',
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device=None,
        dtype=None,
        **attn_kwargs,
    ) -> None:
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        super().__init__()
        sizes = dict(embed_dim=embed_dim, depth=depth, mlp_dim=mlp_dim, in_chans=in_chans, reduction=reduction)
        check_sizes(drop_path_rate, **sizes)
        self.stem = SpaceToDepthStem(in_chans, reduction, nn.Linear(in_chans * reduction**2, embed_dim, **dd))
        self.blocks = nn.Sequential()
        for drop_path in calculate_drop_path_rates(drop_path_rate, depth):
            attn = attn_layer(embed_dim, num_heads, attn_drop=attn_drop_rate, **attn_kwargs, **dd)
            self.blocks.append(SelfAttentionBlock(embed_dim, attn, mlp_dim, proj_drop_rate, drop_path, **dd))
        self.norm = nn.Identity()  # every block ends in a norm
        self._init_interface_of_timm(in_chans, embed_dim, reduction, num_classes, global_pool, drop_rate, **dd)


COMMON = {
    **NETWORK,
    **CIFAR,
    'pool_size': (16, 16),
    'paper_ids': 'arXiv:1911.03584',
    'paper_name': 'On the Relationship between Self-Attention and Convolutional Layers',
}
TABLES = {**COMMON, 'fixed_input_size': True}  # there is an img_size
default_cfgs = generate_default_cfgs(
    {
        **{f'sa_{name}_cifar.untrained': COMMON for name in ('quadratic', 'quadratic16', 'generalized')},
        **{f'sa_{name}_cifar.untrained': TABLES for name in ('learned', 'learned_content')},
        **trained('sa_quadratic_small', COMMON),
        **trained('sa_generalized_small', COMMON),
        **trained('sa_learned_small', TABLES),
        **trained('sa_learned_content_small', TABLES),
    }
)


def _create(variant: str, pretrained: bool, attn_layer: Callable[..., nn.Module], **kwargs) -> SelfAttentionNetwork:
    network = _with_tables if attn_layer in (LearnedAttention, ContentAttention) else SelfAttentionNetwork
    return build(network, variant, pretrained, attn_layer=attn_layer, **kwargs)


def _with_tables(img_size=32, **kwargs) -> SelfAttentionNetwork:  # timm notes the size
    """Returns a network with learned position tables, which are made for the grid of the largest image."""
    return SelfAttentionNetwork(max_size=token_grid(img_size, kwargs.get('reduction', 2)), **kwargs)


@register_model
def sa_quadratic_cifar(pretrained: bool = False, **kwargs) -> SelfAttentionNetwork:
    """Quadratic encoding, 9 heads: 12.09M parameters at 10 classes (C20, Table 1).

    The arguments, of all models here, are those of :class:`SelfAttentionNetwork` but for ``attn_layer``.
    """
    return _create('sa_quadratic_cifar', pretrained, QuadraticAttention, **kwargs)


@register_model
def sa_quadratic16_cifar(pretrained: bool = False, **kwargs) -> SelfAttentionNetwork:
    """Quadratic encoding, 16 heads (C20, appendix F, Figure 14); arguments as of :func:`sa_quadratic_cifar`."""
    return _create('sa_quadratic16_cifar', pretrained, QuadraticAttention, **{'num_heads': 16, **kwargs})


@register_model
def sa_generalized_cifar(pretrained: bool = False, **kwargs) -> SelfAttentionNetwork:
    """Generalized quadratic encoding, 9 heads: 12.09M parameters at 10 classes (C20, appendix E)."""
    return _create('sa_generalized_cifar', pretrained, GeneralizedQuadraticAttention, **kwargs)


@register_model
def sa_learned_cifar(pretrained: bool = False, **kwargs) -> SelfAttentionNetwork:
    """Learned encoding, 9 heads: 12.28M parameters at 10 classes (C20, Table 1).

    Args:
        img_size (int | tuple[int, int]): Height and width of the largest image. Defaults to 32.
    """
    return _create('sa_learned_cifar', pretrained, LearnedAttention, **kwargs)


@register_model
def sa_learned_content_cifar(pretrained: bool = False, **kwargs) -> SelfAttentionNetwork:
    """Content and learned relative position, 9 heads: 29.48M parameters at 10 classes (C20, Table 1).

    Args:
        img_size (int | tuple[int, int]): Height and width of the largest image. Defaults to 32.
    """
    return _create('sa_learned_content_cifar', pretrained, ContentAttention, **kwargs)


SMALL = dict(embed_dim=64, depth=4, mlp_dim=128)


@register_model
def sa_quadratic_small(pretrained: bool = False, **kwargs) -> SelfAttentionNetwork:
    """Quadratic encoding, 9 heads, 4 blocks of 64 channels: 233,270 parameters at 10 classes."""
    return _create('sa_quadratic_small', pretrained, QuadraticAttention, **{**SMALL, **kwargs})


@register_model
def sa_generalized_small(pretrained: bool = False, **kwargs) -> SelfAttentionNetwork:
    """Generalized quadratic encoding, 9 heads, 4 blocks of 64 channels: 233,378 parameters at 10 classes."""
    return _create('sa_generalized_small', pretrained, GeneralizedQuadraticAttention, **{**SMALL, **kwargs})


@register_model
def sa_learned_small(pretrained: bool = False, **kwargs) -> SelfAttentionNetwork:
    """Learned encoding, 9 heads, 4 blocks of 64 channels: 253,642 parameters at 10 classes.

    The arguments are those of :func:`sa_learned_cifar`.
    """
    return _create('sa_learned_small', pretrained, LearnedAttention, **{**SMALL, **kwargs})


@register_model
def sa_learned_content_small(pretrained: bool = False, **kwargs) -> SelfAttentionNetwork:
    """Content and learned relative position, 9 heads, 4 blocks of 64 channels: 540,618 parameters at 10 classes.

    The arguments are those of :func:`sa_learned_content_cifar`.
    """
    return _create('sa_learned_content_small', pretrained, ContentAttention, **{**SMALL, **kwargs})
