"""What heads contribute on average, as a bias."""
from contextlib import contextmanager
from typing import Dict, Iterator, Sequence

import torch
from torch import Tensor, nn


class HeadMeans:
    """The mean outputs P_h X of the heads of some layers, over queries and images.

    Attributes:
        sums (dict[nn.Module, Tensor]): Of each layer, the sum over all queries, ``(N_h·D,)`` in float64.
        counts (dict[nn.Module, int]): Of each layer, the number of queries.
    """

    def __init__(self) -> None:
        self.sums: Dict[nn.Module, Tensor] = {}
        self.counts: Dict[nn.Module, int] = {}

    def add(self, layer: nn.Module, heads: Tensor) -> None:
        heads = heads.detach().flatten(0, -2).double()
        self.sums[layer] = self.sums.get(layer, 0) + heads.sum(0)
        self.counts[layer] = self.counts.get(layer, 0) + len(heads)

    def of(self, layer: nn.Module) -> Tensor:
        """``(N_h·D,)``"""
        return self.sums[layer] / self.counts[layer]


@contextmanager
def head_means(layers: Sequence[nn.Module]) -> Iterator[HeadMeans]:
    """Collects the mean outputs of the layers' heads while the model runs.

    Args:
        layers (Sequence[nn.Module]): Attention layers whose ``value`` maps the concatenated heads, ``(…, N_h·D)``.
    """
    means = HeadMeans()
    handles = [
        layer.value.register_forward_pre_hook(lambda _, inputs, layer=layer: means.add(layer, inputs[0]))
        for layer in layers
    ]
    try:
        yield means
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def fold_into_bias(layer: nn.Module, heads: Sequence[int], mean: Tensor) -> None:
    """Adds what heads contribute on average, Σ_h V_h m_h, to the bias of their layer (C20, appendix E).

    A head with the same output at every query, as one of uniform attention has, can then be removed without a change.

    Args:
        layer (nn.Module): The attention layer.
        heads (Sequence[int]): The heads.
        mean (Tensor): The mean outputs of all heads, ``(N_h·D,)``.

    Raises:
        ValueError: The layer has no bias.
    """
    if layer.value.bias is None:
        raise ValueError('the layer has no bias that could take the mean output of its heads: build it with bias=True')
    for head in heads:
        entries = slice(head * layer.dim, (head + 1) * layer.dim)
        layer.value.bias += (layer.value.weight[:, entries].double() @ mean[entries].to(layer.value.weight.device)).to(
            layer.value.bias)
