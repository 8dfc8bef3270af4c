"""mmpretrain backbones of the self-attention networks of Cordonnier et al. 2020."""

from functools import partial
from typing import Optional, Sequence, Union

from mmpretrain.models.utils import to_2tuple
from mmpretrain.registry import MODELS

from ...layers import ContentAttention, GeneralizedQuadraticAttention, LearnedAttention, QuadraticAttention
from ...layers.encodings import CENTER_STD, SPREAD_STD
from ..networks import SelfAttentionNetwork, token_grid
from .grid_backbone import GridBackbone, refusing_inherited


class SelfAttentionBackbone(GridBackbone, SelfAttentionNetwork):
    """The base of the three backbones below.

    Args:
        attn_layer (Callable): See :class:`~attncnn_plugin.models.networks.SelfAttentionNetwork`.
        For the others see :class:`SAQuadratic`.
    """

    arch_zoo = {
        **dict.fromkeys(
            ['b', 'base'], {'embed_dims': 400, 'num_layers': 6, 'num_heads': 9, 'feedforward_channels': 512}
        ),
        'base-16heads': {'embed_dims': 400, 'num_layers': 6, 'num_heads': 16, 'feedforward_channels': 512},
        **dict.fromkeys(
            ['t', 'tiny'], {'embed_dims': 64, 'num_layers': 3, 'num_heads': 9, 'feedforward_channels': 128}
        ),
    }

    def __init__(
        self,
        attn_layer,
        arch='base',
        img_size=32,
        in_channels=3,
        reduction=2,
        share_position=False,
        out_indices=-1,
        out_type='featmap',
        frozen_stages=-1,
        drop_rate=0.0,
        attn_drop_rate=0.0,
        drop_path_rate=0.0,
        with_cp=False,
        init_cfg=None,
    ):
        settings = self._arch_settings(arch)
        super().__init__(
            attn_layer,
            embed_dim=settings['embed_dims'],
            depth=settings['num_layers'],
            num_heads=settings['num_heads'],
            mlp_dim=settings['feedforward_channels'],
            in_chans=in_channels,
            proj_drop_rate=drop_rate,
            attn_drop_rate=attn_drop_rate,
            drop_path_rate=drop_path_rate,
            reduction=reduction,
            share_position=share_position,
        )
        self.arch_settings = settings
        self.embed_dims = settings['embed_dims']
        self.img_size = to_2tuple(img_size)
        self._set_interface(out_indices, out_type, frozen_stages, with_cp, init_cfg)

    @classmethod
    def _arch_settings(cls, arch: Union[str, dict]) -> dict:
        if isinstance(arch, str):
            if arch.lower() not in cls.arch_zoo:
                raise ValueError(f'Arch {arch} is not in default archs {set(cls.arch_zoo)}')
            return cls.arch_zoo[arch.lower()]
        essential_keys = set(cls.arch_zoo['base'])
        if not isinstance(arch, dict) or set(arch) != essential_keys:
            raise ValueError(f'Custom arch needs a dict with keys {essential_keys}, but got {arch}')
        return arch


