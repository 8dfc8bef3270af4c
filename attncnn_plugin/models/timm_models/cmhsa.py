"""timm entry points of CMHSA, the vision transformers of Li et al. 2021 that begin as convolutional networks.

Registered with timm as this module is imported: ``timm.create_model('cmhsa3_patch16_224')``.
"""

from typing import Any, Dict, Optional, Set, Tuple, Union

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, register_notrace_module

from ...convert.head_widths import HeadDim
from ...layers import PatchAttention
from ...weights import CLASSES, weights_file
from ..networks import CMHSANetwork, PatchConvolution, PatchStem
from .grid_classifier import GridClassifier, checkpoint_filter_fn

__all__ = ['CMHSAClassifier']

# Their forward passes look at sizes, which a symbolic trace does not know.
for _module in (PatchAttention, PatchConvolution, PatchStem):
    register_notrace_module(_module)


class CMHSAClassifier(GridClassifier, CMHSANetwork):
    """CMHSA with timm's interface: mean over the tokens and a linear classifier on top.

    Args:
        num_classes (int): Number of classes, 0 for pooled features. Defaults to 1000.
        global_pool (str): timm's name of the pooling, ``''`` for none. Defaults to ``'avg'``.
        drop_rate (float): Dropout rate before the classifier. Defaults to 0.
        img_size, patch_size, …: See :class:`~attncnn_plugin.models.networks.CMHSANetwork`.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = 'avg',
        drop_rate: float = 0.0,
        img_size: Union[int, Tuple[int, int]] = 224,
        patch_size: int = 16,
        kernel_size: int = 3,
        embed_dim: Optional[int] = None,
        num_heads: Optional[int] = None,
        head_dim: HeadDim = None,
        min_head_dim: int = 1,
        qk_dim: Optional[int] = None,
        null_key: Optional[bool] = None,
        depth: int = 6,
        mlp_dim: Optional[int] = None,
        phase: str = 'attn',
        attn_bias_init: float = 12.0,
        query_init: float = 0.0,
        key_init: float = 0.02,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device=None,
        dtype=None,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            kernel_size=kernel_size,
            embed_dim=embed_dim,
            num_heads=num_heads,
            head_dim=head_dim,
            min_head_dim=min_head_dim,
            qk_dim=qk_dim,
            null_key=null_key,
            depth=depth,
            mlp_dim=mlp_dim,
            phase=phase,
            attn_bias_init=attn_bias_init,
            query_init=query_init,
            key_init=key_init,
            in_chans=in_chans,
            proj_drop_rate=proj_drop_rate,
            attn_drop_rate=attn_drop_rate,
            drop_path_rate=drop_path_rate,
            **dd,
        )
        self._add_head(len(self.norm.weight), num_classes, in_chans, global_pool, drop_rate, **dd)

    @torch.jit.ignore
    def no_weight_decay(self) -> Set[str]:
        """The parameters without weight decay: the relative position biases."""
        return {name for name, _ in self.named_parameters() if name.endswith('position.table')}


def _cfg(**kwargs) -> Dict[str, Any]:
    return {
        'num_classes': 1000,
        'input_size': (3, 224, 224),
        'pool_size': (14, 14),
        'crop_pct': 0.9,
        'interpolation': 'bicubic',
        'mean': IMAGENET_DEFAULT_MEAN,
        'std': IMAGENET_DEFAULT_STD,
        'first_conv': (),
        'classifier': 'head.fc',
        'license': 'apache-2.0',
        'paper_ids': 'arXiv:2111.01353',
        'paper_name': 'Can Vision Transformers Perform Convolution?',
        **kwargs,
    }


default_cfgs = generate_default_cfgs(
    {
        'cmhsa3_patch16_224.untrained': _cfg(),
        'cmhsa5_patch16_224.untrained': _cfg(),
        'cmhsa3_small_patch4_32.cifar10': _cfg(
            file=weights_file('cmhsa3_small_patch4_32'),
            label_names=CLASSES,
            num_classes=10,
            input_size=(3, 32, 32),
            pool_size=(8, 8),
            crop_pct=1.0,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2023, 0.1994, 0.2010),
        ),
    }
)


def _create(variant: str, pretrained: bool, **kwargs) -> CMHSAClassifier:
    out_indices = kwargs.pop('out_indices', 3)
    return build_model_with_cfg(
        CMHSAClassifier,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls='getter'),
        **kwargs,
    )


@register_model
def cmhsa3_patch16_224(pretrained: bool = False, **kwargs) -> CMHSAClassifier:
    """CMHSA-3: 3x3 convolutions, or attention of 9 heads that can express them (L21, Table 1).

    Args:
        phase (str): ``'conv'`` or ``'attn'``. Defaults to ``'attn'``.
        head_dim (int | str | Sequence[int], optional): Channels of a head's values, ``'exact'`` for enough to be the
            convolution. Defaults to those of a token.
        qk_dim (int, optional): Channels of a head's queries and keys. Defaults to those of a token.
    """
    return _create('cmhsa3_patch16_224', pretrained, **dict(dict(kernel_size=3), **kwargs))


@register_model
def cmhsa5_patch16_224(pretrained: bool = False, **kwargs) -> CMHSAClassifier:
    """CMHSA-5: 5x5 convolutions, or attention of 9 heads that can express them (L21, Table 1).

    Args:
        phase (str): ``'conv'`` or ``'attn'``. Defaults to ``'attn'``.
        head_dim (int | str | Sequence[int], optional): Channels of a head's values, ``'exact'`` for enough to be the
            convolution. Defaults to those of a token.
        qk_dim (int, optional): Channels of a head's queries and keys. Defaults to those of a token.
    """
    return _create('cmhsa5_patch16_224', pretrained, **dict(dict(kernel_size=5), **kwargs))


@register_model
def cmhsa3_small_patch4_32(pretrained: bool = False, **kwargs) -> CMHSAClassifier:
    """CMHSA-3 for images of 32x32 pixels: 8x8 patches, 6 blocks of 48 channels, 737,968 parameters at 10 classes.

    The arguments are those of :func:`cmhsa3_patch16_224`. Weights of narrow heads make the heads narrow.
    """
    small = dict(kernel_size=3, img_size=32, patch_size=4, mlp_dim=384)
    return _create('cmhsa3_small_patch4_32', pretrained, **dict(small, **kwargs))
