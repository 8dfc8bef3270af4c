"""CMHSA: a vision transformer that begins as a convolutional network (Li et al. 2021, L21, section 4)."""

import math
from dataclasses import dataclass
from typing import Optional, Tuple, Union

import torch
from timm.layers import DropPath, Mlp, calculate_drop_path_rates, to_2tuple
from torch import Tensor, nn

from ...convert.head_count import min_heads
from ...convert.patches import attend_like_convolution
from ...layers.merged_patch_attention import MergedPatchAttention
from ...layers.patch_attention import PatchAttention
from ...layers.patches import image_to_patches, patches_to_image
from ...layers.position_bias import GridBias
from ...layers.structure import Restructurable, StateDict, StructureError
from .deployment import Deployment
from .grid_network import GridNetwork, check_channels, check_drop_path_rate

PHASES = ('conv', 'attn')
Structure = Tuple[str, bool]  # the phase, and whether heads are merged


class PatchStem(nn.Module):
    """Flattened patches, and a linear map that the convolution phase does without.

    Args:
        patch_size (int): Patch size P.
        in_chans (int): Channels C of the image.

    Attributes:
        proj (nn.Module): Identity, in the attention phase ``nn.Linear(P²·C, P²·C)``.
    """

    def __init__(self, patch_size: int, in_chans: int) -> None:
        super().__init__()
        self.reduction = patch_size
        self.in_chans = in_chans
        self.proj = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, H/P, W/P, P²·C)``.

        Raises:
            ValueError: The image does not have the stem's channels, or cannot be cut into patches.
        """
        check_channels(x, self.in_chans)
        return self.proj(image_to_patches(x, (self.reduction, self.reduction)))


class PatchConvolution(nn.Module):
    """A convolution on the image that the tokens are the patches of.

    Args:
        channels (int): Channels C of the image.
        kernel_size (int): Kernel size K.
        patch_size (int): Patch size P.
    """

    def __init__(self, channels: int, kernel_size: int, patch_size: int, device=None, dtype=None) -> None:
        super().__init__()
        self.patch_size = (patch_size, patch_size)
        self.conv = nn.Conv2d(channels, channels, kernel_size, padding='same', device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, P²·C)`` to the same."""
        # The gradients of a convolution of few channels take a fraction of the time on CPUs with the channels last.
        memory_format = torch.channels_last if x.device.type == 'cpu' else torch.contiguous_format
        image = patches_to_image(x, self.patch_size, memory_format)
        return image_to_patches(self.conv(image), self.patch_size)


