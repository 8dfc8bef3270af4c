"""Hooks see every linear layer and change nothing: profilers and FLOP counters see the network that trains."""

from functools import partial

import pytest
import torch
from helpers.layers import LAYERS, takes_images
from helpers.small import KINDS, small_model
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

from attncnn_plugin.attention.images import ImageAttention
from attncnn_plugin.convert import conv_to_mhsa

MODELS = {
    **{kind: partial(small_model, kind) for kind in KINDS},
    **LAYERS,
    'depthwise_image': lambda: conv_to_mhsa(nn.Conv2d(4, 4, 3, padding=1, groups=4))[0],
}


def multiply_adds(module, x):
    with FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops()


@pytest.mark.parametrize('training', [False, True])
@pytest.mark.parametrize('name', MODELS)
def test_hooks_see_everything_and_change_nothing(name, training):
    torch.manual_seed(0)
    module = MODELS[name]().train(training)
    images = name not in LAYERS or takes_images(name)
    x = torch.randn(8, 4 if name in LAYERS or 'image' in name else 3, 8, 8)  # of many tokens for narrow layers
    x = x if images else x.permute(0, 2, 3, 1)
    expected, flops = module(x), multiply_adds(module, x)
    linear = {part for part in module.modules() if isinstance(part, nn.Linear)}
    linear |= {part.value for part in module.modules() if isinstance(part, ImageAttention)}
    called = []
    handle = register_module_forward_hook(lambda part, *_: called.append(part))
    try:
        output = module(x)
    finally:
        handle.remove()
    assert all(called.count(part) == 1 for part in linear)
    assert torch.equal(output, expected)
    for part in module.modules():
        part.register_forward_hook(lambda *_: None)
    assert torch.equal(module(x), expected) and multiply_adds(module, x) == flops
