"""CMHSA: a vision transformer that begins as a convolutional network (Li et al. 2021, L21, section 4).

Paper: `Can Vision Transformers Perform Convolution?` - https://arxiv.org/abs/2111.01353

Its blocks mix pixels by convolutions on the image at first, then by attention over patches that begins as these
convolutions. This module registers it with timm: ``timm.create_model('cmhsa3_patch16_224')``.
"""

import math
from typing import Any, Dict, Optional, Sequence, Tuple, Union

import torch
from timm.layers import DropPath, Mlp, calculate_drop_path_rates
from timm.models import generate_default_cfgs, register_model, register_notrace_module
from torch import Tensor, nn

from ..attention.patches import GridBias, PatchAttention, image_to_patches, patches_to_image
from ..attention.state_dicts import StateDict, StructureError
from ..attention.window import check_choice
from ..change import Change, LayerChange, all_or_nothing, number_of_parameters, succession
from ..convert.models import in_words
from ..convert.patch_convolutions import attend_like_convolution, choose_head_dims
from .interface import CIFAR, NETWORK, SpaceToDepthStem, TimmNetwork, build, check_sizes, token_grid, trained

__all__ = ['CMHSABlock', 'CMHSANetwork', 'PatchConvolution']

PHASES = ('conv', 'attn')
KEY_STD = 0.02  # of W^K when convolutions become attention; W^Q is 0 then, and were W^K too, neither would ever learn


