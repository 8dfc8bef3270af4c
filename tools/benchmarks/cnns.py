"""CNNs whose convolutions became attention, against the CNNs."""

import copy
import math
from typing import Callable, Dict, Iterator, Tuple, Union

import numpy as np
import timm
import torch
from measure import Ratio, forward_pass, side_by_side, training_step
from memory import added_by
from models import Settings, batch
from torch import nn

from attncnn_plugin.convert import conv_to_mhsa, convs_to_attention

Cells = Iterator[Tuple[str, str, Union[Ratio, str]]]  # of a row and a column

ALPHA = 6  # heads that can learn
CONTENTS = {'positions alone': None, 'content': 'additive', 'content, gated': 'gated'}
# The convolutions of the last stage that are larger than a pixel.
LAST_STAGES = {'resnet18': 'layer4.*.conv*', 'resnet50': 'layer4.*.conv2', 'convnext_tiny': 'stages.3.*.conv_dw'}
CHANNELS, WINDOW_SIZE = 64, 7
LAYERS = {
    f'window_size={WINDOW_SIZE}': dict(content='additive', window_size=WINDOW_SIZE),
    'whole image': dict(content='additive'),
}


def cnns(settings: Settings) -> Cells:
    """CNNs with a converted last stage."""
    images, pixels = (2, 32) if settings.quick else (8, 224)
    for name, layers in LAST_STAGES.items():
        models = {'CNN': timm.create_model(name, num_classes=100).to(settings.device)}
        for kind, content in CONTENTS.items():
            models[kind] = copy.deepcopy(models['CNN'])
            convs_to_attention(models[kind], layers, content=content, alpha=ALPHA)
        for training, what in ((False, 'forward'), (True, 'training')):
            x, labels = batch(settings, images, pixels, 100)
            steps = {
                kind: training_step(model, x, labels) if training else forward_pass(model, x)
                for kind, model in models.items()
            }
            measured = side_by_side(steps, settings.quick)
            for kind in CONTENTS:
                yield f'{name}, {kind}', what, measured.ratio(kind, 'CNN')


def neighbourhoods(settings: Settings) -> Cells:
    """A layer of a stage of large images, over neighbourhoods and over the whole image."""
    side = 8 if settings.quick else 56
    for training, what in ((False, 'forward'), (True, 'training')):
        steps = {kind: make_layer_step(settings, kind, side, training) for kind in ('CNN', *LAYERS)}
        measured = side_by_side(steps, settings.quick)
        for kind in LAYERS:
            yield f'{kind}, over the convolution', f'{what}, {side}x{side}', measured.ratio(kind, 'CNN')
        yield (
            f'window_size={WINDOW_SIZE}, over the whole image',
            f'{what}, {side}x{side}',
            measured.ratio(*LAYERS),
        )
    near, whole = (added_by(make_layer_step, settings, kind, side, True) / 1e6 for kind in LAYERS)
    column = f'memory of a training step, {side}x{side}'
    yield (
        f'window_size={WINDOW_SIZE}, over the whole image',
        column,
        f'{near / whole:.2f} ({near:,.0f} of {whole:,.0f} MB)',
    )


def neighbourhood_growth(settings: Settings) -> Cells:
    """How the time of a layer over neighbourhoods grows with the number of pixels."""
    sides = (8, 16) if settings.quick else (28, 56, 112)
    kind = next(iter(LAYERS))
    for training, what in ((False, 'forward'), (True, 'training')):
        steps = {side: make_layer_step(settings, kind, side, training) for side in sides}
        seconds = side_by_side(steps, settings.quick).seconds
        for small, large in zip(sides, sides[1:]):
            exponents = np.log(np.divide(seconds[large], seconds[small])) / math.log((large / small) ** 2)
            low, median, high = np.percentile(exponents, [25, 50, 75])
            yield what, f'{small}x{small} to {large}x{large}', f'{median:.2f} ±{(high - low) / 2:.2f}'


def make_layer_step(settings: Settings, kind: str, side: int, training: bool) -> Callable[[], None]:
    """A 3x3 convolution of 64 channels, or what became of it, on one image."""
    layer: nn.Module = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
    options: Dict[str, dict] = {'CNN': {}, **LAYERS}
    if options[kind]:
        layer, _ = conv_to_mhsa(layer, alpha=ALPHA, **options[kind])
    layer = layer.to(settings.device)
    images = torch.randn(1, CHANNELS, side, side, device=settings.device)
    if not training:
        return forward_pass(layer, images)
    pooled = nn.Sequential(layer, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return training_step(pooled, images.requires_grad_(), torch.zeros(1, dtype=torch.long, device=settings.device))
