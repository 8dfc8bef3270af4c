"""The attention that a model has at its start, against the wanted one."""

from contextlib import ExitStack
from functools import partial
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from ..analysis.transformer_attention import visited_attention
from ..layers.evaluation_mode import evaluating
from .parts import Attention
from .shifts import Size

Means = Dict[str, Tuple[Tensor, float]]


@torch.no_grad()
def measure(network: Any, images: Tensor, wanted: List[Tuple[Attention, Size, Tensor]]) -> Means:
    """Total variation of the attention of patches among patches to a wanted one, and what they give to other tokens.

    Args:
        network: The vision transformer.
        images (Tensor): ``(B, C, H, W)``.
        wanted (list): Layers, the grid in which each attends, and the wanted scores ``(N_h, patches, patches)``.
            Windows that hide keys from a query, shifted ones, hide them from the wanted attention too.

    Returns:
        dict: By the name of the attention, total variations ``(N_h,)`` and the share of the other tokens.

    Raises:
        ValueError: The probabilities of a layer are no softmax for each head.
    """
    found: Dict[str, Tuple[Tensor, float]] = {}
    masks: Dict[str, Optional[Tensor]] = {}

    def keep_mask(name: str, module: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        masks[name] = kwargs.get('mask')

    def compare(name: str, size: Size, scores: Tensor, probs: Tensor) -> None:
        patches = size[0] * size[1]
        if probs.ndim != 4 or probs.shape[1] != len(scores) or (probs.double().sum(-1) - 1).abs().max() > 1e-2:
            raise ValueError(
                f'the probabilities of {name} have shape {tuple(probs.shape)}, or do not add up to 1: softmax of the '
                f'scores of {len(scores)} heads was looked for, with nothing after it'
            )
        own = probs[:, :, -patches:, -patches:].double()  # class and register tokens come first
        total = own.sum(-1, keepdim=True)
        own = own / total.clamp(min=torch.finfo(own.dtype).tiny)
        expected = scores.to(own.device)[None]
        mask = masks[name]
        if mask is not None:
            own = own.unflatten(0, (-1, len(mask)))  # (B, windows, N_h, patches, patches)
            expected = expected.masked_fill(mask[:, None] < 0, -torch.inf)
        variation = (own - expected.softmax(-1)).abs().sum(-1) / 2
        heads = variation.transpose(-2, 0).flatten(1).mean(1)
        share = max(0.0, float(1 - total.mean())) if probs.shape[-1] > patches else 0.0  # and no rounding error
        found[name] = heads, share

    with evaluating(network), ExitStack() as stack:
        for attention, size, scores in wanted:
            visit = partial(compare, attention.name, size, scores)
            stack.enter_context(visited_attention(attention.module, visit))
            handle = attention.module.register_forward_pre_hook(partial(keep_mask, attention.name), with_kwargs=True)
            stack.callback(handle.remove)
        network(images)
    return found
