"""timm entry points of the self-attention networks of Cordonnier et al. 2020.

Registered with timm as this module is imported: ``timm.create_model('sa_quadratic_cifar')``.
"""

from functools import partial
from typing import Any, Callable, Dict, Optional, Sequence, Set, Tuple, Union

import torch
from timm.layers import to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, register_notrace_module
from torch import nn

from ...layers import ContentAttention, GeneralizedQuadraticAttention, LearnedAttention, QuadraticAttention
from ..networks import SelfAttentionNetwork, SpaceToDepthStem
from .grid_classifier import GridClassifier

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
        attn_impl: str = 'auto',
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
            attn_impl=attn_impl,
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


default_cfgs = generate_default_cfgs(
    {
        'sa_quadratic_cifar.untrained': _cfg(),
        'sa_quadratic16_cifar.untrained': _cfg(),
        'sa_generalized_cifar.untrained': _cfg(),
        'sa_learned_cifar.untrained': _cfg(),
        'sa_learned_content_cifar.untrained': _cfg(),
    }
)


def _create(variant: str, pretrained: bool, **kwargs) -> SelfAttentionClassifier:
    out_indices = kwargs.pop('out_indices', 3)
    return build_model_with_cfg(
        SelfAttentionClassifier,
        variant,
        pretrained,
        feature_cfg=dict(out_indices=out_indices, feature_cls='getter'),
        **kwargs,
    )


def _grid(img_size: Union[int, Tuple[int, int]]) -> Tuple[int, int]:
    height, width = to_2tuple(img_size)
    return height // SpaceToDepthStem.reduction, width // SpaceToDepthStem.reduction


@register_model
def sa_quadratic_cifar(pretrained: bool = False, **kwargs) -> SelfAttentionClassifier:
    """Quadratic encoding, 9 heads: 12.09M parameters at 10 classes (C20, Table 1)."""
    return _create('sa_quadratic_cifar', pretrained, **dict(dict(attn_layer=QuadraticAttention), **kwargs))


@register_model
def sa_quadratic16_cifar(pretrained: bool = False, **kwargs) -> SelfAttentionClassifier:
    """Quadratic encoding, 16 heads (C20, appendix F, Figure 14)."""
    model_args = dict(attn_layer=QuadraticAttention, num_heads=16)
    return _create('sa_quadratic16_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def sa_generalized_cifar(pretrained: bool = False, **kwargs) -> SelfAttentionClassifier:
    """Generalized quadratic encoding, 9 heads: 12.09M parameters at 10 classes (C20, appendix E)."""
    model_args = dict(attn_layer=GeneralizedQuadraticAttention)
    return _create('sa_generalized_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def sa_learned_cifar(
    pretrained: bool = False,
    img_size: Union[int, Tuple[int, int]] = 32,
    position: str = 'relative_learned',
    **kwargs,
) -> SelfAttentionClassifier:
    """Learned encoding, 9 heads: 12.28M parameters at 10 classes (C20, Table 1).

    Args:
        img_size (int | tuple[int, int]): Height and width of the largest image. Defaults to 32.
        position (str): ``'relative_learned'`` or ``'relative_sinusoidal'``. Defaults to ``'relative_learned'``.
    """
    model_args = dict(attn_layer=partial(LearnedAttention, max_size=_grid(img_size), position=position))
    return _create('sa_learned_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def sa_learned_content_cifar(
    pretrained: bool = False,
    img_size: Union[int, Tuple[int, int]] = 32,
    terms: Optional[Sequence[str]] = None,
    position: str = 'relative_learned',
    **kwargs,
) -> SelfAttentionClassifier:
    """Content and learned relative position, 9 heads: 29.48M parameters at 10 classes (C20, Table 1).

    Args:
        img_size (int | tuple[int, int]): Height and width of the largest image. Defaults to 32.
        terms (Sequence[str], optional): Terms of the score, see
            :class:`~attncnn_plugin.layers.ContentAttention`. Defaults to ``('qk', 'qr')``.
        position (str): Position encoding, see the same class. Defaults to ``'relative_learned'``.
    """
    attn_layer = partial(ContentAttention, max_size=_grid(img_size), terms=terms, position=position)
    return _create('sa_learned_content_cifar', pretrained, **dict(dict(attn_layer=attn_layer), **kwargs))
