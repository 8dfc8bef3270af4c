"""Heads removed from any model: of this package's attention, and of other libraries' vision transformers.

A bias takes what a head adds on average (Cordonnier et al. 2020 (C20), appendix E).
"""

import copy
import math
import re
from contextlib import ExitStack, contextmanager
from numbers import Integral
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from ..attention.content_images import ContentImageAttention
from ..attention.heads import PrunableHeads
from ..attention.images import GroupedLinear, ImageAttention
from ..attention.neighbourhoods import AxisTiles, join_tiles
from ..attention.tokens import GridAttention
from ..change import (
    Change,
    LayerChange,
    Successor,
    all_or_nothing,
    check_not_distributed,
    number_of_parameters,
    within,
)
from ..convert.models import in_words
from ..heads.choice import module_in
from ..transformers.adapters import KNOWN, Windows, numbers_in_windows, unknown_class
from ..transformers.relative_tables import SHARED_BIASES
from ..transformers.transformer_heads import TransformerHeads, transformer_heads
from ..transformers.vision_transformer import part_of

Heads = Union[PrunableHeads, TransformerHeads]

# Parts of a vision transformer that hold something for the heads of all its layers: biases, and rotations.
SHARED = (*SHARED_BIASES, 'rope')
# The number of a block in the name of its attention: timm's blocks.0., mmpretrain's layers.0., Hugging Face's layer.0.
# and torchvision's layers.encoder_layer_0.
BLOCK = r'(?:^|\.)(?:blocks|layers?)\.(?:encoder_layer_)?({})(?:\.|$)'


def prunable_heads(model: nn.Module) -> Dict[str, Heads]:
    """Returns the attention of a model whose heads can be removed, by the names of ``model.named_modules()``.

    Args:
        model (nn.Module): Any model.

    Returns:
        dict[str, PrunableHeads | TransformerHeads]: With ``num_heads`` and ``prune_heads(heads)``. Attention in which
        heads share something is among it; ``prune_heads`` refuses it.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', depth=2)
        >>> {name: layer.num_heads for name, layer in prunable_heads(model).items()}
        {'blocks.0.attn': 3, 'blocks.1.attn': 3}
    """
    found: Dict[str, Heads] = {}
    for name, module in model.named_modules():
        heads = module if isinstance(module, PrunableHeads) else transformer_heads(module)
        if heads is not None:
            found[name] = heads
        if isinstance(heads, TransformerHeads):
            parent = model.get_submodule(name.rpartition('.')[0])
            if parent is not module and type(parent).__module__ == type(module).__module__:
                heads.block = parent  # of the same library, which knows its windows
    return found


def prune_heads(model: nn.Module, heads: Mapping[Union[str, int], Sequence[int]], allow_empty: bool = False) -> Change:
    """Removes heads of a model, in place; it computes what it did with their outputs at zero.

    The model is one with attention of this package, or a vision transformer of another library: ViT, DeiT, BEiT,
    EVA, DINOv3, ``vit_relpos_*`` and Swin. Linear maps to and from the heads shrink, tables of relative positions lose
    their columns, and the fused kernels stay. A state dict carries the number of heads. Networks of this package take
    it as they load it; models of other libraries take it by :func:`attncnn_plugin.follow_state_dict`.

    Args:
        model (nn.Module): The model.
        heads (Mapping[str | int, Sequence[int]]): By the name of the attention, or the number of its block, the heads
            to remove, counted among those there are now.
        allow_empty (bool): Whether all heads of a layer may go, which leaves it the bias of its output. Defaults to
            False.

    Returns:
        Change: The layers with their heads before and after, and what took the place of each parameter, for
        :func:`replace_parameters`.

    Raises:
        TypeError: A model that is wrapped for distributed training; attention whose heads share something, of a class
            that is unknown, or with weights that something computes, are quantized or of another shape.
        ValueError: A layer or a head that is not there, all heads of a layer; something that layers share, such as a
            bias, an encoding of positions or a parameter; or a hook or an attribute of a parameter that may not fit
            the new one. Nothing is removed after an error.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', depth=2)
        >>> print(prune_heads(model, {'blocks.0.attn': [0, 2]}))
        layer          before   after   parameters
        blocks.0.attn  3 heads  1 head  148,224 → 49,536
        model                           1,268,776 → 1,170,088
        >>> model.blocks[0].attn.qkv
        Linear(in_features=192, out_features=192, bias=True)
        >>> fresh = timm.create_model('vit_tiny_patch16_224', depth=2)
        >>> import attncnn_plugin
        >>> bool(attncnn_plugin.follow_state_dict(fresh, model.state_dict()))
        True
        >>> fresh.load_state_dict(model.state_dict())
        <All keys matched successfully>
        >>> fresh.blocks[0].attn.num_heads
        1
    """
    check_not_distributed(model)
    layers = prunable_heads(model)
    named = {layer_name(model, layers, key): list(indices) for key, indices in heads.items()}
    if len(named) < len(heads):
        raise ValueError(f'heads={dict(heads)} names a layer twice')
    for name, indices in named.items():
        check_prunable(model, name, layers[name])
        named[name] = layers[name].check_heads(indices, allow_empty)
    replaced: Dict[nn.Parameter, Successor] = {}
    changes, before = [], number_of_parameters(model)
    with all_or_nothing([model]):
        for name, layer in layers.items():
            if named.get(name):
                module, was = model.get_submodule(name), in_words(layer)
                of_layer = number_of_parameters(module)
                replaced.update(within(name, layer.prune_heads(named[name], allow_empty)))
                changes.append(LayerChange(name, was, in_words(layer), of_layer, number_of_parameters(module)))
    return Change(tuple(changes), before, number_of_parameters(model), replaced)