class CMHSABlock(nn.Module):
    """Norm, convolution or attention and residual, then norm, feed-forward network and residual (pre-norm).

    Args:
        dim (int): Channels D.
        attn (nn.Module): The convolution or the attention, ``(B, H, W, D)`` to the same.
        mlp_dim (int): Hidden channels of the feed-forward network.
        proj_drop (float): Dropout rate after the two sub-layers. Defaults to 0.
        drop_path (float): Stochastic depth rate. Defaults to 0.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        mlp_dim: int,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        device=None,
        dtype=None,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, **dd)
        self.attn = attn
        self.proj_drop = nn.Dropout(proj_drop)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, **dd)
        self.mlp = Mlp(dim, mlp_dim, drop=proj_drop, **dd)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.proj_drop(self.attn(self.norm1(x))))
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def switch_to_deploy(self) -> None:
        """For inference alone: merged heads, position biases kept by grid size. timm calls it by this name too."""
        if isinstance(self.attn, PatchAttention):
            self.attn = self.attn.merge()
        if isinstance(self.attn, MergedPatchAttention):
            self.attn.switch_to_deploy()
        self.eval().requires_grad_(False)


@dataclass(frozen=True)
class Transition:
    """The result of :meth:`CMHSANetwork.to_attention`.

    Attributes:
        num_blocks (int): Convolutions that became attention.
        kernel_size (int): Kernel size K of each.
        num_heads (int): Heads N_h of each attention.
        attn_bias_init (float): M.
        parameters_before, parameters_after (int): Parameters of the network.
    """

    num_blocks: int
    kernel_size: int
    num_heads: int
    attn_bias_init: float
    parameters_before: int
    parameters_after: int

    def __str__(self) -> str:
        return (
            f'{self.num_blocks} convolutions of {self.kernel_size}x{self.kernel_size} became attention of '
            f'{self.num_heads} heads with attn_bias_init={self.attn_bias_init:g}; '
            f'{self.parameters_before:,} parameters became {self.parameters_after:,}'
        )


class CMHSANetwork(Restructurable, GridNetwork):
    """Pre-norm vision transformer without class token, whose attention can begin as a convolution.

    A token is a flattened patch, D = P²·C channels wide, and so is every head. In the phase ``'conv'`` the blocks mix
    pixels by K×K convolutions on the image; in the phase ``'attn'`` by attention over patches, with as many heads as
    L21's Theorem 1 needs and a relative position bias. :meth:`to_attention` goes from the first to the second and
    leaves the output of the network as it was.

    A state dict carries its structure: one of the phase ``'attn'`` turns the network to that phase as it is loaded, one
    of merged heads merges those of the network; one of the phase ``'conv'``, and one of heads that are not merged, is
    converted for a network that is further.

    Args:
        img_size (int | tuple[int, int]): Height and width of the image for which position biases are made; other
            sizes will do, see :class:`~attncnn_plugin.layers.GridBias`. For larger ones to see what a
            convolution saw, the grid must be larger than the shifts of the heads: 3 patches or more for 9 heads.
            Defaults to 224.
        patch_size (int): Patch size P. Defaults to 16.
        in_chans (int): Channels C of the image. Defaults to 3.
        kernel_size (int): Kernel size K. Defaults to 3.
        depth (int): Number of blocks. Defaults to 6.
        mlp_dim (int, optional): Hidden channels of the feed-forward networks. Defaults to 4·D.
        phase (str): ``'conv'`` or ``'attn'``. Attention that does not come from a convolution begins with position
            biases of 0 and weights from N(0, 0.02²). Defaults to ``'attn'``.
        attn_bias_init (float): M, the bias of a head's shift when convolutions become attention. 40 is exact; a
            smaller one gives the biases a gradient to begin with. Defaults to 12.
        query_init, key_init (float): Standard deviation of W^Q and of W^K when convolutions become attention. One of
            them must be 0, or the output would change; both must not, or neither would ever get a gradient. Default
            to 0 and 0.02. Merged heads have W^Q W^Kᵀ alone, which begins at 0 and gets a gradient at once.
        merge_heads (bool): Whether a head of the attention is trained with one matrix in the place of W^Q and W^K, and
            one in the place of W^V and W^O, see :class:`~attncnn_plugin.layers.MergedPatchAttention`: the same
            functions at about 40% fewer multiply-adds. Defaults to False.
        proj_drop_rate (float): Dropout rate of hidden states. Defaults to 0.
        attn_drop_rate (float): Dropout rate of attention probabilities. Defaults to 0.
        drop_path_rate (float): Stochastic depth rate of the last block, rising linearly from 0. Defaults to 0.
    """

    def __init__(
        self,
        img_size=224,
        patch_size: int = 16,
        in_chans: int = 3,
        kernel_size: int = 3,
        depth: int = 6,
        mlp_dim: Optional[int] = None,
        phase: str = 'attn',
        attn_bias_init: float = 12.0,
        query_init: float = 0.0,
        key_init: float = 0.02,
        merge_heads: bool = False,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device=None,
        dtype=None,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        height, width = to_2tuple(img_size)
        dim = patch_size**2 * in_chans
        mlp_dim = 4 * dim if mlp_dim is None else mlp_dim
        if min(patch_size, in_chans, kernel_size, depth, mlp_dim) < 1:
            raise ValueError(
                f'patch_size={patch_size}, in_chans={in_chans}, kernel_size={kernel_size}, depth={depth} and '
                f'mlp_dim={mlp_dim} must be at least 1'
            )
        if min(height, width) < patch_size or height % patch_size or width % patch_size:
            raise ValueError(f'img_size={img_size} must be a multiple of patch_size={patch_size}')
        if phase not in PHASES:
            raise ValueError(f'phase={phase!r} is unknown: choose one of {PHASES}')
        if (query_init == 0) == (key_init == 0) or min(query_init, key_init) < 0:
            raise ValueError(
                f'query_init={query_init} and key_init={key_init}: one of the two must be 0, so that attention begins '
                'as the convolution, and the other above 0, so that both get gradients'
            )
        if not 0 < attn_bias_init < math.inf:
            raise ValueError(f'attn_bias_init={attn_bias_init} must be positive and finite: 40 is exact')
        check_drop_path_rate(drop_path_rate)
        self.patch_size = patch_size
        self.kernel_size = kernel_size
        self.grid_size = (height // patch_size, width // patch_size)
        self.num_heads = min_heads(kernel_size, patch_size)
        self.attn_bias_init = attn_bias_init
        self.query_init = query_init
        self.key_init = key_init
        self.merge_heads = merge_heads
        self.attn_drop_rate = attn_drop_rate

        self.stem = PatchStem(patch_size, in_chans)
        self.blocks = nn.Sequential(
            *[
                CMHSABlock(
                    dim,
                    PatchConvolution(in_chans, kernel_size, patch_size, **dd),
                    mlp_dim,
                    proj_drop=proj_drop_rate,
                    drop_path=drop_path,
                    **dd,
                )
                for drop_path in calculate_drop_path_rates(drop_path_rate, depth)
            ]
        )
        self.norm = nn.LayerNorm(dim, eps=1e-6, **dd)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        if phase == 'attn':
            self._put_attention(merge_heads)
        self._follow_state_dicts()

    @property
    def phase(self) -> str:
        """``'conv'`` or ``'attn'``."""
        return 'conv' if isinstance(self.blocks[0].attn, PatchConvolution) else 'attn'

    @property
    def merged(self) -> bool:
        """Whether the attention has merged heads."""
        return isinstance(self.blocks[0].attn, MergedPatchAttention)

    @torch.no_grad()
    def to_attention(self, generator: Optional[torch.Generator] = None) -> Transition:
        """Turns all convolutions into attention, in place; the output stays as it was (L21, section 4).

        The parameters of everything else stay the same objects; an optimizer has to be given the new ones.

        Args:
            generator (torch.Generator, optional): Of the CPU; draws W^K (or W^Q), where heads are not merged.

        Returns:
            Transition: What was done.

        Raises:
            RuntimeError: The network is in the phase ``'attn'`` already.
        """
        if self.phase == 'attn':
            raise RuntimeError("the network is in phase='attn' already: there is no convolution to turn into attention")
        before = sum(p.numel() for p in self.parameters())
        convolutions = [block.attn.conv for block in self.blocks]
        self._put_attention(self.merge_heads)
        for block, conv in zip(self.blocks, convolutions):
            self._attend_like(block.attn, conv, generator)
        return Transition(
            num_blocks=len(self.blocks),
            kernel_size=self.kernel_size,
            num_heads=self.num_heads,
            attn_bias_init=self.attn_bias_init,
            parameters_before=before,
            parameters_after=sum(p.numel() for p in self.parameters()),
        )

    @torch.no_grad()
    def switch_to_deploy(self) -> Deployment:
        """For inference alone: merges the heads, in place, and keeps position biases by grid size.

        The output stays as it was. No parameter trains any more. mmpretrain's ``reparameterize_model.py`` calls it by
        this name.

        Returns:
            Deployment: What was done; nothing to merge in the phase ``'conv'``.
        """
        before = sum(p.numel() for p in self.parameters())
        merged = tuple(i for i, block in enumerate(self.blocks) if isinstance(block.attn, PatchAttention))
        for block in self.blocks:
            block.switch_to_deploy()
        self.eval().requires_grad_(False)
        return Deployment(merged, before, sum(p.numel() for p in self.parameters()))

    def _put_attention(self, merged: bool) -> None:
        """Attention in the place of convolutions, whose stem has no linear map yet, or of other attention."""
        like = self.blocks[0].norm1.weight
        dd = {'device': like.device, 'dtype': like.dtype}
        trainable = any(parameter.requires_grad for parameter in self.parameters())
        first = self.phase == 'conv'
        for block in self.blocks:
            requires_grad = any(parameter.requires_grad for parameter in block.attn.parameters())
            block.attn = self._new_attention(merged, **dd).requires_grad_(requires_grad)
        if first:
            self.stem.proj = nn.Linear(len(like), len(like), **dd).requires_grad_(trainable)
            nn.init.eye_(self.stem.proj.weight)
            nn.init.zeros_(self.stem.proj.bias)
        self.train(self.training)  # the new modules too, and whatever a backbone freezes

    def _new_attention(self, merged: bool, device, dtype) -> Union[PatchAttention, MergedPatchAttention]:
        dd = {'device': device, 'dtype': dtype}
        position = GridBias(self.num_heads, self.grid_size, **dd)
        dim = self.patch_size**2 * self.stem.in_chans
        kind = MergedPatchAttention if merged else PatchAttention
        return kind(dim, self.num_heads, position, attn_drop=self.attn_drop_rate, **dd)

    def _attend_like(self, attention: nn.Module, conv: nn.Conv2d, generator=None) -> None:
        attend_like_convolution(attention, conv, (self.patch_size, self.patch_size), self.attn_bias_init)
        if isinstance(attention, MergedPatchAttention):
            return  # W^Q W^Kᵀ = 0
        for linear, std in ((attention.query, self.query_init), (attention.key, self.key_init)):
            # On the CPU, so that a seed draws the same everywhere.
            weight = torch.zeros(linear.weight.shape)
            if std > 0:
                nn.init.normal_(weight, std=std, generator=generator)
            linear.weight.copy_(weight)

    @property
    def structure(self) -> Structure:
        """The phase, and whether heads are merged."""
        return self.phase, self.merged

    def structure_in(self, state_dict: StateDict, prefix: str = '') -> Optional[Structure]:
        """The same of a state dict, from the attention of its first block."""
        attn = f'{prefix}blocks.0.attn'
        if f'{attn}.conv.weight' in state_dict:
            return 'conv', False
        if f'{attn}.query_key.weight' in state_dict:
            return 'attn', True
        return ('attn', False) if f'{attn}.query.weight' in state_dict else None

    def can_take(self, structure: Structure) -> bool:
        """Whether a state dict is of attention: a network of the second phase does not go back to convolutions."""
        return structure[0] == 'attn'

    def structure_to_load(self, loaded: Structure) -> Structure:
        """The phase of the state dict if it is the second. Heads are merged if either has merged ones."""
        if not self.can_take(loaded):
            return self.structure
        return 'attn', loaded[1] or (self.merge_heads if self.phase == 'conv' else self.merged)

    def take_structure(self, structure: Structure) -> None:
        """Puts attention in the place of convolutions, or heads of another kind in the place of heads."""
        self._put_attention(structure[1])

    def training_advice(self, structure: Structure) -> Optional[str]:
        settings = [
            setting
            for setting, new in (
                ("phase='attn'", self.phase == 'conv'),
                ('merge_heads=True', structure[1] and not self.merge_heads and not self.merged),
            )
            if new
        ]
        if not settings:
            return None
        built = ' and '.join(settings)
        return (
            f'the network was built without {built} and turned to it by the state dict that it loaded: an '
            'optimizer that was built before does not have the parameters of the attention. Build the network '
            f'with {built} to train it further'
        )

    def convert_state_dict(self, state_dict: StateDict, prefix: str) -> None:
        """Converts convolutions to attention, where the state dict has any; merged heads convert themselves."""
        generator = torch.Generator().manual_seed(0)  # the same on every rank
        for i in range(len(self.blocks)):
            name = f'{prefix}blocks.{i}.attn.'
            if not {name + 'conv.weight', name + 'conv.bias'} <= state_dict.keys():
                continue  # missing keys, as for any other parameter
            weight, bias = state_dict.pop(name + 'conv.weight'), state_dict.pop(name + 'conv.bias')
            if weight.shape[:2] != (self.stem.in_chans,) * 2:
                raise StructureError(
                    f'{name}conv.weight of the state dict has shape {tuple(weight.shape)}, but the network takes '
                    f'images of in_chans={self.stem.in_chans} channels'
                )
            conv = nn.Conv2d(
                *weight.shape[:2], weight.shape[2:], padding='same', device=weight.device, dtype=weight.dtype
            )
            conv.weight.copy_(weight)
            conv.bias.copy_(bias)
            attention = self._new_attention(self.merged, weight.device, weight.dtype)
            try:
                self._attend_like(attention, conv, generator)
            except ValueError as error:
                raise StructureError(f'{name}conv.weight of the state dict: {error}') from error
            state_dict.update({name + key: value for key, value in attention.state_dict().items()})
            state_dict[f'{prefix}stem.proj.weight'] = torch.eye(attention.dim, device=weight.device, dtype=weight.dtype)
            state_dict[f'{prefix}stem.proj.bias'] = weight.new_zeros(attention.dim)
