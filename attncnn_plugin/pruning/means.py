"""What heads give on average, and how the rest of a layer makes up for heads that go (C20, appendix E)."""

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..attention.images import ImageAttention
from ..attention.tokens import GridAttention
from ..heads.found import Heads
from ..heads.seen import AnyAttention, known_heads, watching_outputs


class HeadMeans:
    """The mean outputs P_h X W^V_h of the heads of attention, over queries and images, without padding.

    Attributes:
        total (Tensor): Their sum over all queries, head after head, ``(Σ D_h,)`` in float64.
        count (Tensor): The number of queries, a scalar in float64.
        widths (list[int]): D_h of each head.
        is_part (bool): Whether the module computes further outputs of its heads, whose means are others.
    """

    is_part = False

    def __init__(self, widths: List[int], device: torch.device) -> None:
        self.total = torch.zeros(sum(widths), dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.widths = widths
        self.axes: Dict[Any, Any] = {}  # which are heads, by the key of each run

    @property
    def mean(self) -> Sequence[Tensor]:
        """The mean output of each head, ``(D_h,)``.

        Raises:
            ValueError: It is that of a part.
        """
        if self.is_part:
            raise ValueError(
                'attention that gives several outputs of its heads in a run, as for two sources or with relative '
                'values, has no one mean output: set bias_correction=False'
            )
        return (self.total / self.count).split(self.widths)


def product_of(attention: AnyAttention) -> str:
    """Returns the name of the module in which attention runs, with ``#2`` for the second output of its heads in a run.

    In contrast to the names of attention, those of a module that runs twice are the same.
    """
    name = attention.name.partition('#')[0]
    return f'{name}#{attention.number + 1}' if attention.number else name


@contextmanager
def head_means(model: nn.Module, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[Dict[str, HeadMeans]]:
    """Collects the mean outputs of heads while a model runs; yields them by :func:`product_of` attention.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=3)
        >>> with head_means(layer) as means:
        ...     outputs = layer(torch.randn(2, 5, 6, 8))
        >>> [mean.shape for mean in means[''].mean]
        [torch.Size([8]), torch.Size([8]), torch.Size([8])]
    """
    means: Dict[str, HeadMeans] = {}

    def see(name: str, attention: AnyAttention, output: Tensor) -> None:
        heads, queries = attention.of_heads(output), attention.is_query
        key, widths = product_of(attention), [head.shape[-1] for head in heads]
        found = means.setdefault(key, HeadMeans(widths, output.device))
        found.is_part = means[name].is_part = found.is_part or key != name
        found.axes[attention.key] = attention.heads
        rows = [head.double() if queries is None else head[queries].double() for head in heads]
        found.total += torch.cat([head.flatten(0, -2).sum(0) for head in rows])
        found.count += rows[0].shape[:-1].numel()

    with watching_outputs(model, see, wanted):
        yield means


def replaced(
    means: Mapping[str, HeadMeans], head: int, by_zero: bool, attention: AnyAttention, output: Tensor
) -> Tensor:
    """Returns an output with that of one head at its mean, or at zero."""
    own = means[product_of(attention)]
    attention.heads, mean = known_heads(attention, own.axes), (own.total / own.count).split(own.widths)[head]
    return attention.where([head], torch.zeros_like(mean) if by_zero else mean, output)


@torch.no_grad()
def fold_into_bias(layer: Heads, heads: Sequence[int], mean: Sequence[Tensor]) -> None:
    """Adds what heads contribute on average, Σ_h V_h m_h, to the bias of their layer (C20, appendix E).

    A head with the same output at every query, as one of uniform attention has, can then be removed without a change.
    ``mean`` are the mean outputs of all heads, ``(D_h,)`` each.

    Raises:
        ValueError: The layer has no bias; the mean is not finite, as that of no images.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> from attncnn_plugin.pruning import prunable_heads, prune_heads
        >>> layer = QuadraticAttention(dim=8, num_heads=3)
        >>> layer.encoding.sqrt_precision.data[1] = 0  # uniform attention
        >>> image = torch.randn(1, 5, 6, 8)
        >>> with head_means(layer) as means:
        ...     expected = layer(image)
        >>> fold_into_bias(prunable_heads(layer)[''], [1], means[''].mean)
        >>> change = prune_heads(layer, {'': [1]})
        >>> torch.allclose(layer(image), expected, atol=1e-5)
        True
    """
    output: Any = layer.output
    if getattr(output, 'bias', None) is None:
        raise ValueError('the layer has no bias that could take the mean output of its heads: build it with bias=True')
    if not heads:
        return
    if not all(own.isfinite().all() for own in mean):
        raise ValueError(
            'the mean output of the heads is not finite: the model ran on no images, or on some for which it is not'
        )
    weight = output.weight.double().unflatten(0, (getattr(output, 'groups', 1), -1))  # of groups of channels
    of_heads = [weight[..., layer.output_entries([head])] for head in heads]
    added = [own @ mean[head].to(own).view(len(own), -1, 1) for head, own in zip(heads, of_heads)]
    output.bias.add_(sum(added).flatten().to(output.bias))


def takes_duplicates(layer: Heads) -> bool:
    """Says whether a head can take the values of another with the same map: where they are as wide as a token."""
    return isinstance(layer.layer, (ImageAttention, GridAttention))


@torch.no_grad()
def merge_duplicate(layer: Heads, head: int, kept: int) -> None:
    """Adds a head's slice of the value matrix to that of a head with the same map, P V + P V' = P (V + V').

    The layer has to be one that :func:`takes_duplicates`: narrower heads would add up to one of 2·D_h channels.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> from attncnn_plugin.pruning import prunable_heads, prune_heads
        >>> layer = QuadraticAttention(dim=8, num_heads=3)
        >>> for parameter in layer.encoding.parameters():
        ...     parameter.data[2] = parameter.data[0]
        >>> image = torch.randn(1, 5, 6, 8)
        >>> expected = layer(image)
        >>> merge_duplicate(prunable_heads(layer)[''], head=2, kept=0)
        >>> change = prune_heads(layer, {'': [2]})
        >>> torch.allclose(layer(image), expected, atol=1e-5)
        True
    """
    weight: Any = layer.output.weight
    weight[:, layer.output_entries([kept])] += weight[:, layer.output_entries([head])]
