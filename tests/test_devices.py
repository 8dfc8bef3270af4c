"""Devices without a GPU: nothing is made on the default device, and no training step asks for a value.

A tensor on the meta device has no values. Where it is the default device, whatever is made without a device meets the
data with an error; where model and data are on it, so does whatever is made on the CPU, and whatever asks for a value,
for which a GPU would have to be waited for: ``.item()``, ``.cpu()``, ``.tolist()``, ``if tensor``, ``nonzero()``.
"""

import pytest
import torch
from helpers import verbs
from helpers.layers import LAYERS, takes_images
from helpers.small import KINDS
from torch import nn

from attncnn_plugin import attention
from attncnn_plugin.attention import AttentionLayer

OWN_CONSTRUCTORS = ('vit_small_patch16_dinov3', 'convit_tiny')  # timm makes tensors on the default device there
QUICK = (*KINDS, *verbs.VITS, verbs.CNN)  # which stand for the others
CASES = [
    pytest.param(verb, name, marks=() if name in QUICK else pytest.mark.slow)
    for verb, name in verbs.CASES
    if name not in OWN_CONSTRUCTORS
]


@pytest.mark.parametrize('verb, name', CASES)
def test_default_device(verb, name):
    """The same numbers as with the CPU as the default device."""
    found = []
    for device in ('cpu', 'meta'):
        model, images = verbs.model_and_images(name, new=verb in (verbs.start, verbs.MIMETIC))
        torch.manual_seed(1)
        with torch.device(device):
            found.append(verbs.numbers(verb(model, images)))
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert len(found[0]) == len(found[1]) > 0
    for expected, number in zip(*found):
        assert not number.is_meta and torch.equal(expected, number) and not expected.isnan().any()


@pytest.mark.parametrize('name', LAYERS)
def test_layers_on_the_default_device(name):
    """The output, and whatever a layer says of its heads."""
    layer = LAYERS[name]().double().requires_grad_(False)
    x, size = torch.randn((2, 4, 6, 8) if takes_images(name) else (2, 6, 8, 4), dtype=torch.float64), (6, 8)

    def said():
        yield layer(x)
        if isinstance(layer, AttentionLayer):
            yield from (layer.value_matrices(), layer.position_probs(size), *(layer.gaussian_heads() or ()))
            if layer.depends_on_content:
                yield from (layer.attention_scores(x), layer.content_scores(x), layer.position_scores(x))
            else:
                yield layer.attention_probs(size)

    expected = verbs.numbers(said())
    with torch.device('meta'):
        found = verbs.numbers(said())
    assert len(expected) == len(found) and all(map(torch.equal, found, expected))


def step(module, x):
    optimizer = torch.optim.AdamW(module.parameters(), fused=False)
    output = module(x)
    output.square().mean().backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    return output


@pytest.mark.parametrize('name', [*LAYERS, *KINDS, 'turned', 'pruned'])
def test_no_step_waits(name):
    if name in LAYERS:
        module, x = LAYERS[name](), torch.empty((2, 4, 6, 8) if takes_images(name) else (2, 6, 8, 4), device='meta')
    else:
        kind = {'turned': verbs.CNN, 'pruned': 'cmhsa_narrow'}.get(name, name)
        module, images = verbs.model_and_images(kind)
        if name in ('turned', 'pruned'):
            getattr(verbs, dict(turned='turn', pruned='prune')[name])(module, images)
        module, x = module.float(), images.to('meta', torch.float32)
    module.to('meta')
    for training in (False, True):
        output = step(module.train(training), x)
        assert output.is_meta and output.dtype == torch.float32


WAITS = {
    'item': lambda x: x * x.sum().item(),
    'cpu': lambda x: x * x.sum().cpu(),
    'tolist': lambda x: x * x.tolist()[0],
    'bool': lambda x: x if x.sum() > 0 else -x,
    'nonzero': lambda x: x.flatten()[x.flatten().nonzero()],
    'choice': lambda x: x[x > 0],
    'on the CPU': lambda x: x + torch.ones(8),
}


class Wait(nn.Linear):
    def __init__(self, wait):
        super().__init__(8, 8)
        self.wait = wait

    def forward(self, x):
        return self.wait(super().forward(x))


@pytest.mark.parametrize('wait', WAITS.values(), ids=WAITS)
def test_a_wait_is_seen(wait):
    with pytest.raises((RuntimeError, NotImplementedError)):
        step(Wait(wait).to('meta'), torch.empty(2, 8, device='meta'))


def test_every_layer_is_here():
    kinds = {type(make()) for make in LAYERS.values()}
    own = [kind for kind in vars(attention).values() if isinstance(kind, type) and issubclass(kind, AttentionLayer)]
    assert {kind for kind in own if not kind.__subclasses__()} <= kinds
