"""How the vision transformers of the table ``starts`` begin, and how much of a start is in their heads."""

import copy
from typing import Optional

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import WEIGHT_INITIALIZERS, DefaultScope
from mmpretrain.registry import DATASETS
from torch import nn

from attncnn_plugin.analysis import mean_attention
from attncnn_plugin.analysis.shift_statistics import ShiftMaps, nearest_shifts, shift_shares
from attncnn_plugin.mm.initializers import ConvolutionalHeads, SineCosineEmbedding
from attncnn_plugin.transformers.impulse_and_mimetic import EMBEDDING_DEVIATION

from .configs import build

IMAGES = 50  # with which shares are measured


@WEIGHT_INITIALIZERS.register_module()
class RandomEmbedding(SineCosineEmbedding):
    """A random position embedding, as large as that of impulses: their control."""

    def start(self, module: nn.Module) -> None:
        nn.init.normal_(module.pos_embed, std=EMBEDDING_DEVIATION)


@WEIGHT_INITIALIZERS.register_module()
class ReleasedImpulse(ConvolutionalHeads):
    """Impulses as in the released code of Zheng et al. 2025: all biases, and the MLPs, are as PyTorch draws them."""

    def start(self, module: nn.Module) -> None:
        super().start(module)
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear):
                weight = layer.weight.detach().clone()
                layer.reset_parameters()
                if '.attn.' in name:
                    layer.weight.data.copy_(weight)


def share_at_shift(config: Config) -> Optional[float]:
    """Builds a network as it begins, and returns what heads of the first block give their shift, in the mean.

    Heads look at validation images. Of a head that begins with a shift it is the nearest one. None where none does.
    """
    last = (config.model.backbone.get('init_cfg') or [{}])[-1]
    if last.get('type') not in ('ConvolutionalHeads', 'ReleasedImpulse') or last.get('method') == 'mimetic':
        return None
    torch.manual_seed(config.randomness.seed)
    model = build(config)
    model.init_weights()
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        dataset = DATASETS.build(copy.deepcopy(config.val_dataloader.dataset))
    places = np.linspace(0, len(dataset) - 1, IMAGES).astype(int).tolist()
    data = model.eval().data_preprocessor(pseudo_collate([dataset[place] for place in places]))
    first = ShiftMaps(next(iter(mean_attention(model, data['inputs']).values())))
    return float(np.mean([share for _, share in nearest_shifts(first, shift_shares(first))]))
