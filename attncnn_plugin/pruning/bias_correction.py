"""The mean output of a head as a bias, for a head that is removed (Cordonnier et al. 2020 (C20), appendix E)."""

from contextlib import contextmanager
from typing import Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..layers.grid_attention import GridAttention


class HeadMeans:
    """The mean outputs P_h X of the heads of a layer, over queries and images.

    Args:
        layer (GridAttention): The attention layer.

    Attributes:
        total (Tensor): Their sum over all queries, ``(N_h·D_h,)`` in float64.
        count (Tensor): The number of queries, a scalar in float64.
        size (tuple[int, int] | None): Height and width of the last grid, in tokens; None before the first.
    """

    def __init__(self, layer: GridAttention) -> None:
        weight = layer.value.weight
        self.total = torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
        self.count = torch.zeros((), dtype=torch.float64, device=weight.device)
        self.size: Optional[Tuple[int, int]] = None

    def add(self, heads: Tensor) -> None:
        """Adds the outputs of all heads, ``(B, H, W, N_h·D_h)``."""
        self.total += heads.detach().double().sum((0, 1, 2))
        self.count += heads.shape[:3].numel()
        self.size = (heads.shape[1], heads.shape[2])

    @property
    def mean(self) -> Tensor:
        """The mean output of all heads, ``(N_h·D_h,)``."""
        return self.total / self.count


@contextmanager
def head_means(layers: Sequence[GridAttention]) -> Iterator[List[HeadMeans]]:
    """Collects the mean outputs of the layers' heads while the model runs.

    Args:
        layers (Sequence[GridAttention]): Attention layers whose ``value`` maps the concatenated heads,
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
    handles = [
        layer.value.register_forward_pre_hook(lambda _, inputs, own=own: own.add(inputs[0]))
        for layer, own in zip(layers, means)
    ]
    try:
        yield means
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def fold_into_bias(layer: GridAttention, heads: Sequence[int], mean: Tensor) -> None:
    """Adds what heads contribute on average, Σ_h V_h m_h, to the bias of their layer (C20, appendix E).

    A head with the same output at every query, as one of uniform attention has, can then be removed without a change.

    Args:
        layer (GridAttention): The attention layer.
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
    for head in heads:
        entries = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
        layer.value.bias.add_((layer.value.weight[:, entries].double() @ mean[entries]).to(layer.value.bias))


@torch.no_grad()
def merge_duplicate(layer: GridAttention, head: int, kept: int) -> None:
    """Adds a head's slice of the value matrix to that of a head with the same map, P V + P V' = P (V + V').

    Args:
        layer (GridAttention): The attention layer.
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
    if layer.value_proj is not None:
        raise ValueError(
            f'the heads of layer have values of head_dim={layer.head_dim} channels, so that one head cannot take the '
            'values of two: use fold_into_bias for the duplicate'
        )
    slices = layer.value.weight.unflatten(1, (layer.num_heads, layer.dim))
    slices[:, kept] += slices[:, head]
