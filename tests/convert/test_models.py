"""Whole models as attention, against the models that they were."""

import copy

import pytest
import torch
from helpers.cnns import small_cnn
from helpers.convolutions import relative_error
from torch import nn

from attncnn_plugin.attention.images import ImageAttention
from attncnn_plugin.convert import attention_to_convs, convs_to_attention


def images():
    return torch.randn(2, 3, 12, 13, dtype=torch.float64)


def test_the_rest_stays_the_same_objects_in_the_same_modes():
    model = small_cnn().train()
    model.stage[0].conv1.eval()
    model.stage[0].conv2.weight.requires_grad_(False)
    model.down.bias.requires_grad_(False)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    names = [name for name, _ in model.named_modules()]
    convs_to_attention(model, '*')
    after = dict(model.named_parameters())
    kept = [name for name in parameters if name in after]
    assert len(kept) == 8 and all(after[name] is parameters[name] for name in kept)
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers() if name in buffers)
    assert [name for name, _ in model.named_modules() if name in names] == names
    assert model.training and not model.stage[0].conv1.training and model.stage[0].conv2.training
    frozen = {name for name, parameter in after.items() if not parameter.requires_grad}
    of_layer = {f'stage.0.conv2.{key}' for key, _ in model.stage[0].conv2.named_parameters()}
    assert frozen == of_layer - {'stage.0.conv2.value.bias'} | {'down.value.bias'}


def test_arguments_are_those_of_the_layer():
    model = small_cnn()
    convs_to_attention(model, 'stem', alpha=6.0)
    convs_to_attention(model, 'down', position='table')
    assert torch.allclose(model.stem.encoding.sqrt_precision.square() / 2, torch.tensor(6.0).double())
    assert model.down.settings['position'] == 'table'
    with pytest.raises(ValueError, match='stem'):
        convs_to_attention(model, 'stem')  # no convolution any more
    convs_to_attention(model, '*')
    assert sum(isinstance(module, ImageAttention) for module in model.modules()) == 6


@pytest.mark.parametrize(
    'arguments',
    [
        {},
        dict(position='table'),
        dict(content='additive'),
        dict(content='gated', window_size=5),
    ],
)
def test_a_round_trip_is_exact(arguments):
    model = small_cnn().train()
    model.stage[0].conv1.eval()
    model.stem.weight.requires_grad_(False)
    before = copy.deepcopy(model)
    with torch.device('meta'):  # whatever the default device is
        there = convs_to_attention(model, '*', **arguments)
        back = attention_to_convs(model)
    assert (there.parameters_before, there.parameters_after) == (back.parameters_after, back.parameters_before)
    state, expected = model.state_dict(), before.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in state)
    for (name, module), other in zip(model.named_modules(), before.modules()):
        assert type(module) is type(other) and module.training == other.training, name
        if isinstance(module, nn.Conv2d):
            settings = ('kernel_size', 'stride', 'padding', 'dilation', 'groups', 'padding_mode')
            assert [getattr(module, key) for key in settings] == [getattr(other, key) for key in settings], name
    for parameter, other in zip(model.parameters(), before.parameters()):
        assert parameter.requires_grad == other.requires_grad


def test_heads_that_look_elsewhere_are_a_convolution_within_a_tolerance():
    model, x = small_cnn(), images()
    convs_to_attention(model, 'stage.*.conv1', alpha=6.0)
    soft = model(x)
    with pytest.raises(ValueError, match='2 of 2 layers'):
        attention_to_convs(model)
    report = attention_to_convs(model, tolerance=1.0)
    assert 1e-6 < max(layer.report.bound for layer in report.layers) < 1
    assert 0 < relative_error(model(x), soft) < 0.05
