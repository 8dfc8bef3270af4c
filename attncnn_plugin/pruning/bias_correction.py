"""The mean output of a head as a bias, for a head that is removed (Cordonnier et al. 2020 (C20), appendix E)."""

import copy
from contextlib import contextmanager
from typing import Iterator, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from ..layers.grid_attention import GridAttention
from ..layers.image_attention import ImageAttention

Layer = Union[GridAttention, ImageAttention]


class HeadMeans:
    """The mean outputs P_h X of the heads of a layer, over queries and images.

    Args:
        layer (GridAttention | ImageAttention): The attention layer.

    Attributes:
        total (Tensor): Their sum over all queries, ``(N_h·D_h,)`` in float64.
        count (Tensor): The number of queries, a scalar in float64.
        size (tuple[int, ...] | None): Height and width of the last grid of tokens, or of the last image; None before
            the first.
    """

    def __init__(self, layer: Layer) -> None:
        device = layer.value.weight.device
        channels = layer.in_channels if isinstance(layer, ImageAttention) else layer.head_dim
        self.total = torch.zeros(layer.num_heads * channels, dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.size: Optional[Tuple[int, ...]] = None

    def add(self, heads: Tensor) -> None:
        """Adds the outputs of all heads, ``(B, H, W, N_h·D_h)``."""
        heads = heads.detach().flatten(0, -2)
        self.total += heads.double().sum(0)
        self.count += len(heads)

    def see(self, layer: nn.Module, x: Tensor) -> None:
        """Keeps the size of the layer's input, tokens ``(B, H, W, D)`` or an image ``(B, C, H, W)``."""
        self.size = tuple(x.shape[2:] if isinstance(layer, ImageAttention) else x.shape[1:3])

    @property
    def mean(self) -> Tensor:
        """The mean output of all heads, ``(N_h·D_h,)``."""
        return self.total / self.count


@contextmanager
def head_means(layers: Sequence[Layer]) -> Iterator[List[HeadMeans]]:
    """Collects the mean outputs of the layers' heads while the model runs.

    Args:
        layers (Sequence[GridAttention | ImageAttention]): Attention layers whose ``value`` maps the concatenated heads,
            ``(B, H, W, N_h·D_h)``.

    Yields:
        list[HeadMeans]: The mean outputs of each layer.

    Examples:
        >>> from attncnn_plugin.layers import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=3)
        >>> with head_means([layer]) as (means,):
        ...     outputs = layer(torch.randn(2, 5, 6, 8))
        >>> means.mean.shape, means.size
        (torch.Size([24]), (5, 6))
    """
    means = [HeadMeans(layer) for layer in layers]
    handles = []
    for layer, own in zip(layers, means):
        handles += [
            layer.register_forward_pre_hook(lambda layer, inputs, own=own: own.see(layer, inputs[0])),
            layer.value.register_forward_pre_hook(lambda _, inputs, own=own: own.add(inputs[0])),
        ]
    try:
        yield means
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def fold_into_bias(layer: Layer, heads: Sequence[int], mean: Tensor) -> None:
    """Adds what heads contribute on average, Σ_h V_h m_h, to the bias of their layer (C20, appendix E).

    A head with the same output at every query, as one of uniform attention has, can then be removed without a change.

    Args:
        layer (GridAttention | ImageAttention): The attention layer.
        heads (Sequence[int]): The heads.
        mean (Tensor): The mean outputs of all heads, ``(N_h·D_h,)``.

    Raises:
        ValueError: The layer has no bias.

    Examples:
        >>> from attncnn_plugin.layers import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=3)
        >>> layer.encoding.sqrt_precision.data[1] = 0  # uniform attention
        >>> image = torch.randn(1, 5, 6, 8)
        >>> with head_means([layer]) as (means,):
        ...     expected = layer(image)
        >>> fold_into_bias(layer, [1], means.mean)
        >>> replaced = layer.prune_heads([1])
        >>> torch.allclose(layer(image), expected, atol=1e-5)
        True
    """
    if layer.value.bias is None:
        raise ValueError('the layer has no bias that could take the mean output of its heads: build it with bias=True')
    if not heads:
        return
    of_heads = torch.zeros_like(mean).view(layer.num_heads, -1)
    of_heads[heads] = mean.view(layer.num_heads, -1)[heads]
    value = copy.deepcopy(layer.value).to(mean.dtype)
    layer.value.bias.add_((value(of_heads.flatten()) - value.bias).to(layer.value.bias))


@torch.no_grad()
def merge_duplicate(layer: Layer, head: int, kept: int) -> None:
    """Adds a head's slice of the value matrix to that of a head with the same map, P V + P V' = P (V + V').

    Args:
        layer (GridAttention | ImageAttention): The attention layer.
        head (int): The head that is to go.
        kept (int): The head that stays.

    Raises:
        ValueError: The layer has a ``head_dim``: the sum of two matrices V with D_h channels inside needs 2·D_h.

    Examples:
        >>> from attncnn_plugin.layers import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=3, spread_std=0)
        >>> layer.encoding.center.data[2] = layer.encoding.center.data[0]
        >>> image = torch.randn(1, 5, 6, 8)
        >>> expected = layer(image)
        >>> merge_duplicate(layer, head=2, kept=0)
        >>> replaced = layer.prune_heads([2])
        >>> torch.allclose(layer(image), expected, atol=1e-5)
        True
    """
    if not isinstance(layer, ImageAttention) and layer.value_proj is not None:
        raise ValueError(
            f'the heads of layer have values of head_dim={layer.head_dim} channels, so that one head cannot take the '
            'values of two: use fold_into_bias for the duplicate'
        )
    columns, of_kept = (layer.head_entries([index])['value.weight'][1] for index in (head, kept))
    layer.value.weight[:, of_kept] += layer.value.weight[:, columns]
