"""CMHSA: a vision transformer that begins as a convolutional network (Li et al. 2021, L21, section 4)."""

import math
from dataclasses import dataclass
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from timm.layers import DropPath, Mlp, calculate_drop_path_rates, to_2tuple
from torch import Tensor, nn

from ...convert.head_widths import HeadDim, choose_head_dims
from ...convert.patch_embedding import patch_embedding
from ...convert.patches import attend_like_convolution
from ...layers.patch_attention import PatchAttention
from ...layers.patches import image_to_patches, patches_to_image
from ...layers.position_bias import GridBias
from ...layers.structure import Restructurable, StateDict, StructureError
from .grid_network import GridNetwork, check_channels, check_drop_path_rate

PHASES = ('conv', 'attn')


class PatchStem(nn.Module):
    """Flattened patches, and a linear map to tokens, which the convolution phase of L21 does without.

    Args:
        patch_size (int): Patch size P.
        in_chans (int): Channels C of the image.
        embed_dim (int): Channels D of a token.

    Attributes:
        proj (nn.Module): Identity in the convolution phase, if tokens are the patches; ``nn.Linear(P²·C, D)``
            otherwise.
    """

    def __init__(self, patch_size: int, in_chans: int, embed_dim: int, device=None, dtype=None) -> None:
        super().__init__()
        self.reduction = patch_size
        self.in_chans = in_chans
        patch_dim = patch_size**2 * in_chans
        self.proj = nn.Identity()
        if embed_dim != patch_dim:
            self.proj = nn.Linear(patch_dim, embed_dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, H/P, W/P, D)``.

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
        embedding (Tensor, optional): E from patches to tokens, ``(D, P²·C)``: the image has the patches Eᵀx. Defaults
            to none: tokens are the patches.
    """

    embedding: Optional[Tensor]

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        patch_size: int,
        embedding: Optional[Tensor] = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        self.patch_size = (patch_size, patch_size)
        self.conv = new_convolution(channels, kernel_size, device, dtype)
        self.register_buffer('embedding', embedding)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, D)`` to the same."""
        # The gradients of a convolution of few channels take a fraction of the time on CPUs with the channels last.
        memory_format = torch.channels_last if x.device.type == 'cpu' else torch.contiguous_format
        patches = x if self.embedding is None else F.linear(x, self.embedding.T)
        image = patches_to_image(patches, self.patch_size, memory_format)
        patches = image_to_patches(self.conv(image), self.patch_size)
        return patches if self.embedding is None else F.linear(patches, self.embedding)


def new_convolution(channels: int, kernel_size: int, device=None, dtype=None) -> nn.Conv2d:
    """K×K, as large an image out as in."""
    # fvcore, by which mmpretrain counts multiply-adds, does not know 'same', which even kernels need.
    padding = kernel_size // 2 if kernel_size % 2 else 'same'
    return nn.Conv2d(channels, channels, kernel_size, padding=padding, device=device, dtype=dtype)


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


@dataclass(frozen=True)
class Transition:
    """The result of :meth:`CMHSANetwork.to_attention`.

    Attributes:
        num_blocks (int): Convolutions that became attention.
        kernel_size (int): Kernel size K of each.
        num_heads (int): Heads N_h of each attention.
        head_dims (tuple[int, ...]): Channels D_h of each head's values.
        relative_error (float): The largest error of a block's matrices, 0 unless heads are narrower than the
            convolutions need, see :class:`~attncnn_plugin.convert.PatchConversionReport`.
        attn_bias_init (float): M.
        parameters_before, parameters_after (int): Parameters of the network.
    """

    num_blocks: int
    kernel_size: int
    num_heads: int
    head_dims: Tuple[int, ...]
    relative_error: float
    attn_bias_init: float
    parameters_before: int
    parameters_after: int

    def __str__(self) -> str:
        return (
            f'{self.num_blocks} convolutions of {self.kernel_size}x{self.kernel_size} became attention of '
            f'{self.num_heads} heads with attn_bias_init={self.attn_bias_init:g}{self._error}; '
            f'{self.parameters_before:,} parameters became {self.parameters_after:,}'
        )

    @property
    def _error(self) -> str:
        if self.relative_error == 0:
            return ''
        return f' and a relative error of {self.relative_error:.3g}, for heads are narrower than the convolutions need'


