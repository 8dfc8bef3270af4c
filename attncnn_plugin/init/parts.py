"""The parts of a vision transformer that its start sets: attention, embeddings, and what writes into the tokens.

Models of timm and mmpretrain are told by what they have, not by their class.
"""

from dataclasses import dataclass
from typing import Any, Dict, List, Optional

from torch import Tensor, nn

from ..analysis.vision_transformer import find_transformer, num_prefix_tokens

PREFIX_PARAMETERS = ('cls_token', 'dist_token', 'reg_token')


@dataclass(frozen=True)
class Attention:
    """A layer of attention with its linear maps.

    Attributes:
        name (str): Its name in the model.
        module (nn.Module): With ``qkv``, or ``q_proj``, ``k_proj`` and ``v_proj``, and with ``proj``.
        block (nn.Module): The module that it is a child of.
    """

    name: str
    module: Any
    block: nn.Module

    @property
    def num_heads(self) -> int:
        """Number of heads N_h."""
        return int(self.module.num_heads)

    @property
    def head_dim(self) -> int:
        """Channels d of the queries of a head."""
        return int(self.weight('q').shape[1])

    def weight(self, which: str) -> Tensor:
        """The map to queries ``'q'``, keys ``'k'`` or values ``'v'``: a view of it, ``(N_h, d, D)``."""
        if self.module_has_qkv:
            rows = self.module.qkv.weight.data.unflatten(0, (3, self.num_heads, -1))
            return rows['qkv'.index(which)]
        return getattr(self.module, f'{which}_proj').weight.data.unflatten(0, (self.num_heads, -1))

    def bias(self, which: str) -> Optional[Tensor]:
        """The bias of this map: a view of it, ``(N_h, d)``; None where there is none."""
        if self.module_has_qkv:
            if self.module.qkv.bias is not None:
                return self.module.qkv.bias.data.unflatten(0, (3, self.num_heads, -1))['qkv'.index(which)]
            bias = getattr(self.module, f'{which}_bias', None)
        else:
            bias = getattr(self.module, f'{which}_proj').bias
        if not isinstance(bias, nn.Parameter):  # that of the keys can be a buffer of zeros
            return None
        return bias.data.unflatten(0, (self.num_heads, -1))

    def set_queries_and_keys(self, queries: Tensor, keys: Tensor) -> None:
        """Their weights, ``(N_h, d, D)``; their biases become 0."""
        for which, weight in (('q', queries), ('k', keys)):
            self.weight(which).copy_(weight)
            bias = self.bias(which)
            if bias is not None:
                bias.zero_()

    @property
    def module_has_qkv(self) -> bool:
        """Whether queries, keys and values are of one linear map."""
        return isinstance(getattr(self.module, 'qkv', None), nn.Linear)


def find_attention(model: nn.Module) -> List[Attention]:
    """The attention layers of a vision transformer, in the order of its blocks.

    Raises:
        ValueError: There are none that can be read, or some cannot be started.
    """
    prefix, network = find_transformer(model)
    modules: Dict[str, nn.Module] = dict(network.named_modules())
    found = []
    for name, module in modules.items():
        if hasattr(module, 'num_heads') and _has_maps(module):
            block = modules[name.rpartition('.')[0]]
            found.append(Attention(f'{prefix}.{name}' if prefix else name, module, block))
    if not found:
        raise ValueError(
            f'model has a {type(network).__name__}, in which no module has num_heads, a linear map qkv (or q_proj, '
            "k_proj and v_proj) and a linear map proj: the start is for the attention of timm's ViT, DeiT, BEiT, EVA, "
            "DINOv3 and Swin, and of mmpretrain's VisionTransformer, BEiT and SwinTransformer"
        )
    for attention in found:
        _check(attention)
    for name, module in modules.items():  # a pooling by attention at the end is no part of a block
        if '.' in name and hasattr(module, 'num_heads') and hasattr(module, 'proj') and not _has_maps(module):
            raise ValueError(
                f'{name} of a {type(network).__name__} is a {type(module).__name__} without a linear map qkv (or '
                'q_proj, k_proj and v_proj): some blocks have attention that cannot be read'
            )
    return found