@MODELS.register_module()
class SAQuadratic(SelfAttentionBackbone):
    """Self-attention with the quadratic encoding: every head is an isotropic Gaussian.

    A PyTorch implementation of `On the Relationship between Self-Attention and Convolutional Layers
    <https://arxiv.org/abs/1911.03584>`_ (eq. 9). The input is cut into 2x2 blocks, so its height and width must be
    even; any even size will do.

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
        head_dim (int, optional): The channels of a head's values, for instance ``embed_dims // num_heads``. Defaults to
            None, means that the values are the input itself, as in the paper.
        center_std (float): Standard deviation of the initial centres of the heads, in tokens. Defaults to 2, as in the
            released code; the paper's text reads as √2.
        spread_std (float): Standard deviation of the noise in the initial widths. Defaults to 0.01, as in the released
            code; the paper's text reads as 0.1.
        reduction (int): The side of the squares of pixels that become tokens. Defaults to 2.
        out_indices (Sequence | int): Output from which blocks, counted from the end if negative.
            Defaults to -1, means the last block.
        out_type (str): The type of output features. Please choose from

            - ``"featmap"``: The feature map with shape (B, C, H, W).
            - ``"avg_featmap"``: The global averaged feature map with shape (B, C).

            Defaults to ``"featmap"``.
        frozen_stages (int): Stages to be frozen (stop grad and set eval mode): 0 the stem, n the stem and the
            first n blocks. -1 means not freezing any parameters. Defaults to -1.
        drop_rate (float): Probability of a hidden state to be zeroed; 0.1 in the paper. Defaults to 0.
        attn_drop_rate (float): Probability of an attention probability to be zeroed; 0.1 in the paper. While it
            acts, attention is dense. Defaults to 0.
        drop_path_rate (float): Stochastic depth rate of the last block, rising linearly from 0. Defaults to 0.
        with_cp (bool): Whether to use gradient checkpointing, which saves memory and costs time. Defaults to False.
        init_cfg (dict, optional): Initialization config dict. Defaults to None.

    Examples:
        >>> import torch
        >>> from attncnn_plugin.models.backbones import SAQuadratic
        >>> model = SAQuadratic(arch='tiny', out_indices=(0, -1))
        >>> [tuple(feature.shape) for feature in model(torch.rand(1, 3, 32, 32))]
        [(1, 64, 16, 16), (1, 64, 16, 16)]
    """

    @refusing_inherited
    def __init__(
        self,
        arch='base',
        img_size=32,
        in_channels=3,
        head_dim=None,
        center_std=CENTER_STD,
        spread_std=SPREAD_STD,
        reduction=2,
        out_indices=-1,
        out_type='featmap',
        frozen_stages=-1,
        drop_rate=0.0,
        attn_drop_rate=0.0,
        drop_path_rate=0.0,
        with_cp=False,
        init_cfg=None,
    ):
        super().__init__(
            partial(QuadraticAttention, head_dim=head_dim, center_std=center_std, spread_std=spread_std),
            arch=arch,
            img_size=img_size,
            in_channels=in_channels,
            reduction=reduction,
            out_indices=out_indices,
            out_type=out_type,
            frozen_stages=frozen_stages,
            drop_rate=drop_rate,
            attn_drop_rate=attn_drop_rate,
            drop_path_rate=drop_path_rate,
            with_cp=with_cp,
            init_cfg=init_cfg,
        )


@MODELS.register_module()
class SAGeneralized(SelfAttentionBackbone):
    """Self-attention with the generalized quadratic encoding: every head is a Gaussian of any shape.

    A PyTorch implementation of `On the Relationship between Self-Attention and Convolutional Layers
    <https://arxiv.org/abs/1911.03584>`_ (eq. 19).

    Args:
        arch (str | dict): See :class:`SAQuadratic`. Defaults to 'base'.
        img_size, in_channels, …: The other arguments are those of :class:`SAQuadratic`.
    """

    @refusing_inherited
    def __init__(
        self,
        arch='base',
        img_size=32,
        in_channels=3,
        head_dim=None,
        center_std=CENTER_STD,
        spread_std=SPREAD_STD,
        reduction=2,
        out_indices=-1,
        out_type='featmap',
        frozen_stages=-1,
        drop_rate=0.0,
        attn_drop_rate=0.0,
        drop_path_rate=0.0,
        with_cp=False,
        init_cfg=None,
    ):
        super().__init__(
            partial(GeneralizedQuadraticAttention, head_dim=head_dim, center_std=center_std, spread_std=spread_std),
            arch=arch,
            img_size=img_size,
            in_channels=in_channels,
            reduction=reduction,
            out_indices=out_indices,
            out_type=out_type,
            frozen_stages=frozen_stages,
            drop_rate=drop_rate,
            attn_drop_rate=attn_drop_rate,
            drop_path_rate=drop_path_rate,
            with_cp=with_cp,
            init_cfg=init_cfg,
        )


