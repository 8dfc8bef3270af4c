"""Attention of heads that depend on content, collected while a model of this or another library runs."""

from contextlib import contextmanager
from typing import Any, Dict, Iterator, Mapping

from torch import Tensor, nn

from ..heads.choice import module_in
from ..heads.found import Heads
from ..heads.seen import watching
from ..pruning.criteria import ObservedAttention
from .layer_maps import few_images


@contextmanager
def observed_attention(model: nn.Module, layers: Mapping[str, Heads]) -> Iterator[Dict[str, ObservedAttention]]:
    """Collects the attention of layers in every pass of a model inside.

    Args:
        model (nn.Module): The model.
        layers (Mapping[str, PrunableHeads | TransformerHeads]): By name, some of
            :func:`~attncnn_plugin.pruning.prunable_heads` that depend on content.

    Yields:
        dict[str, ObservedAttention]: By name. Keys are all tokens that the layer has, class tokens and null keys among
        them; each window of an image counts.

    Examples:
        >>> import timm, torch
        >>> from attncnn_plugin.pruning import prunable_heads
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=1).eval()
        >>> with torch.no_grad(), observed_attention(model, prunable_heads(model)) as observed:
        ...     logits = model(torch.rand(2, 3, 32, 32))
        >>> observed['blocks.0.attn'].mean('entropy').shape
        torch.Size([3])
    """
    observed = {name: ObservedAttention(layer.num_heads) for name, layer in layers.items()}
    watched = [name for name, layer in layers.items() if layer.num_heads]

    def visit(name: str, probs: Tensor, places: Any) -> None:
        observed[str(module_in(name, watched))].add(probs.float())

    def visit_own(name: str, layer: Any, x: Tensor) -> None:
        for part in few_images(layer, x):
            visit(name, layer.attention_scores(part).float().softmax(-1), None)

    with watching(model, visit, lambda name: module_in(name, watched) is not None, visit_own=visit_own):
        yield observed