def _has_maps(module: Any) -> bool:
    fused = isinstance(getattr(module, 'qkv', None), nn.Linear)
    separate = all(isinstance(getattr(module, f'{which}_proj', None), nn.Linear) for which in 'qkv')
    return (fused or separate) and isinstance(getattr(module, 'proj', None), nn.Linear)


def _check(attention: Attention) -> None:
    module = attention.module
    reason = None
    if getattr(module, 'logit_scale', None) is not None:
        reason = (
            'it compares queries and keys by their angle, and an MLP with bounded outputs gives its position bias '
            '(Swin v2): neither can be a Gaussian'
        )
    elif not isinstance(getattr(module, 'q_norm', None), (nn.Identity, type(None))):
        reason = 'it normalizes queries and keys, so that they have no scale: build the model with qk_norm=False'
    elif getattr(module, 'num_kv_heads', attention.num_heads) != attention.num_heads:
        reason = 'some of its heads share their keys, and each needs a shift of its own'
    elif getattr(module, 'rope', None) is not None:
        reason = 'its rotations are inside of it, where their angles cannot be read: give a model of timm'
    if reason is not None:
        raise ValueError(f'{attention.name} is a {type(module).__name__} that cannot start as a convolution: {reason}')


def patch_convolutions(network: Any) -> List[nn.Conv2d]:
    """The convolutions of the patch embedding: the first takes the images, the last one makes tokens of patches.

    Raises:
        ValueError: There is none.
    """
    convolutions = [module for module in network.patch_embed.modules() if isinstance(module, nn.Conv2d)]
    if not convolutions:
        raise ValueError(f'the patch_embed of {type(network).__name__} has no convolution that makes tokens of patches')
    return convolutions


def writers(network: Any, attentions: List[Attention]) -> List[Any]:
    """The linear maps whose outputs are added to the tokens: the patch embedding, and two in each block.

    Those of a block are the ``proj`` of its attention and its last linear map, that of the MLP.

    Raises:
        ValueError: One of them has another number of outputs than a token has channels, or the MLP is not beside its
            attention.
    """
    found: List[Any] = [patch_convolutions(network)[-1]]
    for attention in attentions:
        last = [module for module in attention.block.modules() if isinstance(module, nn.Linear)][-1]
        if last is attention.module.proj:
            raise ValueError(
                f'{attention.name} has no MLP beside it in its {type(attention.block).__name__}: a block of attention '
                'and then an MLP was looked for, both of which write into the tokens'
            )
        found += [attention.module.proj, last]
        width = attention.weight('q').shape[-1]
        if last.out_features != width or attention.module.proj.out_features != width:
            raise ValueError(
                f'the block of {attention.name} ends with a linear map to {last.out_features} channels, but its tokens '
                f'have {width}: the map that writes into the tokens was looked for'
            )
    return found


def mlp_readers(attention: Attention) -> List[nn.Linear]:
    """The linear maps in the block of an attention that read the tokens beside it: the MLP's first ones."""
    of_attention = set(attention.module.modules())
    width = attention.weight('q').shape[-1]
    mlp = [
        module for module in attention.block.modules() if isinstance(module, nn.Linear) and module not in of_attention
    ]
    return [module for module in mlp[:-1] if module.in_features == width]


def position_embedding(network: Any, patches: int) -> Tensor:
    """The embedding of absolute positions, a view, ``(N, D)``: of the patches, or of prefix tokens and the patches.

    Raises:
        ValueError: There is none that is learned, or it is for another number of patches.
    """
    embedding = getattr(network, 'pos_embed', None)
    if not isinstance(embedding, nn.Parameter):
        raise ValueError(f'model has a {type(network).__name__} without a learned pos_embed, which is to be set')
    rows = embedding.data.flatten(0, -2)
    if embedding.ndim != 3 or not patches <= len(rows) <= patches + num_prefix_tokens(network):
        raise ValueError(
            f'pos_embed of {type(network).__name__} has shape {tuple(embedding.shape)}, but (1, N, D) was looked for, '
            f'with N = {patches} patches and up to {num_prefix_tokens(network)} other tokens'
        )
    return rows