@register_notrace_module  # its forward pass looks at sizes, which a symbolic trace does not know
class PatchConvolution(nn.Module):
    """Puts the patches together to an image, convolves it and cuts it into patches again."""

    def __init__(self, channels: int, kernel_size: int, patch_size: int, **dd: Any) -> None:
        super().__init__()
        self.patch_size = (patch_size, patch_size)
        # fvcore, by which mmpretrain counts multiply-adds, does not know 'same', which even kernels need.
        padding = kernel_size // 2 if kernel_size % 2 else 'same'
        self.conv = nn.Conv2d(channels, channels, kernel_size, padding=padding, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, H/P, W/P, D)`` to the same."""
        image = patches_to_image(x, self.patch_size)
        if x.device.type == 'cpu':  # channels last more than halves a training step of few channels
            image = image.movedim(1, -1).contiguous().movedim(-1, 1)
        return image_to_patches(self.conv(image), self.patch_size)


class CMHSABlock(nn.Module):
    """Mixes tokens by ``attn``, a convolution or attention, then channels by an MLP, with residuals (pre-norm)."""

    def __init__(self, dim: int, attn: nn.Module, mlp_dim: int, drop_path: float, **dd: Any) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, **dd)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, **dd)
        self.mlp = Mlp(dim, mlp_dim, **dd)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class CMHSANetwork(TimmNetwork):
    """Pre-norm vision transformer without class token, whose attention can begin as a convolution.

    A token is a flattened patch, D = P²·C channels wide, and so is every head of L21. In the phase ``'conv'`` the
    blocks mix pixels by K×K convolutions on the image; in the phase ``'attn'`` by attention over patches, with as many
    heads as L21's Theorem 1 needs and a relative position bias. :meth:`to_attention` goes from the first to the second.
    A state dict of the phase ``'attn'`` turns the network to that phase as it is loaded, with the heads and the null
    key that it has; one of the phase ``'conv'`` is converted for a network of the phase ``'attn'``.

    Args:
        img_size (int | tuple[int, int]): Height and width of the image for which position biases are made; others will
            do, see :class:`~attncnn_plugin.attention.GridBias`. For attention to be its convolution on larger ones too,
            the grid must have two tokens more along each axis than the largest shift of a head: 3×3 for 9 heads. Even
            then a head sees a little of the key behind its own, whose bias M(1 − 1/r) lies between M and 0, on tables
            that are spread by r: with M = 12, features change by 2% from 3×3 to 6×6 patches, and by 0.1% from 4×4 to
            8×8. Defaults to 224.
        patch_size (int): Patch size P. Defaults to 16.
        in_chans (int): Channels C of the image. Defaults to 3.
        kernel_size (int): Kernel size K. Defaults to 3.
        head_dim (str, optional): Channels D_h of a head's values: D for None, as in L21, or ``'exact'`` for enough to
            be the convolution: from a patch that is one step away it reads only border pixels, so that the nine heads
            of a 3×3 kernel on patches of 16×16 pixels have 972 channels instead of 9·768. Defaults to None.
        min_head_dim (int): The least channels of a head with ``head_dim='exact'``, up to D. Defaults to 1.
        qk_dim (int, optional): Channels D_k of a head's queries and keys. Defaults to D, as in L21.
        null_key (bool, optional): Whether the attention has a null key, which stands for the zeros around the image,
            see :class:`~attncnn_plugin.attention.GridBias`; L21 has none. Defaults to True for attention that begins
            as a convolution, to False otherwise.
        depth (int): Number of blocks. Defaults to 6.
        mlp_dim (int, optional): Hidden channels of the feed-forward networks. Defaults to 4·D.
        phase (str): ``'conv'`` or ``'attn'``. Attention that does not come from a convolution begins with position
            biases of 0 and weights from N(0, 0.02²), the patch projection too. Defaults to ``'attn'``.
        attn_bias_init (float): L21's M, the bias of a head at its own shift when convolutions become attention; it is 0
            at all other shifts. With 40 only rounding differs from the convolution, but the biases hardly get a
            gradient; with a smaller one they do. Defaults to 12.
        num_classes (int): Number of classes, 0 for pooled features. Defaults to 1000.
        global_pool (str): timm's name of the pooling, ``''`` for none. Defaults to ``'avg'``.
        drop_rate (float): Dropout rate before the classifier. Defaults to 0.
        drop_path_rate (float): Stochastic depth rate of the last block, rising linearly from 0. Defaults to 0.

    Raises:
        ValueError: An argument out of range or unknown; an image that cannot be cut into patches.
    """

    undecayed = ('position.table',)

    def __init__(
        self,
        img_size: Union[int, Tuple[int, int]] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        kernel_size: int = 3,
        head_dim: Optional[str] = None,
        min_head_dim: int = 1,
        qk_dim: Optional[int] = None,
        null_key: Optional[bool] = None,
        depth: int = 6,
        mlp_dim: Optional[int] = None,
        phase: str = 'attn',
        attn_bias_init: float = 12.0,
        num_classes: int = 1000,
        global_pool: str = 'avg',
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device=None,
        dtype=None,
    ) -> None:
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        super().__init__()
        dim = patch_size**2 * in_chans
        mlp_dim = 4 * dim if mlp_dim is None else mlp_dim
        qk_dim = dim if qk_dim is None else qk_dim
        sizes = dict(patch_size=patch_size, in_chans=in_chans, kernel_size=kernel_size, qk_dim=qk_dim)
        check_sizes(drop_path_rate, depth=depth, mlp_dim=mlp_dim, **sizes)
        check_choice('phase', phase, PHASES)
        if not 0 < attn_bias_init < math.inf:
            raise ValueError(f'attn_bias_init={attn_bias_init} must be positive and finite: 40 is exact')
        self.patch_size = patch_size
        self.kernel_size = kernel_size
        self.grid_size = token_grid(img_size, patch_size, 'patch_size')
        self.qk_dim = qk_dim
        self.null_key = null_key
        self.attn_bias_init = attn_bias_init
        self.stem = SpaceToDepthStem(in_chans, patch_size, nn.Identity())  # a linear map in the phase 'attn'
        self.blocks = nn.Sequential()
        for drop_path in calculate_drop_path_rates(drop_path_rate, depth):
            attn = PatchConvolution(in_chans, kernel_size, patch_size, **dd)
            self.blocks.append(CMHSABlock(dim, attn, mlp_dim, drop_path, **dd))
        self.norm = nn.LayerNorm(dim, eps=1e-6, **dd)
        conv = self.blocks[0].attn.conv  # in the phase 'attn' too, whose attention takes its place below
        self.head_dims = choose_head_dims(conv, patch_size, head_dim, min_head_dim)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        if phase == 'attn':
            like = self.norm.weight
            self._put_attention([self._new_attention(like, bool(null_key)) for _ in self.blocks])
            nn.init.trunc_normal_(self.stem.proj.weight, std=0.02)
        self._init_interface_of_timm(in_chans, dim, patch_size, num_classes, global_pool, drop_rate, **dd)

    @property
    def phase(self) -> str:
        """``'conv'`` or ``'attn'``."""
        return 'conv' if isinstance(self.blocks[0].attn, PatchConvolution) else 'attn'

    @torch.inference_mode(False)
    @torch.no_grad()
    def to_attention(self, generator: Optional[torch.Generator] = None) -> Change:
        """Turns all convolutions into attention, in place (L21, section 4).

        The output stays as it was, except that a head attends to every other shift e^−M times as much as to its own:
        with the default M of 12 the logits of a CMHSA on 8×8 patches change by 5e-4 of their norm, with 40 by rounding.
        Give an optimizer the new parameters by :func:`~attncnn_plugin.pruning.replace_parameters`.

        Args:
            generator (torch.Generator, optional): Of the CPU; draws W^K.

        Raises:
            RuntimeError: The network is in the phase ``'attn'`` already.
            ValueError: A kernel or a bias has a hook, or an attribute with tensors.
        """
        if self.phase == 'attn':
            raise RuntimeError("the network is in phase='attn' already: there is no convolution to turn into attention")
        with all_or_nothing([self]):
            return self._put_attention([self._attention_like(block.attn.conv, generator) for block in self.blocks])

    def _put_attention(self, layers: Sequence[PatchAttention]) -> Change:
        """Puts attention where the convolutions are, and a linear map that begins as the identity into the stem."""
        like, before = self.blocks[0].norm1.weight, number_of_parameters(self)
        trainable = any(parameter.requires_grad for parameter in self.blocks[0].attn.parameters())
        self.stem.proj = nn.Linear(len(like), len(like), device=like.device, dtype=like.dtype).requires_grad_(trainable)
        self.stem.proj.weight.data.zero_().fill_diagonal_(1)
        nn.init.zeros_(self.stem.proj.bias)
        # In each block all matrices succeed the kernel, and all else its bias; those of the stem do so in the first.
        new = {f'stem.proj.{key}': parameter for key, parameter in self.stem.proj.named_parameters()}
        changes, replaced = [], {}
        for i, (block, layer) in enumerate(zip(self.blocks, layers)):
            name, old = f'blocks.{i}.attn', block.attn
            block.attn = layer.requires_grad_(any(parameter.requires_grad for parameter in old.parameters()))
            sizes = number_of_parameters(old), number_of_parameters(layer)
            changes.append(LayerChange(name, in_words(old.conv), in_words(layer), *sizes))
            new.update((f'{name}.{key}', parameter) for key, parameter in layer.named_parameters())
            for own in (old.conv.weight, old.conv.bias):
                is_matrix = own is old.conv.weight
                replaced[own] = succession(own, {key: p for key, p in new.items() if (p.ndim == 2) == is_matrix})
            new = {}
        self.train(self.training)  # the new modules too, and whatever a backbone freezes
        return Change(tuple(changes), before, number_of_parameters(self), replaced, order=[*self.parameters()])

    def _new_attention(self, like: Tensor, null_key: bool) -> PatchAttention:
        """Builds randomly initialized attention with the dtype and on the device of a tensor."""
        dd: Dict[str, Any] = {'device': like.device, 'dtype': like.dtype}
        dim, num_heads = len(self.blocks[0].norm1.weight), len(self.head_dims)
        position = GridBias(num_heads, self.grid_size, null_key, **dd)
        return PatchAttention(dim, num_heads, position, head_dim=self.head_dims, qk_dim=self.qk_dim, **dd)

    def _attention_like(self, conv: nn.Conv2d, generator: Optional[torch.Generator]) -> PatchAttention:
        """Returns attention that is the convolution (L21, Theorem 1): W^Q = 0, so that only positions count."""
        attention = self._new_attention(conv.weight, null_key=self.null_key is not False)
        attend_like_convolution(attention, conv, self.patch_size, self.attn_bias_init)
        # On the CPU, so that a seed draws the same everywhere.
        weight = torch.empty(attention.key.weight.shape, device='cpu')
        attention.key.weight.copy_(nn.init.normal_(weight, std=KEY_STD, generator=generator))
        return attention

    def structure_in(self, state_dict: StateDict, prefix: str) -> Any:
        """Returns the structures of attention in a state dict; None if it has none, or this network has some."""
        if self.phase == 'attn' or f'{prefix}blocks.0.attn.query.weight' not in state_dict:
            return None
        attention = self._new_attention(self.norm.weight.to('meta'), null_key=True)
        return [attention.structure_in(state_dict, f'{prefix}blocks.{i}.attn.') for i in range(len(self.blocks))]

    def take_structure(self, structure: Any) -> Change:
        """Puts attention where the convolutions are, all 0 until it is loaded; no network goes back."""
        like = self.norm.weight
        layers = [self._new_attention(like.to('meta'), null_key=True).to_empty(device=like.device) for _ in structure]
        for layer, own in zip(layers, structure):
            if own is not None:
                layer.take_structure(own)
            for parameter in layer.parameters():
                parameter.data.zero_()
        return self._put_attention(layers)

    def convert_state_dict(self, state_dict: StateDict, prefix: str) -> None:
        """Converts the convolutions of a state dict to attention."""
        if self.phase == 'conv':
            return
        generator = torch.Generator().manual_seed(0)  # the same on every rank
        for i in range(len(self.blocks)):
            name = f'{prefix}blocks.{i}.attn.'
            if not {f'{name}conv.weight', f'{name}conv.bias'} <= state_dict.keys():
                continue  # missing keys, as for any other parameter
            weight, bias = state_dict.pop(f'{name}conv.weight'), state_dict.pop(f'{name}conv.bias')
            conv = PatchConvolution(self.in_chans, self.kernel_size, self.patch_size).to(weight).conv
            try:
                conv.load_state_dict({'weight': weight, 'bias': bias})
                attention = self._attention_like(conv, generator)
            except (RuntimeError, ValueError) as error:
                raise StructureError(f'{name}conv.weight of the state dict: {error}') from error
            state_dict.update({name + key: value for key, value in attention.state_dict().items()})
            identity = torch.eye(attention.dim, device=weight.device, dtype=weight.dtype)
            state_dict.setdefault(f'{prefix}stem.proj.weight', identity)
            state_dict.setdefault(f'{prefix}stem.proj.bias', weight.new_zeros(attention.dim))


COMMON = {
    **NETWORK,
    'fixed_input_size': True,  # there is an img_size
    'pool_size': (14, 14),
    'crop_pct': 0.9,
    'paper_ids': 'arXiv:2111.01353',
    'paper_name': 'Can Vision Transformers Perform Convolution?',
}
default_cfgs = generate_default_cfgs(
    {
        'cmhsa3_patch16_224.untrained': COMMON,
        'cmhsa5_patch16_224.untrained': COMMON,
        **trained('cmhsa3_small_patch4_32', {**COMMON, **CIFAR, 'pool_size': (8, 8)}),
    }
)


@register_model
def cmhsa3_patch16_224(pretrained: bool = False, **kwargs) -> CMHSANetwork:
    """CMHSA-3: 3x3 convolutions, or attention of 9 heads that can express them (L21, Table 1)."""
    return build(CMHSANetwork, 'cmhsa3_patch16_224', pretrained, **{'kernel_size': 3, **kwargs})


@register_model
def cmhsa5_patch16_224(pretrained: bool = False, **kwargs) -> CMHSANetwork:
    """CMHSA-5: 5x5 convolutions, or attention of 9 heads that can express them (L21, Table 1)."""
    return build(CMHSANetwork, 'cmhsa5_patch16_224', pretrained, **{'kernel_size': 5, **kwargs})


@register_model
def cmhsa3_small_patch4_32(pretrained: bool = False, **kwargs) -> CMHSANetwork:
    """CMHSA-3 for images of 32x32 pixels: 8x8 patches, 6 blocks of 48 channels, 737,968 parameters at 10 classes."""
    small = dict(kernel_size=3, img_size=32, patch_size=4, mlp_dim=384)
    return build(CMHSANetwork, 'cmhsa3_small_patch4_32', pretrained, **{**small, **kwargs})
