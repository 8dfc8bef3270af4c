"""The mean output of a head as a bias, for a head that is removed (Cordonnier et al. 2020 (C20), appendix E)."""

import copy
from contextlib import contextmanager
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ..attention.grid_attention import GridAttention
from ..attention.heads import PrunableHeads
from ..attention.images import GroupedLinear, ImageAttention
from .heads import Heads


class HeadMeans:
    """The mean outputs P_h X W^V_h of the heads of a layer, over queries and images.

    Args:
        layer (PrunableHeads | TransformerHeads): The attention layer.

    Attributes:
        total (Tensor): Their sum over all queries, head after head, ``(Σ D_h,)`` in float64.
        count (Tensor): The number of queries, a scalar in float64.
        size (tuple[int, ...] | None): Height and width of the last grid of tokens, or of the last image; None before
            the first, and for a vision transformer of another library.
    """

    def __init__(self, layer: Heads) -> None:
        self.groups = layer.output.groups if isinstance(layer.output, GroupedLinear) else 1
        weight: Any = layer.output.weight
        self.total = torch.zeros(weight.shape[1] * self.groups, dtype=torch.float64, device=weight.device)
        self.count = torch.zeros((), dtype=torch.float64, device=weight.device)
        self.size: Optional[Tuple[int, ...]] = None

    def add(self, output: nn.Module, heads: Tensor) -> None:
        """Adds the outputs of all heads as the linear map takes them, ``(…, Σ D_h)``."""
        if isinstance(output, GroupedLinear):  # (…, N_h, Q, C)
            heads = heads.transpose(-3, -2).flatten(-2)
        heads = heads.detach().flatten(0, -2)
        self.total += heads.double().sum(0)
        self.count += len(heads)

    def see(self, layer: nn.Module, x: Tensor) -> None:
        """Keeps the size of the layer's input, tokens ``(B, H, W, D)`` or an image ``(B, C, H, W)``."""
        self.size = tuple(x.shape[2:] if isinstance(layer, ImageAttention) else x.shape[1:3])

    @property
    def mean(self) -> Tensor:
        """The mean output of all heads, ``(Σ D_h,)``."""
        return self.total / self.count


@contextmanager
def head_means(layers: Sequence[Heads]) -> Iterator[List[HeadMeans]]:
    """Collects the mean outputs of the layers' heads while the model runs.

    Args:
        layers (Sequence[PrunableHeads | TransformerHeads]): Attention layers, see
            :func:`~attncnn_plugin.pruning.prunable_heads`.

    Yields:
        list[HeadMeans]: The mean outputs of each layer.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=3)
        >>> with head_means([layer]) as (means,):
        ...     outputs = layer(torch.randn(2, 5, 6, 8))
        >>> means.mean.shape, means.size
        (torch.Size([24]), (5, 6))
    """
    means = [HeadMeans(layer) for layer in layers]
    handles = []
    for layer, own in zip(layers, means):
        handles.append(layer.output.register_forward_pre_hook(lambda output, inputs, own=own: own.add(output, *inputs)))
        if isinstance(layer, PrunableHeads):
            handles.append(layer.register_forward_pre_hook(lambda layer, inputs, own=own: own.see(layer, inputs[0])))
    try:
        yield means
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def fold_into_bias(layer: Heads, heads: Sequence[int], mean: Tensor) -> None:
    """Adds what heads contribute on average, Σ_h V_h m_h, to the bias of their layer (C20, appendix E).

    A head with the same output at every query, as one of uniform attention has, can then be removed without a change.

    Args:
        layer (PrunableHeads | TransformerHeads): The attention layer.
        heads (Sequence[int]): The heads.
        mean (Tensor): The mean outputs of all heads, ``(Σ D_h,)``.

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
        >>> replaced = layer.prune_heads([1])
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
    """Whether a head can take the values of another with the same map: where they are as wide as a token."""
    return isinstance(layer, ImageAttention) or isinstance(layer, GridAttention) and layer.value_proj is None


@torch.no_grad()
def merge_duplicate(layer: Heads, head: int, kept: int) -> None:
    """Adds a head's slice of the value matrix to that of a head with the same map, P V + P V' = P (V + V').

    Args:
        layer (PrunableHeads | TransformerHeads): The attention layer.
        head (int): The head that is to go.
        kept (int): The head that stays.

    Raises:
        ValueError: Its heads have fewer channels D_h than a token: the sum of two such matrices V needs 2·D_h.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=3, spread_std=0)
        >>> layer.encoding.center.data[2] = layer.encoding.center.data[0]
        >>> image = torch.randn(1, 5, 6, 8)
        >>> expected = layer(image)
        >>> merge_duplicate(layer, head=2, kept=0)
        >>> replaced = layer.prune_heads([2])
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
