"""The attention that a model has at its start, against the wanted one."""

from contextlib import ExitStack
from functools import partial
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from ..analysis.attention_maps import evaluating
from ..analysis.head_reports.vision_transformers import visited_attention
from .parts import Attention
from .shifts import Size

Means = Dict[str, Tuple[Tensor, float]]


@torch.no_grad()
def measure(network: Any, images: Tensor, wanted: List[Tuple[Attention, Size, Optional[Tensor]]]) -> Means:
    """Total variation of the attention of patches among patches to a wanted one, and what they give to other tokens.

    Args:
        network: The vision transformer.
        images (Tensor): ``(B, C, H, W)``.
        wanted (list): Layers, the grid in which each attends, and the wanted scores ``(N_h, patches, patches)``, or
            None. Windows that hide keys from a query, shifted ones, hide them from the wanted attention too.

    Returns:
        dict: By the name of the attention, total variations ``(N_h,)`` and the share of the other tokens.
    """
    found: Dict[str, List[Tuple[Tensor, float]]] = {attention.name: [] for attention, _, _ in wanted}
    masks: Dict[str, Optional[Tensor]] = {}

    def keep_mask(name: str, module: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        masks[name] = kwargs.get('mask')

    def compare(name: str, size: Size, scores: Optional[Tensor], probs: Tensor) -> None:
        patches = size[0] * size[1]
        own = probs[:, :, -patches:, -patches:].double()
        total = own.sum(-1, keepdim=True)
        share = float(1 - total.mean())
        if scores is None:
            found[name].append((own.new_zeros(own.shape[1]), share))
            return
        expected = scores.to(own.device)[None]
        mask = masks[name]
        if mask is not None:
            expected = expected.masked_fill(mask[:, None] < 0, -torch.inf)
            own, total = (x.unflatten(0, (-1, len(mask))) for x in (own, total))
        difference = (own / total.clamp(min=torch.finfo(own.dtype).tiny) - expected.softmax(-1)).abs().sum(-1) / 2
        heads = difference.transpose(-2, 0).flatten(1)  # any order of the rest
        found[name].append((heads.mean(1), share))

    with evaluating(network), ExitStack() as stack:
        for attention, size, scores in wanted:
            visit = partial(compare, attention.name, size, scores)
            stack.enter_context(visited_attention(attention.module, visit))
            handle = attention.module.register_forward_pre_hook(partial(keep_mask, attention.name), with_kwargs=True)
            stack.callback(handle.remove)
        network(images)
    return {name: values[0] for name, values in found.items()}