def layer_name(model: nn.Module, layers: Mapping[str, Heads], key: Union[str, int]) -> str:
    """Returns the name of a layer, where its name or the number of its block is given."""
    key = module_in(key, layers) or key if isinstance(key, str) else key
    found = [name for name in layers if name == key or isinstance(key, Integral) and re.search(BLOCK.format(key), name)]
    named: Any = dict(model.named_modules()).get(str(key))
    if not found and hasattr(named, 'num_heads'):
        raise TypeError(f'heads cannot be removed from {key}, which is a {unknown_class(named)}')
    if len(found) != 1:
        raise ValueError(
            f'heads of {key!r} are to be removed, but there are {len(found)} attention layers of that name or block '
            f'with heads that can be removed: name one of {", ".join(layers) or f"none at all: {KNOWN}"}'
        )
    return found[0]


def check_prunable(model: nn.Module, name: str, layer: Heads) -> None:
    """Refuses attention that is not alone with what belongs to its heads.

    Raises:
        ValueError: A bias or an encoding that all layers share, or a parameter that another layer has too.
    """
    module = model.get_submodule(name)
    places = sum(other is module for _, other in model.named_modules(remove_duplicate=False))
    names: Dict[Any, List[str]] = {}
    for own, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(own)
    for part in layer.head_parameters() if isinstance(layer, PrunableHeads) else layer.layout:
        found = names.get(part_of(module, part), [])
        if len(found) > places:
            raise ValueError(
                f'heads of {name} cannot be removed: {" and ".join(found)} are one parameter; give each its own'
            )
    if isinstance(layer, PrunableHeads):
        return
    parts = name.split('.')
    for number in range(len(parts)):
        parent: Any = model.get_submodule('.'.join(parts[:number]))
        for part in SHARED:
            shared = getattr(parent, part, None)
            if isinstance(shared, nn.Module) and any(True for _ in shared.parameters()):
                raise ValueError(
                    f'heads of {name} cannot be removed: {type(parent).__name__} has {part}, which all layers share '
                    'and which has parameters for each of the heads; a model where each layer has its own can be pruned'
                )


def split_heads(layer: Heads, outputs: Tensor) -> List[Tensor]:
    """Returns the part of each head in the outputs of all, ``(…, D_h)``, as the linear map after them takes these."""
    if isinstance(layer.output, GroupedLinear):  # (…, N_h, Q, C)
        return list(outputs.unbind(-3))
    return [outputs[..., layer.output_entries([head])] for head in range(layer.num_heads)]


class HeadMeans:
    """Sums up the mean outputs P_h X W^V_h of the heads of a layer, over queries and images.

    Attributes:
        total (Tensor): Their sum over all queries, head after head, ``(Σ D_h,)`` in float64.
        count (Tensor): The number of queries, a scalar in float64.
        size (tuple[int, ...] | None): Height and width of the last grid of tokens, or of the last image; None before
            the first, and for a vision transformer of another library.
    """

    def __init__(self, layer: Heads) -> None:
        weight: Any = layer.output.weight
        width = weight.shape[1] * getattr(layer.output, 'groups', 1)
        self.total = torch.zeros(width, dtype=torch.float64, device=weight.device)
        self.count = torch.zeros((), dtype=torch.float64, device=weight.device)
        self.size: Optional[Tuple[int, ...]] = None
        self.tiles: Optional[List[AxisTiles]] = None
        self.windows: Callable[[], Optional[Windows]] = lambda: None  # how the module around cuts its input

    def add(self, output: nn.Module, args: Tuple[Tensor]) -> None:
        """Adds the outputs of all heads that the linear map gets."""
        (heads,) = args
        if isinstance(output, GroupedLinear):  # (…, N_h, Q, C)
            heads = heads.transpose(-3, -2).flatten(-2)
        heads = heads.detach()
        if self.tiles is not None:  # without queries that fill up the last tile
            heads = join_tiles(heads, self.tiles).flatten(2).mT
        windows = self.windows()
        if windows is not None:  # without the padding of windows
            in_grid = numbers_in_windows(*windows) < math.prod(windows[0])
            heads = heads.unflatten(0, (-1, len(in_grid)))[:, in_grid.to(heads.device)]
        heads = heads.flatten(0, -2)
        self.total += heads.double().sum(0)
        self.count += len(heads)

    def see(self, layer: nn.Module, args: Tuple[Tensor, ...]) -> None:
        """Keeps the size of the layer's input, tokens ``(B, H, W, D)`` or an image ``(B, C, H, W)``."""
        shape = args[0].shape
        self.size = tuple(shape[-layer.window.ndim :] if isinstance(layer, ImageAttention) else shape[1:3])
        self.tiles = layer.tiles(self.size) if isinstance(layer, ContentImageAttention) else None

    @property
    def mean(self) -> Tensor:
        """Returns the mean output of all heads, ``(Σ D_h,)``."""
        return self.total / self.count


