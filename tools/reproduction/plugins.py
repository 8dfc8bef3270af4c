"""What the trainings of the tables import: starts and a hook that the package does not have.

On a CPU their attention is computed by plain products: PyTorch's fused attention is slower there in short sequences.
"""

from typing import Any, Dict

import torch
from mmengine.registry import HOOKS, WEIGHT_INITIALIZERS
from torch import nn

from attncnn_plugin.mm.head_pruning import HeadPruningHook
from attncnn_plugin.mm.initializers import ConvolutionalHeads, SineCosineEmbedding
from attncnn_plugin.pruning import prunable_heads

from .impulses import EMBEDDING_DEVIATION, start_impulses

if not torch.cuda.is_available():
    torch.backends.cuda.enable_flash_sdp(False)  # of the CPU too, in spite of its name


@WEIGHT_INITIALIZERS.register_module()
class RandomEmbedding(SineCosineEmbedding):
    """A random position embedding, as large as that of impulses: their control."""

    def start(self, module: nn.Module) -> None:
        nn.init.normal_(module.pos_embed, std=EMBEDDING_DEVIATION)


@WEIGHT_INITIALIZERS.register_module()
class ReleasedImpulse(ConvolutionalHeads):
    """Impulses as in the released code of Zheng et al. 2025: all biases, and the MLPs, are as PyTorch draws them."""

    def start(self, module: nn.Module) -> None:
        start_impulses(module, **self.options)
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear):
                weight = layer.weight.detach().clone()
                layer.reset_parameters()
                if '.attn.' in name:
                    layer.weight.data.copy_(weight)


@HOOKS.register_module()
class RandomPruningHook(HeadPruningHook):
    """Removes heads that are drawn, the control of importance; one of each layer stays, as there."""

    def __init__(self, **options: Any) -> None:
        super().__init__(by=drawn, **options)


def drawn(model: nn.Module, batches: Any, loss: Any) -> Dict[str, torch.Tensor]:
    """Draws a number for each head."""
    layers = prunable_heads(model, batches[0], loss)
    return {name: torch.rand(layer.num_heads) for name, layer in layers.items()}
