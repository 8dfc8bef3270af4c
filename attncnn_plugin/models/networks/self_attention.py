"""The self-attention network of Cordonnier et al. 2020 (C20), behind the mmpretrain backbones and the timm models."""

from typing import Callable, Optional, Sequence, Tuple, Union

import torch
from timm.layers import DropPath, Mlp, calculate_drop_path_rates, to_2tuple
from torch import Tensor, nn

from ...convert.to_conv import ConvFit, mhsa_to_conv
from ...layers.grid_attention import GridAttention
from ...layers.grid_convolution import GridConvolution
from ...layers.linear import LinearMap, check_plain_linear, has_hooks
from ...layers.patches import image_to_patches
from ...layers.structure import Restructurable, StateDict, StructureError
from .deployment import Deployment
from .grid_network import GridNetwork, check_channels, check_drop_path_rate

BlockStructure = Union[str, Tuple[int, ...]]


class SpaceToDepthStem(nn.Module):
    """Invertible downsampling, r x r pixels to r²·C channels, and a linear map to D channels (C20, 4.1).

    Args:
        in_chans (int): Channels C of the image.
        embed_dim (int): Channels D of a token.
        reduction (int): Side r of the square of pixels that becomes a token, C20's invertible pooling width (Table 2).
            Defaults to 2.
    """

    def __init__(self, in_chans: int, embed_dim: int, reduction: int = 2, device=None, dtype=None) -> None:
        super().__init__()
        self.in_chans = in_chans
        self.reduction = reduction
        self.proj = nn.Linear(in_chans * reduction**2, embed_dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, H/r, W/r, D)``.

        Raises:
            ValueError: The image does not have the stem's channels, or its height and width are no multiples of r.
        """
        check_channels(x, self.in_chans)
        return self.proj(image_to_patches(x, (self.reduction, self.reduction)))


def token_grid(img_size: Union[int, Tuple[int, int]], reduction: int) -> Tuple[int, int]:
    """Height and width in tokens of an image, for position tables.

    Raises:
        ValueError: The image cannot be cut into tokens.
    """
    height, width = to_2tuple(img_size)
    if reduction < 1 or min(height, width) < reduction or height % reduction or width % reduction:
        raise ValueError(
            f'img_size={img_size} must be a multiple of reduction={reduction}, the side of the squares of pixels that '
            'become tokens'
        )
    return height // reduction, width // reduction


class SelfAttentionBlock(Restructurable):
    """Attention, linear map, residual and norm, then feed-forward network, residual and norm (post-norm).

    A state dict carries its structure: that of a block for inference turns the block to one, and one of a block for
    training is merged for a block that is for inference.

    Args:
        dim (int): Channels D.
        attn (nn.Module): The attention, ``(B, H, W, D)`` to the same.
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
        self.attn = attn
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)
        self.norm1 = nn.LayerNorm(dim, eps=1e-12, **dd)
        self.mlp = Mlp(dim, mlp_dim, drop=(0.0, proj_drop), **dd)
        self.norm2 = nn.LayerNorm(dim, eps=1e-12, **dd)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self._follow_state_dicts()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.drop_path(self.proj_drop(self._attend(x))))
        return self.norm2(x + self.drop_path(self.mlp(x)))

    def _attend(self, x: Tensor) -> Tensor:
        """The attention and the linear map after it."""
        # Hooks want to see the attention's own output; a symbolic trace has no sizes.
        if isinstance(self.attn, GridAttention) and isinstance(x, Tensor) and not has_hooks(self.attn):
            return self.attn(x, following=self.proj)
        return self.proj(self.attn(x))

    @property
    def is_deployed(self) -> bool:
        """Whether the block is for inference alone."""
        return 'deployed' in self._buffers

    def check_deployable(self, name: str = '') -> None:
        """Whether the block can be switched to inference.

        Args:
            name (str): Of the block, with a dot, for the message. Defaults to none.

        Raises:
            TypeError: The attention is none of this package.
            RuntimeError: One of the two linear maps after the attention is no plain linear layer any more.
        """
        if self.is_deployed:
            return
        if not isinstance(self.attn, GridAttention):
            raise TypeError(
                f'{name}attn is a {type(self.attn).__name__}, but only attention of attncnn_plugin.layers '
                'can be switched to inference'
            )
        check_plain_linear(f'{name}attn.value', self.attn.value)
        check_plain_linear(f'{name}proj', self.proj)

    @torch.no_grad()
    def switch_to_deploy(self) -> None:
        """For inference alone: the two linear maps after the attention become one. timm calls it by this name too.

        Raises:
            TypeError, RuntimeError: See :meth:`check_deployable`.
        """
        self.check_deployable()
        if not self.is_deployed:
            value, proj = self.attn.value, self.proj
            merged = LinearMap(value.weight, value.bias).exactly_then(LinearMap(proj.weight, proj.bias))
            self._merge_maps()
            value.weight, value.bias = nn.Parameter(merged.weight), nn.Parameter(merged.bias)
        if isinstance(self.attn, GridAttention):
            self.attn.switch_to_deploy()
        self.eval().requires_grad_(False)

    @torch.no_grad()
    def replace_by_convolution(
        self,
        kernel_size: int,
        size: Optional[Sequence[int]],
        tolerance: float,
    ) -> Optional[ConvFit]:
        """Replaces the attention of a block for inference by the convolution that is nearest to it, if it is near.

        Returns:
            ConvFit | None: How well it fits, None if the error could be larger than ``tolerance``.
        """
        attn = self.attn
        if not isinstance(attn, GridAttention) or attn.depends_on_content or attn.num_heads == 0:
            return None
        if size is None:
            size = tuple(min(16, largest) for largest in attn.max_size or (16, 16))
        conv, fit = mhsa_to_conv(attn, kernel_size, size)
        if fit.bound > tolerance:
            return None
        self.attn = GridConvolution(conv).eval().requires_grad_(False)
        return fit

    def _merge_maps(self) -> None:
        """The modules of a block for inference; a buffer marks it in state dicts."""
        weight = self.proj.weight
        self.register_buffer('deployed', torch.ones((), dtype=torch.bool, device=weight.device))
        self.proj = nn.Identity()
        if self.attn.value.bias is None:
            self.attn.value.bias = nn.Parameter(weight.new_zeros(len(weight)))

    @property
    def structure(self) -> BlockStructure:
        """``'training'``, ``'deployed'``, or the shape of the kernel of the convolution that replaces the attention."""
        if isinstance(self.attn, GridConvolution):
            return tuple(self.attn.conv.weight.shape)
        return 'deployed' if self.is_deployed else 'training'

    def structure_in(self, state_dict: StateDict, prefix: str) -> Optional[BlockStructure]:
        """The same of a state dict."""
        kernel = state_dict.get(f'{prefix}attn.conv.weight')
        if kernel is not None and kernel.ndim == 4:
            return tuple(kernel.shape)
        if f'{prefix}deployed' in state_dict:
            return 'deployed'
        return 'training' if f'{prefix}attn.value.weight' in state_dict else None

    def structure_to_load(self, loaded: BlockStructure) -> BlockStructure:
        """A block for inference stays one: merged maps cannot be separated, convolutions not undone."""
        stays = loaded == 'training' or loaded == 'deployed' and isinstance(self.attn, GridConvolution)
        return self.structure if stays else loaded

    def take_structure(self, structure: BlockStructure) -> None:
        """Turns the block to one for inference, with a convolution or with attention."""
        if structure == 'deployed':
            self._merge_maps()
            self.switch_to_deploy()
            return
        if not self.is_deployed:
            self._merge_maps()
        like, (out_channels, in_channels, *kernel_size) = self.norm1.weight, structure
        conv = nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            padding='same',
            padding_mode='replicate',
            device=like.device,
            dtype=like.dtype,
        )
        self.attn = GridConvolution(conv)
        self.eval().requires_grad_(False)

    def convert_state_dict(self, state_dict: StateDict, prefix: str) -> None:
        """Merges the linear maps of a block for training."""
        if isinstance(self.attn, GridConvolution):
            raise StructureError(
                f'{prefix}attn is a convolution here, but attention in the state dict: load it into a model as it was '
                'built'
            )
        value, proj = (
            LinearMap(state_dict.get(f'{prefix}{name}.weight'), state_dict.get(f'{prefix}{name}.bias'))
            for name in ('attn.value', 'proj')
        )
        if proj.weight is None or proj.bias is None:
            return  # missing keys, as for any other parameter
        if value.weight.ndim != 2 or proj.weight.ndim != 2 or proj.weight.shape[1] != len(value.weight):
            raise StructureError(
                f'{prefix}proj.weight of the state dict has shape {tuple(proj.weight.shape)} and '
                f'{prefix}attn.value.weight {tuple(value.weight.shape)}: the first cannot follow the second, so the '
                'state dict is damaged'
            )
        del state_dict[f'{prefix}proj.weight'], state_dict[f'{prefix}proj.bias']
        merged = value.exactly_then(proj)
        state_dict[f'{prefix}attn.value.weight'] = merged.weight
        state_dict[f'{prefix}attn.value.bias'] = merged.bias
        state_dict[f'{prefix}deployed'] = self.deployed

    def training_advice(self, structure: BlockStructure) -> str:
        return (
            'the network took the structure for inference of the state dict that it loaded: its blocks do not '
            'train. Load the checkpoint from before switch_to_deploy() to train it further'
        )