@contextmanager
def head_means(layers: Sequence[Heads]) -> Iterator[List[HeadMeans]]:
    """Collects the mean outputs of the heads of some :func:`prunable_heads` while the model runs; yields one for each.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=3)
        >>> with head_means([layer]) as (means,):
        ...     outputs = layer(torch.randn(2, 5, 6, 8))
        >>> means.mean.shape, means.size
        (torch.Size([24]), (5, 6))
    """
    means = [HeadMeans(layer) for layer in layers]
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance('force_eager'))  # compiled modules do not call new hooks
        for layer, own in zip(layers, means):
            stack.enter_context(layer.output_called())
            stack.enter_context(layer.output.register_forward_pre_hook(own.add))
            if isinstance(layer, PrunableHeads):
                stack.enter_context(layer.register_forward_pre_hook(own.see))
            else:
                own.windows = stack.enter_context(layer.windows_seen())
        yield means


@torch.no_grad()
def fold_into_bias(layer: Heads, heads: Sequence[int], mean: Tensor) -> None:
    """Adds what heads contribute on average, Σ_h V_h m_h, to the bias of their layer (C20, appendix E).

    A head with the same output at every query, as one of uniform attention has, can then be removed without a change.
    ``mean`` are the mean outputs of all heads, ``(Σ D_h,)``.

    Raises:
        ValueError: The layer has no bias; the mean is not finite, as that of no images.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=3)
        >>> layer.encoding.sqrt_precision.data[1] = 0  # uniform attention
        >>> image = torch.randn(1, 5, 6, 8)
        >>> with head_means([layer]) as (means,):
        ...     expected = layer(image)
        >>> fold_into_bias(layer, [1], means.mean)
        >>> _ = layer.prune_heads([1])
        >>> torch.allclose(layer(image), expected, atol=1e-5)
        True
    """
    output: Any = layer.output
    if output.bias is None:
        raise ValueError('the layer has no bias that could take the mean output of its heads: build it with bias=True')
    if not heads:
        return
    if not mean.isfinite().all():
        raise ValueError(
            'the mean output of the heads is not finite: the model ran on no images, or on some for which it is not'
        )
    of_heads = torch.zeros_like(mean)
    exact = copy.deepcopy(output).to(mean.dtype)
    if isinstance(output, GroupedLinear):
        of_heads = of_heads.view(layer.num_heads, 1, -1)  # (N_h, Q = 1, C)
        of_heads[list(heads)] = mean.view_as(of_heads)[list(heads)]
    else:
        columns = layer.output_entries(heads)
        of_heads[columns] = mean[columns]
    output.bias.add_((exact(of_heads).flatten() - exact.bias).to(output.bias))


def takes_duplicates(layer: Heads) -> bool:
    """Says whether a head can take the values of another with the same map: where they are as wide as a token."""
    return isinstance(layer, (ImageAttention, GridAttention))


@torch.no_grad()
def merge_duplicate(layer: Heads, head: int, kept: int) -> None:
    """Adds a head's slice of the value matrix to that of a head with the same map, P V + P V' = P (V + V').

    Raises:
        ValueError: Its heads have fewer channels D_h than a token: the sum of two such matrices V needs 2·D_h.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=3)
        >>> for parameter in layer.encoding.parameters():
        ...     parameter.data[2] = parameter.data[0]
        >>> image = torch.randn(1, 5, 6, 8)
        >>> expected = layer(image)
        >>> merge_duplicate(layer, head=2, kept=0)
        >>> _ = layer.prune_heads([2])
        >>> torch.allclose(layer(image), expected, atol=1e-5)
        True
    """
    columns, of_kept = (layer.output_entries([index]) for index in (head, kept))
    if not takes_duplicates(layer):
        raise ValueError(
            f'the heads of layer have values of head_dim={len(columns)} channels, so that one head cannot take the '
            'values of two: use fold_into_bias for the duplicate'
        )
    weight: Any = layer.output.weight
    weight[:, of_kept] += weight[:, columns]
