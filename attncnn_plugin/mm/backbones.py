"""mmpretrain's backbones: the networks of :mod:`attncnn_plugin.models` with its interface and its names."""

import copy
from functools import partial
from typing import Sequence, Tuple

from mmengine.model import BaseModule
from mmpretrain.models.utils import to_2tuple
from mmpretrain.registry import MODELS
from torch import Tensor
from torchvision.ops import Permute

from ..attention import ContentAttention, GeneralizedQuadraticAttention, LearnedAttention, QuadraticAttention
from ..attention.window import check_choice
from ..models.cmhsa import CMHSANetwork
from ..models.interface import token_grid
from ..models.self_attention import SelfAttentionNetwork
from .runner import record_new_parameters

__all__ = ['CMHSA', 'SAGeneralized', 'SALearned', 'SAQuadratic']


def refuse_unknown(name: str, unknown: Sequence[str]) -> None:
    """Raises TypeError for arguments that a backbone does not have, as of a config that another one inherits."""
    if unknown:
        raise TypeError(
            f'{name} has no argument {", ".join(unknown)}: write _delete_=True in backbone if the config inherits them'
        )


class GridBackbone:
    """mmpretrain's interface: outputs of some blocks, or their means.

    A backbone inherits from this class, its network and mmengine's ``BaseModule``, in this order. All outputs pass
    through its ``featmap``, the target layer for class activation maps, as ``(B, D, H, W)``.
    """

    passed_on: Tuple[str, ...]  # arguments that the network has by the same names

    def _build(self, size, network, out_indices=-1, out_type='featmap', with_cp=False, init_cfg=None, **own):
        """Builds the network, and the interface by those options that are not the network's."""
        refuse_unknown(type(self).__name__, [name for name in own if name not in self.passed_on])
        super().__init__(num_classes=0, **network, **own)
        self.img_size = to_2tuple(size)
        self.init_cfg = copy.deepcopy(init_cfg)
        self.num_layers = len(self.blocks)
        self.embed_dims = self.num_features
        del self.num_classes  # of timm: ClassNumCheckHook wants that of every module to be the data set's
        self.featmap = Permute([0, 3, 1, 2])
        number, indices = self.num_layers, [out_indices] if isinstance(out_indices, int) else out_indices
        valid = isinstance(indices, Sequence) and all(type(i) is int and -number <= i < number for i in indices)
        if not valid or not 0 < len({i % number for i in indices}) == len(indices):
            raise ValueError(f'out_indices={out_indices!r} must name different blocks, from {-number} to {number - 1}')
        self.out_indices = [i % number for i in indices]
        self.grad_checkpointing = with_cp

        check_choice('out_type', out_type, ('featmap', 'avg_featmap'))
        self.out_type = out_type
        self.register_load_state_dict_post_hook(record_new_parameters)

    def forward(self, x: Tensor) -> Tuple[Tensor, ...]:
        """Maps images ``(B, C, H, W)`` to the outputs of the blocks in ``out_indices``; that of the last is normed."""
        last, features = self.forward_intermediates(x, self.out_indices, stop_early=True, output_fmt='NHWC')
        if self.num_layers - 1 in self.out_indices:
            features[-1] = last
        features = [self.featmap(feature) for feature in features]
        if self.out_type == 'avg_featmap':
            return tuple(feature.mean(dim=(2, 3)) for feature in features)
        return tuple(features)


@MODELS.register_module()
class SAQuadratic(GridBackbone, SelfAttentionNetwork, BaseModule):
    """Self-attention with the quadratic encoding: every head is an isotropic Gaussian.

    A PyTorch implementation of `On the Relationship between Self-Attention and Convolutional Layers
    <https://arxiv.org/abs/1911.03584>`_ (eq. 9). The input is cut into 2x2 blocks, so its height and width must be
    even; any even size works.

    Weight decay is to be left off the centres and widths of the heads, as in the released code of C20::

        optim_wrapper = dict(paramwise_cfg=dict(custom_keys={
            'encoding.center': dict(decay_mult=0.),
            'encoding.sqrt_precision': dict(decay_mult=0.)}))

    Args:
        arch (str | dict): The architecture. If use string, choose from 'base' (the paper's), 'base-16heads' and
            'tiny'. If use dict, it should have below keys:

            - **embed_dims** (int): The dimensions of a token.
            - **num_layers** (int): The number of blocks.
            - **num_heads** (int): The number of heads of a block.
            - **feedforward_channels** (int): The hidden dimensions of the feed-forward networks.

            Defaults to 'base'.
        img_size (int | tuple): The expected input image shape, height first. Because dynamic input shapes are
            supported, just set it to the most common one. Defaults to 32.
        in_channels (int): The num of input channels. Defaults to 3.
        reduction (int): The side of the squares of pixels that become tokens. Defaults to 2.
        out_indices (Sequence | int): Output from which blocks, counted from the end if negative.
            Defaults to -1, means the last block.
        out_type (str): The type of output features. Please choose from

            - ``"featmap"``: The feature map with shape (B, C, H, W).
            - ``"avg_featmap"``: The global averaged feature map with shape (B, C).

            Defaults to ``"featmap"``.
        drop_rate (float): Probability of a hidden state to be zeroed; 0.1 in the paper. Defaults to 0.
        attn_drop_rate (float): Probability of an attention probability to be zeroed; 0.1 in the paper. Defaults to 0.
        drop_path_rate (float): Stochastic depth rate of the last block, rising linearly from 0. Defaults to 0.
        with_cp (bool): Whether to use gradient checkpointing, which saves memory and costs time. Defaults to False.
        init_cfg (dict, optional): Initialization config dict. Defaults to None.

    Examples:
        >>> import torch
        >>> model = SAQuadratic(arch='tiny', out_indices=(0, -1))
        >>> [tuple(feature.shape) for feature in model(torch.rand(1, 3, 32, 32))]
        [(1, 64, 16, 16), (1, 64, 16, 16)]
    """

    arch_zoo = {
        'base': dict(embed_dims=400, num_layers=6, num_heads=9, feedforward_channels=512),
        'base-16heads': dict(embed_dims=400, num_layers=6, num_heads=16, feedforward_channels=512),
        'tiny': dict(embed_dims=64, num_layers=3, num_heads=9, feedforward_channels=128),
    }
    attn_layer = QuadraticAttention
    passed_on = 'reduction', 'attn_drop_rate', 'drop_path_rate'

    def __init__(self, arch='base', img_size=32, in_channels=3, drop_rate=0.0, **options) -> None:
        settings = self.arch_zoo.get(arch.lower()) if isinstance(arch, str) else arch
        names = dict(embed_dims='embed_dim', num_layers='depth', num_heads='num_heads', feedforward_channels='mlp_dim')
        if not isinstance(settings, dict) or settings.keys() != names.keys():
            raise ValueError(f'arch={arch!r} must be one of {[*self.arch_zoo]}, or a dict with the keys {[*names]}')
        network = {names[key]: value for key, value in settings.items()}
        network.update(attn_layer=self.attn_layer, in_chans=in_channels, proj_drop_rate=drop_rate)
        self._build(img_size, network, **options)


