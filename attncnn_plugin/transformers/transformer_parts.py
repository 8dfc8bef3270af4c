"""The parts of a vision transformer that its start sets: attention, what writes into the tokens and what reads them.

Models of timm and mmpretrain are told by what they have, not by their class.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

import torch
from torch import Tensor, nn

from .vision_transformer import find_transformer

Call = Tuple[Tuple[Any, ...], Dict[str, Any]]


@dataclass
class Attention:
    """A layer of attention with its linear maps, and the shifts at which its heads are to look.

    Attributes:
        name (str): Its name in the model.
        module (nn.Module): With ``qkv``, or ``q_proj``, ``k_proj`` and ``v_proj``, and with ``proj``.
        block (nn.Module): The module that it is a child of.
        shifts (Tensor): Δ of each head, ``(N_h, 2)``; none to begin with.
    """

    name: str
    module: Any
    block: nn.Module
    shifts: Tensor = torch.empty(0, 2)

    @property
    def num_heads(self) -> int:
        """Number of heads N_h."""
        return int(self.module.num_heads)

    @property
    def head_dim(self) -> int:
        """Channels d of the queries of a head."""
        return int(self.weight('q').shape[1])

    @property
    def width(self) -> int:
        """Channels D of a token."""
        return int(self.weight('q').shape[2])

    def weight(self, which: str) -> Tensor:
        """Returns the map to queries ``'q'``, keys ``'k'`` or values ``'v'``, a view, ``(N_h, d, D)``."""
        if _is_linear(self.module, 'qkv'):
            return self.module.qkv.weight.data.unflatten(0, (3, self.num_heads, -1))['qkv'.index(which)]
        return getattr(self.module, f'{which}_proj').weight.data.unflatten(0, (self.num_heads, -1))

    def bias(self, which: str) -> Optional[Tensor]:
        """Returns the bias of this map, a view, ``(N_h, d)``; None where there is none."""
        if _is_linear(self.module, 'qkv') and self.module.qkv.bias is not None:
            return self.module.qkv.bias.data.unflatten(0, (3, self.num_heads, -1))['qkv'.index(which)]
        map_to = getattr(self.module, f'{which}_proj', None)
        bias = getattr(self.module, f'{which}_bias', None) if map_to is None else map_to.bias
        # That of the keys can be a buffer of zeros.
        return bias.data.unflatten(0, (self.num_heads, -1)) if isinstance(bias, nn.Parameter) else None

    def set_maps(self, which: str, *weights: Tensor) -> None:
        """Sets the weights of the maps ``'qk'`` or ``'v'``, ``(N_h, d, D)`` each; their biases become 0."""
        for name, weight in zip(which, weights):
            self.weight(name).copy_(weight)
            bias = self.bias(name)
            if bias is not None:
                bias.zero_()


def find_attention(model: nn.Module) -> List[Attention]:
    """Returns the attention layers of a vision transformer, in the order of its blocks.

    Raises:
        ValueError: There are none that can be read, or some cannot be started.
    """
    prefix, network = find_transformer(model)
    found = []
    for name, module in network.named_modules():
        if not (hasattr(module, 'num_heads') and hasattr(module, 'proj')):
            continue
        has_maps = _is_linear(module, 'qkv') or all(_is_linear(module, f'{which}_proj') for which in 'qkv')
        if has_maps and _is_linear(module, 'proj'):
            full_name = f'{prefix}.{name}' if prefix else name
            found.append(Attention(full_name, module, network.get_submodule(name.rpartition('.')[0])))
            _check(found[-1])
        elif '.' in name:  # a pooling by attention at the end is no part of a block
            raise ValueError(
                f'{name} of a {type(network).__name__} is a {type(module).__name__} without a linear map qkv (or '
                'q_proj, k_proj and v_proj): some blocks have attention that cannot be read'
            )
    if not found:
        raise ValueError(
            f'model has a {type(network).__name__}, in which no module has num_heads and linear maps qkv (or q_proj, '
            "k_proj, v_proj) and proj: give timm's ViT, DeiT, BEiT, EVA, DINOv3 or Swin, or mmpretrain's "
            'VisionTransformer, BEiT or SwinTransformer'
        )
    return found


def _is_linear(module: Any, name: str) -> bool:
    return isinstance(getattr(module, name, None), nn.Linear)


def _check(attention: Attention) -> None:
    module = attention.module
    reason = None
    if getattr(module, 'logit_scale', None) is not None:
        reason = 'it compares queries and keys by their angle (Swin v2): bounded scores cannot be a Gaussian'
    elif not isinstance(getattr(module, 'q_norm', None), (nn.Identity, type(None))):
        reason = 'it normalizes queries and keys, so that they have no scale: build the model with qk_norm=False'
    elif getattr(module, 'num_kv_heads', attention.num_heads) != attention.num_heads:
        reason = 'some of its heads share their keys, and each needs a shift of its own'
    elif getattr(module, 'rope', None) is not None:
        reason = 'its rotations are inside of it, where their angles cannot be read: give a model of timm'
    if reason is not None:
        raise ValueError(f'{attention.name} is a {type(module).__name__} that cannot start as a convolution: {reason}')


def patch_convolutions(network: Any) -> List[nn.Conv2d]:
    """Returns the convolutions of the patch embedding: the first takes the images, the last makes tokens of patches.

    Raises:
        ValueError: There is none.
    """
    convolutions = [module for module in network.patch_embed.modules() if isinstance(module, nn.Conv2d)]
    if not convolutions:
        raise ValueError(f'the patch_embed of {type(network).__name__} has no convolution that makes tokens of patches')
    return convolutions


def grid_of(network: Any) -> Tuple[int, int]:
    """Returns height and width of the grid of patches that a network was built for."""
    return built_for(network, 'grid_size', 'init_out_size')


def built_for(network: Any, of_timm: str, of_mmpretrain: str) -> Tuple[int, int]:
    """Returns height and width of what a network was built for, under the names that timm and mmpretrain have for it.

    Raises:
        ValueError: Its patch embedding has neither.
    """
    size = getattr(network.patch_embed, of_timm, None) or getattr(network.patch_embed, of_mmpretrain, None)
    if size is None:
        raise ValueError(
            f'the patch_embed of {type(network).__name__} has no {of_timm} or {of_mmpretrain}: give it an image size'
        )
    return int(size[0]), int(size[1])


def mlp_maps(attention: Attention) -> List[nn.Linear]:
    """Returns the linear maps beside an attention in its block: the last one writes into the tokens.

    Raises:
        ValueError: There is none, or a map that writes has another number of outputs than a token has channels.
    """
    own = set(attention.module.modules())
    found = [module for module in attention.block.modules() if isinstance(module, nn.Linear) and module not in own]
    if not found or {found[-1].out_features, attention.module.proj.out_features} != {attention.width}:
        raise ValueError(
            f'{attention.name} needs an MLP beside it in its {type(attention.block).__name__}, both with a last linear '
            f'map to the {attention.width} channels of a token'
        )
    return found


@contextmanager
def arguments_of(modules: Iterable[nn.Module]) -> Iterator[Dict[nn.Module, Call]]:
    """Returns a dict that fills with what modules are called with inside: their positional and named arguments."""
    found: Dict[nn.Module, Call] = {}
    handles = [
        module.register_forward_pre_hook(lambda own, *called: found.update({own: called}), with_kwargs=True)
        for module in modules
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def factors(products: Tensor, rank: int) -> Tuple[Tensor, Tensor]:
    """Computes A and B, ``(N, rank, D)``, whose products AᵀB are nearest to some ``(N, D, D)``, by their SVD."""
    left, values, right = torch.linalg.svd(products)
    roots = values[:, :rank, None].sqrt()
    return roots * left.mT[:, :rank], roots * right[:, :rank]


def input_of(module: nn.Module, run: Callable[[], Any]) -> Any:
    """Returns the first argument that a module is called with when something runs."""
    with arguments_of([module]) as found:
        run()
    return found[module][0][0]