class CMHSANetwork(Restructurable, GridNetwork):
    """Pre-norm vision transformer without class token, whose attention can begin as a convolution.

    In L21 a token is a flattened patch, D = P²·C channels wide, and so is every head. In the phase ``'conv'`` the
    blocks mix pixels by K×K convolutions on the image; in the phase ``'attn'`` by attention over patches, with as many
    heads as L21's Theorem 1 needs and a relative position bias. :meth:`to_attention` goes from the first to the second
    and leaves the output of the network as it was.

    Heads need not be as wide: from a patch that is one step away a convolution reads border pixels alone.
    ``head_dim='exact'`` makes each head wide enough to be the convolution, and ``qk_dim`` says how wide its queries and
    keys are: with 3×3 kernels on patches of 16×16 pixels, 972 channels in the place of 9·768.

    A state dict carries its structure: one of the phase ``'attn'`` turns the network to that phase as it is loaded; one
    of the phase ``'conv'`` is converted for a network of the phase ``'attn'``. The number and the widths of heads, and
    whether there is a null key, are those of the state dict.

    Args:
        img_size (int | tuple[int, int]): Height and width of the image for which position biases are made; other
            sizes will do, see :class:`~attncnn_plugin.layers.GridBias`. For larger ones to see what a
            convolution saw, the grid must be larger than the shifts of the heads: 3 patches or more for 9 heads.
            Defaults to 224.
        patch_size (int): Patch size P. Defaults to 16.
        in_chans (int): Channels C of the image. Defaults to 3.
        kernel_size (int): Kernel size K. Defaults to 3.
        embed_dim (int, optional): Channels D of a token. Other than P²·C, tokens are E x of the patches x by a linear
            map that begins as E and learns; the blocks convolve the image of Eᵀ times their input and embed the result
            by E, which is fixed and has orthonormal columns or rows. With D > P²·C further channels follow the pixels
            and nothing is lost. With D < P²·C the rows of E are the patch's cosines of the lowest frequencies, and
            higher ones are not seen. Both phases are the same function either way. Defaults to P²·C.
        num_heads (int, optional): Number of heads N_h, at least as many as Theorem 1 needs, which is the default.
            Further ones begin with output weights of 0.
        head_dim (int | str | Sequence[int], optional): Channels D_h of a head's values: D for None, as in L21;
            ``'exact'`` for enough to be the convolution; or numbers, for all or for each, with which heads that are
            too narrow begin as the best of their rank. Defaults to None.
        min_head_dim (int): The least channels of a head with ``head_dim='exact'``. Defaults to 1.
        qk_dim (int, optional): Channels D_k of a head's queries and keys. Defaults to D, as in L21.
        null_key (bool, optional): Whether the attention has a null key, which stands for the zeros around the image,
            see :class:`~attncnn_plugin.layers.WindowBias`. L21 has none, so that its attention is not the convolution
            at the image's border. Defaults to True for attention that begins as a convolution, to False otherwise.
        depth (int): Number of blocks. Defaults to 6.
        mlp_dim (int, optional): Hidden channels of the feed-forward networks. Defaults to 4·D.
        phase (str): ``'conv'`` or ``'attn'``. Attention that does not come from a convolution begins with position
            biases of 0 and weights from N(0, 0.02²), the patch projection too. Defaults to ``'attn'``.
        attn_bias_init (float): M, the bias of a head's shift when convolutions become attention. 40 is exact; a
            smaller one gives the biases a gradient to begin with. Defaults to 12.
        query_init, key_init (float): Standard deviation of W^Q and of W^K when convolutions become attention. One of
            them must be 0, or the output would change; both must not, or neither would ever get a gradient. Default
            to 0 and 0.02.
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
        super().__init__()
        height, width = to_2tuple(img_size)
        dim = patch_size**2 * in_chans if embed_dim is None else embed_dim
        mlp_dim = 4 * dim if mlp_dim is None else mlp_dim
        if min(patch_size, in_chans, kernel_size, depth, mlp_dim, dim) < 1:
            raise ValueError(
                f'patch_size={patch_size}, in_chans={in_chans}, kernel_size={kernel_size}, depth={depth}, '
                f'mlp_dim={mlp_dim} and embed_dim={embed_dim} must be at least 1'
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
        conv = new_convolution(in_chans, kernel_size, device='meta')
        self.head_dims = choose_head_dims(head_dim, conv, (patch_size, patch_size), dim, num_heads, min_head_dim)
        self.num_heads = len(self.head_dims)
        self.qk_dim = dim if qk_dim is None else qk_dim
        if self.qk_dim < 1:
            raise ValueError(f'qk_dim={qk_dim} must be at least 1')
        self.null_key = null_key
        self.attn_bias_init = attn_bias_init
        self.query_init = query_init
        self.key_init = key_init
        self.attn_drop_rate = attn_drop_rate

        self.stem = PatchStem(patch_size, in_chans, dim, **dd)
        embedding = patch_embedding(patch_size, in_chans, dim, **dd)
        self.blocks = nn.Sequential(
            *[
                CMHSABlock(
                    dim,
                    PatchConvolution(in_chans, kernel_size, patch_size, embedding, **dd),
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
            self._put_attention(bool(null_key))
            nn.init.trunc_normal_(self.stem.proj.weight, std=0.02)
        elif embedding is not None:
            with torch.no_grad():
                self.stem.proj.weight.copy_(embedding)
        self._follow_state_dicts()

    @property
    def phase(self) -> str:
        """``'conv'`` or ``'attn'``."""
        return 'conv' if isinstance(self.blocks[0].attn, PatchConvolution) else 'attn'

    @torch.no_grad()
    def to_attention(self, generator: Optional[torch.Generator] = None) -> Transition:
        """Turns all convolutions into attention, in place; the output stays as it was (L21, section 4).

        The parameters of everything else stay the same objects; an optimizer has to be given the new ones.

        Args:
            generator (torch.Generator, optional): Of the CPU; draws W^K (or W^Q).

        Returns:
            Transition: What was done.

        Raises:
            RuntimeError: The network is in the phase ``'attn'`` already.
        """
        if self.phase == 'attn':
            raise RuntimeError("the network is in phase='attn' already: there is no convolution to turn into attention")
        before = sum(p.numel() for p in self.parameters())
        convolutions = [block.attn.conv for block in self.blocks]
        self._put_attention(self._null_key_of_convolutions)
        errors = [self._attend_like(block.attn, conv, generator) for block, conv in zip(self.blocks, convolutions)]
        return Transition(
            num_blocks=len(self.blocks),
            kernel_size=self.kernel_size,
            num_heads=self.num_heads,
            head_dims=self.head_dims,
            relative_error=max(errors),
            attn_bias_init=self.attn_bias_init,
            parameters_before=before,
            parameters_after=sum(p.numel() for p in self.parameters()),
        )

    @property
    def _null_key_of_convolutions(self) -> bool:
        return self.null_key is None or self.null_key

    def _put_attention(self, null_key: bool) -> None:
        """Attention in the place of convolutions, whose stem has no linear map yet, or of other attention."""
        like = self.blocks[0].norm1.weight
        dd = {'device': like.device, 'dtype': like.dtype}
        trainable = any(parameter.requires_grad for parameter in self.parameters())
        first = self.phase == 'conv'
        for block in self.blocks:
            requires_grad = any(parameter.requires_grad for parameter in block.attn.parameters())
            block.attn = self._new_attention(null_key, **dd).requires_grad_(requires_grad)
        if first and isinstance(self.stem.proj, nn.Identity):
            self.stem.proj = nn.Linear(len(like), len(like), **dd).requires_grad_(trainable)
            nn.init.eye_(self.stem.proj.weight)
            nn.init.zeros_(self.stem.proj.bias)
        self.train(self.training)  # the new modules too, and whatever a backbone freezes

    def _new_attention(self, null_key: bool, device, dtype) -> PatchAttention:
        dd = {'device': device, 'dtype': dtype}
        position = GridBias(self.num_heads, self.grid_size, null_key, **dd)
        dim = len(self.blocks[0].norm1.weight)  # the last norm can be gone
        return PatchAttention(
            dim,
            self.num_heads,
            position,
            attn_drop=self.attn_drop_rate,
            head_dim=self.head_dims,
            qk_dim=self.qk_dim,
            **dd,
        )

    def _attend_like(self, attention: PatchAttention, conv: nn.Conv2d, generator=None) -> float:
        embedding = patch_embedding(
            self.patch_size, self.stem.in_chans, attention.dim, conv.weight.device, conv.weight.dtype
        )
        patch_size = (self.patch_size, self.patch_size)
        error = attend_like_convolution(attention, conv, patch_size, self.attn_bias_init, embedding)
        for linear, std in ((attention.query, self.query_init), (attention.key, self.key_init)):
            # On the CPU, so that a seed draws the same everywhere.
            weight = torch.zeros(linear.weight.shape)
            if std > 0:
                nn.init.normal_(weight, std=std, generator=generator)
            linear.weight.copy_(weight)
        return error

    @property
    def structure(self) -> str:
        """The phase."""
        return self.phase

    def structure_in(self, state_dict: StateDict, prefix: str = '') -> Optional[str]:
        """Returns the phase of a state dict, from its first block."""
        attn = f'{prefix}blocks.0.attn'
        if f'{attn}.conv.weight' in state_dict:
            return 'conv'
        return 'attn' if f'{attn}.query.weight' in state_dict else None

    def structure_to_load(self, loaded: str) -> str:
        """The phase of the state dict if it is the second: no network goes back to convolutions."""
        return self.structure if loaded == 'conv' else 'attn'

    def follow(self, state_dict: StateDict, prefix: str) -> bool:
        """Takes the attention of a state dict with the heads that are there: an optimizer's state is of these."""
        if self.phase == 'attn' or self.structure_in(state_dict, prefix) != 'attn':
            return super().follow(state_dict, prefix)
        self.take_structure('attn')
        return True

    def take_structure(self, structure: str) -> None:
        """Puts attention in the place of convolutions."""
        self._put_attention(self._null_key_of_convolutions)

    def training_advice(self, structure: str) -> Optional[str]:
        return (
            "the network was built with phase='conv' and turned to attention by the state dict that it loaded: an "
            'optimizer that was built before does not have the parameters of the attention. Build the network with '
            "phase='attn' to train it further"
        )

    def convert_state_dict(self, state_dict: StateDict, prefix: str) -> None:
        """Converts convolutions to attention, where the state dict has any."""
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
            conv = new_convolution(self.stem.in_chans, weight.shape[2], weight.device, weight.dtype)
            conv.weight.copy_(weight)
            conv.bias.copy_(bias)
            state_dict.pop(name + 'embedding', None)
            null_key = self._null_key_of_convolutions
            attention = self._new_attention(null_key, weight.device, weight.dtype)
            try:
                self._attend_like(attention, conv, generator)
            except ValueError as error:
                raise StructureError(f'{name}conv.weight of the state dict: {error}') from error
            state_dict.update({name + key: value for key, value in attention.state_dict().items()})
            if f'{prefix}stem.proj.weight' not in state_dict:  # tokens are the patches
                identity = torch.eye(attention.dim, device=weight.device, dtype=weight.dtype)
                state_dict[f'{prefix}stem.proj.weight'] = identity
                state_dict[f'{prefix}stem.proj.bias'] = weight.new_zeros(attention.dim)