@MODELS.register_module()
class SAGeneralized(SAQuadratic):
    """Self-attention with the generalized quadratic encoding: every head is a Gaussian of any shape.

    A PyTorch implementation of `On the Relationship between Self-Attention and Convolutional Layers
    <https://arxiv.org/abs/1911.03584>`_ (eq. 19).

    The arguments are those of :class:`SAQuadratic`.
    """

    attn_layer = GeneralizedQuadraticAttention


@MODELS.register_module()
class SALearned(SAQuadratic):
    """Self-attention with a learned relative position encoding, with or without content.

    A PyTorch implementation of `On the Relationship between Self-Attention and Convolutional Layers
    <https://arxiv.org/abs/1911.03584>`_ (4.3 and eq. 8).

    Args:
        img_size (int | tuple): Height and width of the largest input image: learned encodings have a vector for
            every shift in it. A checkpoint of another size is resized as it is loaded. Defaults to 32.
        content (bool): Whether scores depend on content too. Defaults to False.
        kwargs: The other arguments are those of :class:`SAQuadratic`.
    """

    def __init__(self, arch='base', img_size=32, reduction=2, content=False, **kwargs) -> None:
        layer = ContentAttention if content else LearnedAttention
        self.attn_layer = partial(layer, max_size=token_grid(img_size, reduction))
        super().__init__(arch, img_size, reduction=reduction, **kwargs)


@MODELS.register_module()
class CMHSA(GridBackbone, CMHSANetwork, BaseModule):
    """Vision transformer whose attention begins as convolutions.

    A PyTorch implementation of `Can Vision Transformers Perform Convolution? <https://arxiv.org/abs/2111.01353>`_
    (section 4). Tokens and heads are as wide as a flattened patch, ``patch_size² · in_channels`` (768 for 16 and 3),
    if nothing else is said: ``head_dim='exact', qk_dim=64`` makes heads that begin as the same convolutions at a
    quarter of the cost. :class:`~attncnn_plugin.mm.phase_transition.PhaseTransitionHook` turns the convolutions of
    ``phase='conv'`` into attention in the middle of a training. A checkpoint of the attention phase loads into either.

    Args:
        img_size, patch_size, kernel_size, head_dim, min_head_dim: As of :class:`~attncnn_plugin.models.CMHSANetwork`.
        qk_dim, null_key, phase, attn_bias_init, drop_path_rate: As of :class:`~attncnn_plugin.models.CMHSANetwork`.
        in_channels, out_indices, out_type, with_cp, init_cfg: As of :class:`SAQuadratic`.
        num_layers (int): The number of blocks. Defaults to 6.
        feedforward_channels (int, optional): The hidden dimensions of the feed-forward networks. Defaults to None,
            means four times the dimensions of a token.

    Examples:
        >>> model = CMHSA(img_size=32, patch_size=4, num_layers=2, phase='conv')
        >>> print(model.to_attention())
        layer          before      after    parameters
        blocks.0.attn  3×3 kernel  9 heads  84 → 85,017
        blocks.1.attn  3×3 kernel  9 heads  84 → 85,017
        model                               37,992 → 210,210
    """

    passed_on = (
        *('patch_size', 'kernel_size', 'head_dim', 'min_head_dim', 'qk_dim', 'null_key'),
        *('phase', 'attn_bias_init', 'drop_path_rate'),
    )

    def __init__(self, img_size=224, in_channels=3, num_layers=6, feedforward_channels=None, **options) -> None:
        network = dict(img_size=img_size, in_chans=in_channels, depth=num_layers, mlp_dim=feedforward_channels)
        self._build(img_size, network, **options)