class SelfAttentionNetwork(Restructurable, GridNetwork):
    """Stem and blocks: images ``(B, C, H, W)`` to features ``(B, H/r, W/r, D)``.

    Args:
        attn_layer (Callable): Makes the attention of a block: called as ``attn_layer(dim, num_heads, attn_drop=…,
            attn_impl=…, device=…, dtype=…)``, it gives a module ``(B, H, W, D)`` to the same.
        embed_dim (int): Channels D. Defaults to 400.
        depth (int): Number of blocks. Defaults to 6.
        num_heads (int): Number of heads N_h of a block. Defaults to 9.
        mlp_dim (int): Hidden channels of the feed-forward networks. Defaults to 512.
        in_chans (int): Channels C of the image. Defaults to 3.
        proj_drop_rate (float): Dropout rate of hidden states. Defaults to 0.
        attn_drop_rate (float): Dropout rate of attention probabilities. Defaults to 0.
        drop_path_rate (float): Stochastic depth rate of the last block, rising linearly from 0. Defaults to 0.
        attn_impl (str): ``'auto'``, ``'dense'`` or ``'separable'``, see
            :class:`~attncnn_plugin.layers.grid_attention.GridAttention`. Defaults to ``'auto'``.
        reduction (int): Side r of the square of pixels that becomes a token. Defaults to 2.
        share_position (bool): Whether all blocks have the same position tables R and C, as the text of C20 has it (at
            eq. 8), or each its own, as the released code has for its results. A state dict has them once a block all
            the same. Defaults to False.

    Raises:
        ValueError: A size below 1, a rate out of range, or ``share_position`` without learned position tables.
    """

    def __init__(
        self,
        attn_layer: Callable[..., nn.Module],
        embed_dim: int = 400,
        depth: int = 6,
        num_heads: int = 9,
        mlp_dim: int = 512,
        in_chans: int = 3,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        attn_impl: str = 'auto',
        reduction: int = 2,
        share_position: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        if min(embed_dim, depth, mlp_dim, in_chans, reduction) < 1:
            raise ValueError(
                f'embed_dim={embed_dim}, depth={depth}, mlp_dim={mlp_dim}, in_chans={in_chans} and '
                f'reduction={reduction} must be at least 1'
            )
        check_drop_path_rate(drop_path_rate)
        self.stem = SpaceToDepthStem(in_chans, embed_dim, reduction, **dd)
        self.blocks = nn.Sequential(
            *[
                SelfAttentionBlock(
                    embed_dim,
                    attn_layer(embed_dim, num_heads, attn_drop=attn_drop_rate, attn_impl=attn_impl, **dd),
                    mlp_dim,
                    proj_drop=proj_drop_rate,
                    drop_path=drop_path,
                    **dd,
                )
                for drop_path in calculate_drop_path_rates(drop_path_rate, depth)
            ]
        )
        self.norm = nn.Identity()  # every block ends in a norm
        self.share_position = share_position
        if share_position:
            self._share_position_tables()
        self._follow_state_dicts()

    def _share_position_tables(self) -> None:
        layers = [block.attn for block in self.blocks]
        tables = getattr(layers[0], 'position_tables', None)
        if tables is None or not list(tables.parameters()):
            raise ValueError(
                'share_position=True is for learned position tables, which the attention of the blocks does not have: '
                f'{layers[0]}'
            )
        for layer in layers[1:]:
            layer.share_position_tables(tables)

    @property
    def structure(self) -> bool:
        """Whether the blocks share their position tables."""
        return self.share_position

    def structure_in(self, state_dict: StateDict, prefix: str) -> bool:
        """That of the network, which loads shared tables either way.

        Raises:
            StructureError: The tables of the blocks differ, but the network has one for all of them.
        """
        if self.share_position:
            first = {id(p): name for name, p in self.blocks.named_parameters()}
            for name, parameter in self.blocks.named_parameters(remove_duplicate=False):
                pair = name, first[id(parameter)]
                tables = [state_dict.get(f'{prefix}blocks.{own}') for own in pair]
                if None not in tables and name not in first.values() and not torch.equal(*tables):
                    raise StructureError(
                        f'{prefix}blocks.{pair[0]} and {prefix}blocks.{pair[1]} of the state dict differ: its blocks '
                        'have position tables of their own, so build the network with share_position=False'
                    )
        return self.share_position

    def switch_to_deploy(
        self,
        conv_tolerance: Optional[float] = None,
        kernel_size: int = 3,
        size: Optional[Tuple[int, int]] = None,
    ) -> Deployment:
        """For inference alone: merges linear maps and keeps what depends on the grid alone by its size, in place.

        The output stays as it was, but for attention that is replaced by a convolution. No parameter trains any more.
        mmpretrain's ``reparameterize_model.py`` calls it by this name.

        Args:
            conv_tolerance (float, optional): Attention that depends on positions alone is replaced by its convolution
                where that errs by no more than this, for inputs of norm 1, see
                :class:`~attncnn_plugin.convert.ConvFit`; 0 up to rounding is for heads that attend to a single pixel.
                Defaults to None, no replacement.
            kernel_size (int): Kernel size of these convolutions. Defaults to 3.
            size (tuple[int, int], optional): The grid, in tokens, on which they are fitted and for which the error
                holds. Defaults to 16 pixels an axis, or what the position tables cover.

        Returns:
            Deployment: What was done.

        Raises:
            TypeError: The attention of a block is none of this package. Nothing is changed then, nor below.
            RuntimeError: A linear map is no plain linear layer any more.
            ValueError: ``conv_tolerance`` is negative, or ``size`` is larger than the position tables.
        """
        if conv_tolerance is not None and not conv_tolerance >= 0:
            raise ValueError(f'conv_tolerance={conv_tolerance} must be at least 0, or None for no convolution')
        for i, block in enumerate(self.blocks):
            block.check_deployable(f'blocks.{i}.')
            largest = getattr(block.attn, 'max_size', None)
            if (
                conv_tolerance is not None
                and size is not None
                and largest
                and (size[0] > largest[0] or size[1] > largest[1])
            ):
                raise ValueError(
                    f'size={size} is larger than the {largest} that the position tables of blocks.{i} were built for'
                )
        before = sum(p.numel() for p in self.parameters())
        merged = tuple(i for i, block in enumerate(self.blocks) if not block.is_deployed)
        for block in self.blocks:
            block.switch_to_deploy()
        convolutions = {}
        for i, block in enumerate(self.blocks):
            fit = None
            if conv_tolerance is not None:
                fit = block.replace_by_convolution(kernel_size, size, conv_tolerance)
            if fit is not None:
                convolutions[i] = fit
        self.eval().requires_grad_(False)
        return Deployment(merged, before, sum(p.numel() for p in self.parameters()), convolutions)
