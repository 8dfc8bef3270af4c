"""mmpretrain backbone of CMHSA, the vision transformer of Li et al. 2021 that begins as a convolutional network."""

from mmpretrain.models.utils import to_2tuple
from mmpretrain.registry import MODELS

from ..networks import CMHSANetwork
from .grid_backbone import GridBackbone, refusing_inherited


@MODELS.register_module()
class CMHSA(GridBackbone, CMHSANetwork):
    """Vision transformer whose attention begins as convolutions.

    A PyTorch implementation of `Can Vision Transformers Perform Convolution? <https://arxiv.org/abs/2111.01353>`_
    (section 4). Tokens and heads are as wide as a flattened patch, ``patch_size² · in_channels`` (768 for 16 and 3),
    if nothing else is said: ``head_dim='exact', qk_dim=64`` makes heads that begin as the same convolutions at a
    quarter of the cost.

    With ``phase='conv'`` the blocks mix pixels by convolutions on the image; ``to_attention()`` turns these into
    attention and leaves the output as it was. :class:`~attncnn_plugin.engine.hooks.PhaseTransitionHook` does so in the
    middle of a training. Checkpoints carry their phase: one of the attention phase loads into either.

    Args:
        img_size (int | tuple): The expected input image shape, height first. Other shapes will do: the relative
            position biases are resized for them. Defaults to 224.
        patch_size (int): The patch size. Defaults to 16.
        in_channels (int): The num of input channels. Defaults to 3.
        kernel_size (int): The kernel size of the convolutions; it decides the number of heads too (9 up to
            ``2 * patch_size``). Defaults to 3.
        embed_dims (int, optional): The dimensions of a token. Tokens are the patches for ``patch_size² ·
            in_channels``, the default; wider ones have further channels, narrower ones the lowest frequencies of the
            patches. Both phases are the same function either way.
        num_heads (int, optional): The num of heads, at least as many as the convolutions need, which is the default.
            Further ones begin with output weights of 0.
        head_dim (int | str | Sequence[int], optional): The dimensions of a head's values: those of a token for
            None, as in the paper; ``'exact'`` for enough to be the convolution; or numbers, for all heads or for
            each, with which heads that are too narrow begin as the best of their rank. Defaults to None.
        min_head_dim (int): The least dimensions of a head with ``head_dim='exact'``. Defaults to 1.
        qk_dim (int, optional): The dimensions of a head's queries and keys. Defaults to None, means those of a token.
        null_key (bool, optional): Whether the attention has a null key, which stands for the zeros around the image
            and without which attention is no convolution at the image's border. The paper has none. Defaults to None,
            means True for attention that begins as a convolution and False otherwise.
        num_layers (int): The number of blocks. Defaults to 6.
        feedforward_channels (int, optional): The hidden dimensions of the feed-forward networks. Defaults to None,
            means four times the dimensions of a token.
        phase (str): ``'conv'`` or ``'attn'``. Defaults to ``'attn'``.
        attn_bias_init (float): The position bias M with which a head begins at its shift when convolutions become
            attention. 40 is exact; a smaller one gives the biases a gradient to begin with. Defaults to 12.
        query_init (float): Standard deviation of the query weights at that moment. Defaults to 0.
        key_init (float): Standard deviation of the key weights at that moment. One of the two must be 0, so that the
            output stays as it was, the other not, so that both get gradients. Defaults to 0.02.
        out_indices (Sequence | int): Output from which blocks, counted from the end if negative; the output of the
            last block is normed. Defaults to -1, means the last block.
        out_type (str): The type of output features. Please choose from

            - ``"featmap"``: The feature map with shape (B, C, H, W).
            - ``"avg_featmap"``: The global averaged feature map with shape (B, C).

            Defaults to ``"featmap"``.
        frozen_stages (int): Stages to be frozen (stop grad and set eval mode): 0 the stem, n the stem and the
            first n blocks. -1 means not freezing any parameters. Defaults to -1.
        drop_rate (float): Probability of a hidden state to be zeroed. Defaults to 0.
        attn_drop_rate (float): Probability of an attention probability to be zeroed. Defaults to 0.
        drop_path_rate (float): Stochastic depth rate of the last block, rising linearly from 0. Defaults to 0.
        with_cp (bool): Whether to use gradient checkpointing, which saves memory and costs time. Defaults to False.
        init_cfg (dict, optional): Initialization config dict. Defaults to None.

    Examples:
        >>> import torch
        >>> from attncnn_plugin.models.backbones import CMHSA
        >>> model = CMHSA(img_size=32, patch_size=4, num_layers=2, phase='conv', out_indices=(0, 1))
        >>> [tuple(feature.shape) for feature in model(torch.rand(1, 3, 32, 32))]
        [(1, 48, 8, 8), (1, 48, 8, 8)]
        >>> print(model.to_attention())
        2 convolutions of 3x3 became attention of 9 heads with attn_bias_init=12; 37,800 parameters became 209,610
    """

    @refusing_inherited
    def __init__(
        self,
        img_size=224,
        patch_size=16,
        in_channels=3,
        kernel_size=3,
        embed_dims=None,
        num_heads=None,
        head_dim=None,
        min_head_dim=1,
        qk_dim=None,
        null_key=None,
        num_layers=6,
        feedforward_channels=None,
        phase='attn',
        attn_bias_init=12.0,
        query_init=0.0,
        key_init=0.02,
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
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_channels,
            kernel_size=kernel_size,
            embed_dim=embed_dims,
            num_heads=num_heads,
            head_dim=head_dim,
            min_head_dim=min_head_dim,
            qk_dim=qk_dim,
            null_key=null_key,
            depth=num_layers,
            mlp_dim=feedforward_channels,
            phase=phase,
            attn_bias_init=attn_bias_init,
            query_init=query_init,
            key_init=key_init,
            proj_drop_rate=drop_rate,
            attn_drop_rate=attn_drop_rate,
            drop_path_rate=drop_path_rate,
        )
        self.embed_dims = len(self.norm.weight)
        self.img_size = to_2tuple(img_size)
        self._set_interface(out_indices, out_type, frozen_stages, with_cp, init_cfg)