@MODELS.register_module()
class SALearned(SelfAttentionBackbone):
    """Self-attention with a learned relative position encoding, with or without content.

    A PyTorch implementation of `On the Relationship between Self-Attention and Convolutional Layers
    <https://arxiv.org/abs/1911.03584>`_ (4.3, eq. 3 and 8).

    Args:
        arch (str | dict): See :class:`SAQuadratic`. Defaults to 'base'.
        img_size (int | tuple): Height and width of the largest input image: learned encodings have a vector for
            every shift in it. Smaller images will do; a checkpoint of another size is resized as it is loaded.
            Defaults to 32.
        content (bool): Whether scores depend on content too. Defaults to False.
        terms (Sequence[str], optional): With ``content``, the terms of the score, from 'qk', 'qr', 'uk' and 'vr',
            see :class:`~attncnn_plugin.layers.ContentAttention`. Defaults to None, means ``('qk', 'qr')``; for a
            quadratic encoding ``('qk', 'vr')``, for an absolute encoding ``('qk', )``.
        position (str): ``'relative_learned'`` or ``'relative_sinusoidal'``; with ``content`` also
            ``'relative_quadratic'``, ``'relative_generalized'``, ``'absolute_learned'`` or ``'absolute_sinusoidal'``.
            Defaults to ``'relative_learned'``.
        position_dim (int, optional): The length of the vector of a shift, half of it for its row and half for its
            column. Defaults to None, means twice ``embed_dims``, and the length of a query where queries are multiplied
            by it ('qr'), as in the released code.
        share_position (bool): Whether all blocks have the same vectors of shifts. Defaults to False, as in the released
            code; the paper's text shares them.
        qk_dim (int, optional): With ``content``, the channels of a head's queries and keys. Defaults to None, means
            ``embed_dims``.
        qk_bias (bool, optional): With ``content``, whether queries and keys have biases. Defaults to None, means True.
        center_std, spread_std (float, optional): With ``content`` and a quadratic encoding, see :class:`SAQuadratic`.
        in_channels, head_dim, …: The other arguments are those of :class:`SAQuadratic`.
    """

    @refusing_inherited
    def __init__(
        self,
        arch='base',
        img_size=32,
        content=False,
        terms: Optional[Sequence[str]] = None,
        position='relative_learned',
        position_dim=None,
        share_position=False,
        qk_dim=None,
        qk_bias=None,
        center_std=None,
        spread_std=None,
        in_channels=3,
        head_dim=None,
        reduction=2,
        out_indices=-1,
        out_type='featmap',
        frozen_stages=-1,
        drop_rate=0.0,
        attn_drop_rate=0.0,
        drop_path_rate=0.0,
        with_cp=False,
        init_cfg=None,
    ):
        of_content = dict(
            terms=terms,
            qk_dim=qk_dim,
            qk_bias=qk_bias,
            center_std=center_std,
            spread_std=spread_std,
        )
        of_content = {name: value for name, value in of_content.items() if value is not None}
        if of_content and not content:
            raise ValueError(f'{of_content} are for content=True')
        attn_layer = partial(
            ContentAttention if content else LearnedAttention,
            max_size=token_grid(img_size, reduction),
            position=position,
            position_dim=position_dim,
            head_dim=head_dim,
            **of_content,
        )
        super().__init__(
            attn_layer,
            arch=arch,
            img_size=img_size,
            in_channels=in_channels,
            reduction=reduction,
            share_position=share_position,
            out_indices=out_indices,
            out_type=out_type,
            frozen_stages=frozen_stages,
            drop_rate=drop_rate,
            attn_drop_rate=attn_drop_rate,
            drop_path_rate=drop_path_rate,
            with_cp=with_cp,
            init_cfg=init_cfg,
        )
