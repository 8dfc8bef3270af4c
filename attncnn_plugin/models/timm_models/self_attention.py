"""timm entry points of the self-attention networks of Cordonnier et al. 2020.

Registered with timm as this module is imported: ``timm.create_model('sa_quadratic_cifar')``.
"""

from functools import partial
from typing import Any, Callable, Dict, Set, Tuple, Union

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, register_notrace_module
from torch import nn

from ...layers import ContentAttention, GeneralizedQuadraticAttention, LearnedAttention, QuadraticAttention
from ...weights import CLASSES, weights_file
from ..networks import SelfAttentionNetwork, SpaceToDepthStem, token_grid
from .grid_classifier import GridClassifier, checkpoint_filter_fn

__all__ = ['SelfAttentionClassifier']

# Their forward passes look at sizes, which a symbolic trace does not know.
for _module in (
    ContentAttention,
    GeneralizedQuadraticAttention,
    LearnedAttention,
    QuadraticAttention,
    SpaceToDepthStem,
):
    register_notrace_module(_module)


class SelfAttentionClassifier(GridClassifier, SelfAttentionNetwork):
    """A self-attention network with timm's interface: mean over the grid and a linear classifier on top.

    Args:
        num_classes (int): Number of classes, 0 for pooled features. Defaults to 10.
        global_pool (str): timm's name of the pooling, ``''`` for none. Defaults to ``'avg'``.
        drop_rate (float): Dropout rate before the classifier. Defaults to 0.
        attn_layer, embed_dim, …: See :class:`~attncnn_plugin.models.networks.SelfAttentionNetwork`.
    """

    def __init__(
        self,
        attn_layer: Callable[..., nn.Module],
        embed_dim: int = 400,
        depth: int = 6,
        num_heads: int = 9,
        mlp_dim: int = 512,
        num_classes: int = 10,
        in_chans: int = 3,
        global_pool: str = 'avg',
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        reduction: int = 2,
        share_position: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__(
            attn_layer=attn_layer,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_dim=mlp_dim,
            in_chans=in_chans,
            proj_drop_rate=proj_drop_rate,
            attn_drop_rate=attn_drop_rate,
            drop_path_rate=drop_path_rate,
            reduction=reduction,
            share_position=share_position,
            **dd,
        )
        self._add_head(embed_dim, num_classes, in_chans, global_pool, drop_rate, **dd)

    @torch.jit.ignore
    def no_weight_decay(self) -> Set[str]:
        """The parameters without weight decay: centres and widths of the heads (released code of C20)."""
        return {
            name for name, _ in self.named_parameters() if name.endswith(('encoding.center', 'encoding.sqrt_precision'))
        }


def _cfg(**kwargs) -> Dict[str, Any]:
    return {
        'num_classes': 10,
        'input_size': (3, 32, 32),
        'pool_size': (16, 16),
        'crop_pct': 1.0,
        'interpolation': 'bicubic',
        'mean': (0.4914, 0.4822, 0.4465),
        'std': (0.2023, 0.1994, 0.2010),
        'first_conv': 'stem.proj',
        'classifier': 'head.fc',
        'license': 'apache-2.0',
        'paper_ids': 'arXiv:1911.03584',
        'paper_name': 'On the Relationship between Self-Attention and Convolutional Layers',
        **kwargs,
    }


def _small_cfg(name: str) -> Dict[str, Any]:
    """Of a small network, whose weights can be in the package."""
    return _cfg(file=weights_file(name), label_names=CLASSES, first_conv=())


default_cfgs = generate_default_cfgs(
    {
        'sa_quadratic_cifar.untrained': _cfg(),
        'sa_quadratic16_cifar.untrained': _cfg(),
        'sa_generalized_cifar.untrained': _cfg(),
        'sa_learned_cifar.untrained': _cfg(),
        'sa_learned_content_cifar.untrained': _cfg(),
        **{
            f'{name}.cifar10': _small_cfg(name)
            for name in ('sa_quadratic_small', 'sa_generalized_small', 'sa_learned_small', 'sa_learned_content_small')
        },
    }
)


@register_model
def sa_quadratic_cifar(pretrained: bool = False, **kwargs) -> SelfAttentionClassifier:
    """Quadratic encoding, 9 heads: 12.09M parameters at 10 classes (C20, Table 1).

    Args:
        head_dim (int, optional): Channels of a head's values. Defaults to None, values that are the input itself.
        center_std, spread_std (float): Standard deviations of the initial centres and of the noise in the initial
            widths, see :class:`~attncnn_plugin.layers.QuadraticEncoding`. Default to 2 and 0.01.
        reduction (int): Side of the square of pixels that becomes a token, for all models here. Defaults to 2.
    """
    return _create('sa_quadratic_cifar', pretrained, QuadraticAttention, **kwargs)


@register_model
def sa_quadratic16_cifar(pretrained: bool = False, **kwargs) -> SelfAttentionClassifier:
    """Quadratic encoding, 16 heads (C20, appendix F, Figure 14); arguments as of :func:`sa_quadratic_cifar`."""
    return _create('sa_quadratic16_cifar', pretrained, QuadraticAttention, **dict(dict(num_heads=16), **kwargs))


@register_model
def sa_generalized_cifar(pretrained: bool = False, **kwargs) -> SelfAttentionClassifier:
    """Generalized quadratic encoding, 9 heads: 12.09M parameters at 10 classes (C20, appendix E).

    The arguments are those of :func:`sa_quadratic_cifar`.
    """
    return _create('sa_generalized_cifar', pretrained, GeneralizedQuadraticAttention, **kwargs)


@register_model
def sa_learned_cifar(
    pretrained: bool = False, img_size: Union[int, Tuple[int, int]] = 32, **kwargs
) -> SelfAttentionClassifier:
    """Learned encoding, 9 heads: 12.28M parameters at 10 classes (C20, Table 1).

    Args:
        img_size (int | tuple[int, int]): Height and width of the largest image. Defaults to 32.
        position (str): ``'relative_learned'`` or ``'relative_sinusoidal'``. Defaults to ``'relative_learned'``.
        position_dim (int, optional): Length of r_δ, half for rows and half for columns, see
            :class:`~attncnn_plugin.layers.LearnedAttention`. Defaults to twice ``embed_dim``.
        share_position (bool): Whether all blocks have the same position tables, 12.15M parameters. Defaults to False.
        head_dim (int, optional): Channels of a head's values. Defaults to None, values that are the input itself.
    """
    max_size = token_grid(img_size, kwargs.get('reduction', 2))
    return _create('sa_learned_cifar', pretrained, LearnedAttention, max_size=max_size, **kwargs)


@register_model
def sa_learned_content_cifar(
    pretrained: bool = False, img_size: Union[int, Tuple[int, int]] = 32, **kwargs
) -> SelfAttentionClassifier:
    """Content and learned relative position, 9 heads: 29.48M parameters at 10 classes (C20, Table 1).

    Args:
        img_size (int | tuple[int, int]): Height and width of the largest image. Defaults to 32.
        terms, position, position_dim, qk_dim, qk_bias, center_std, spread_std, head_dim: Of the scores and
            values, see :class:`~attncnn_plugin.layers.ContentAttention`. Default to q·k + q·r_δ of the paper.
        share_position (bool): Whether all blocks have the same position tables. Defaults to False.
    """
    max_size = token_grid(img_size, kwargs.get('reduction', 2))
    return _create('sa_learned_content_cifar', pretrained, ContentAttention, max_size=max_size, **kwargs)


SMALL = dict(embed_dim=64, depth=4, mlp_dim=128)


@register_model
def sa_quadratic_small(pretrained: bool = False, **kwargs) -> SelfAttentionClassifier:
    """Quadratic encoding, 9 heads, 4 blocks of 64 channels: 233,270 parameters at 10 classes.

    The arguments are those of :func:`sa_quadratic_cifar`.
    """
    return _create('sa_quadratic_small', pretrained, QuadraticAttention, **dict(SMALL, **kwargs))


@register_model
def sa_generalized_small(pretrained: bool = False, **kwargs) -> SelfAttentionClassifier:
    """Generalized quadratic encoding, 9 heads, 4 blocks of 64 channels: 233,378 parameters at 10 classes.

    The arguments are those of :func:`sa_quadratic_cifar`.
    """
    return _create('sa_generalized_small', pretrained, GeneralizedQuadraticAttention, **dict(SMALL, **kwargs))


@register_model
def sa_learned_small(
    pretrained: bool = False, img_size: Union[int, Tuple[int, int]] = 32, **kwargs
) -> SelfAttentionClassifier:
    """Learned encoding, 9 heads, 4 blocks of 64 channels: 253,642 parameters at 10 classes.

    The arguments are those of :func:`sa_learned_cifar`.
    """
    max_size = token_grid(img_size, kwargs.get('reduction', 2))
    return _create('sa_learned_small', pretrained, LearnedAttention, max_size=max_size, **dict(SMALL, **kwargs))


@register_model
def sa_learned_content_small(
    pretrained: bool = False, img_size: Union[int, Tuple[int, int]] = 32, **kwargs
) -> SelfAttentionClassifier:
    """Content and learned relative position, 9 heads, 4 blocks of 64 channels: 540,618 parameters at 10 classes.

    The arguments are those of :func:`sa_learned_content_cifar`.
    """
    max_size = token_grid(img_size, kwargs.get('reduction', 2))
    return _create('sa_learned_content_small', pretrained, ContentAttention, max_size=max_size, **dict(SMALL, **kwargs))


# Arguments of the layers; the others are those of the model.
LAYER_ARGS = (
    'center_std',
    'head_dim',
    'max_size',
    'position',
    'position_dim',
    'qk_bias',
    'qk_dim',
    'spread_std',
    'terms',
)


def _create(variant: str, pretrained: bool, attention: Callable[..., nn.Module], **kwargs) -> SelfAttentionClassifier:
    out_indices = kwargs.pop('out_indices', 3)
    of_layers = {name: kwargs.pop(name) for name in LAYER_ARGS if name in kwargs}
    return build_model_with_cfg(
        SelfAttentionClassifier,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls='getter'),
        **dict(dict(attn_layer=partial(attention, **of_layers)), **kwargs),
    )
