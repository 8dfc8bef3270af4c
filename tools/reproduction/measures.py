"""What is measured of networks beside their accuracy: how heads start, how far they move, and corrupted images.

Corruptions are five of those of CIFAR-10-C (Hendrycks and Dietterich 2019), at the first, the third and the fifth of
its severities; a Gaussian blur stands for the defocused one.
"""

import copy
from typing import Callable, Dict, List, Optional, Tuple

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DefaultScope
from mmpretrain.registry import DATASETS
from torch import Tensor, nn
from torchvision.transforms.functional import gaussian_blur

from attncnn_plugin.analysis import mean_attention
from attncnn_plugin.analysis.shift_statistics import ShiftMaps, nearest_shifts

from . import plugins  # noqa: F401
from .configs import build

IMAGES = 50  # with which attention is measured
CORRUPTED = 2000  # images of each corruption


def _pixelate(images: Tensor, share: float) -> Tensor:
    size = images.shape[-1]
    return F.interpolate(F.interpolate(images, int(share * size), mode='area'), size, mode='nearest')


CORRUPTIONS: Dict[str, Tuple[Callable[[Tensor, float], Tensor], Tuple[float, ...]]] = {
    'Gaussian noise': (lambda x, deviation: x + deviation * torch.randn_like(x), (0.04, 0.08, 0.1)),
    'shot noise': (lambda x, photons: torch.poisson(x * photons) / photons, (500, 100, 50)),
    'blur': (lambda x, deviation: gaussian_blur(x, [7, 7], [deviation, deviation]), (0.4, 0.7, 1.0)),
    'contrast': (lambda x, factor: x.mean((2, 3), keepdim=True).lerp(x, factor), (0.75, 0.4, 0.15)),
    'pixelate': (_pixelate, (0.95, 0.85, 0.65)),
}


def corrupted_accuracies(config: Config, model: nn.Module) -> Dict[str, List[float]]:
    """Returns the top-1 accuracy of each corruption by its strengths, in percent."""
    data = _validation_data(config, CORRUPTED)
    images = torch.stack(data['inputs']).float() / 255
    labels = torch.cat([sample.gt_label for sample in data['data_samples']])
    generator = torch.random.get_rng_state()
    torch.manual_seed(0)  # the same noise for all networks
    accuracies: Dict[str, List[float]] = {}
    for name, (corrupt, strengths) in CORRUPTIONS.items():
        for strength in strengths:
            changed = (corrupt(images, strength).clamp(0, 1) * 255).round().to(torch.uint8)
            right = torch.cat([_logits(model, part).argmax(1) for part in changed.split(250)]) == labels
            accuracies.setdefault(name, []).append(100 * float(right.float().mean()))
    torch.random.set_rng_state(generator)
    return accuracies


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
    first = ShiftMaps(next(iter(mean_attention(model, _inputs(config, model)).values())))
    return float(np.mean([share for _, share in nearest_shifts(first)]))


def attention_moved(config: Config, before: nn.Module, after: nn.Module) -> float:
    """Returns ½ Σ_k |P[q, k] − P'[q, k]| of the mean attention to images, mean over queries, heads and layers."""
    maps = [mean_attention(model, _inputs(config, model)) for model in (before, after)]
    moved = [(maps[0][name].probs - maps[1][name].probs).abs().sum(-1).mean() / 2 for name in maps[0]]
    return float(torch.stack(moved).mean())


def _validation_data(config: Config, number: int) -> dict:
    """Returns validation images of all classes, as a network takes them."""
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        dataset = DATASETS.build(copy.deepcopy(config.val_dataloader.dataset))
    places = np.linspace(0, len(dataset) - 1, min(number, len(dataset))).astype(int).tolist()
    return pseudo_collate([dataset[place] for place in places])


def _inputs(config: Config, model: nn.Module) -> Tensor:
    return model.eval().data_preprocessor(_validation_data(config, IMAGES))['inputs']


@torch.no_grad()
def _logits(model: nn.Module, images: Tensor) -> Tensor:
    return model(model.eval().data_preprocessor(dict(inputs=list(images)))['inputs'], mode='tensor')
