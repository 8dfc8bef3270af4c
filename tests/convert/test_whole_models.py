"""Networks of timm, torchvision and mmpretrain, converted everywhere, against what they were."""

import copy

import pytest
import timm
import torch
from helpers.convolutions import relative_error
from helpers.small import trained_like
from timm.models import create_feature_extractor
from torch import nn

from attncnn_plugin import follow_state_dict
from attncnn_plugin.attention.images import ImageAttention
from attncnn_plugin.convert import attention_to_convs, convs_to_attention


def of_timm(name):
    return lambda: timm.create_model(name, num_classes=7)


def of_torchvision(name):
    return lambda: getattr(pytest.importorskip('torchvision').models, name)(num_classes=7)


def of_mmpretrain(**config):
    return lambda: pytest.importorskip('mmpretrain').registry.MODELS.build(config)


MODELS = {
    'test_resnet': of_timm('test_resnet'),
    'test_convnext': of_timm('test_convnext'),
    'mobilenetv3_small_050': of_timm('mobilenetv3_small_050'),
    'regnetx_002': of_timm('regnetx_002'),
    'tf_efficientnet_b0': of_timm('tf_efficientnet_b0'),
    'densenet121': of_timm('densenet121'),
    'resnetv2_50 (standardized)': of_timm('resnetv2_50'),
    'torchvision resnet18': of_torchvision('resnet18'),
    'mmpretrain ResNet': of_mmpretrain(type='ResNet', depth=18),
    'mmpretrain ConvNeXt': of_mmpretrain(type='ConvNeXt', arch='atto'),
}
QUICK = ['test_resnet', 'test_convnext']


@pytest.mark.parametrize(
    'name', [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_converted_everywhere(name):
    model = trained_like_small(MODELS[name]()).double()
    model.eval()
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    original = copy.deepcopy(model)
    expected = outputs(model, x)
    report = convs_to_attention(model, '*', inputs=x)
    assert len(report.layers) == sum(isinstance(module, nn.Conv2d) for module in original.modules())
    assert not any(isinstance(module, nn.Conv2d) for module in model.modules())
    assert relative_error(outputs(model, x), expected) < 1e-12 and report.drift < 1e-12

    fresh = MODELS[name]().double()
    assert follow_state_dict(fresh, model.state_dict())
    fresh.load_state_dict(model.state_dict())
    fresh.eval()
    assert torch.equal(outputs(fresh, x), outputs(model, x))
    attention_to_convs(model)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in original.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(
    'layers, arguments', [('layer3*', dict(content='additive')), ('layer*', dict(content='gated', window_size=7))]
)
def test_by_content(layers, arguments):
    model = trained_like_small(timm.create_model('test_resnet', num_classes=7)).double().eval()
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    expected = model(x)
    convs_to_attention(model, layers, **arguments)
    assert relative_error(model(x), expected) < 1e-12
    assert torch.equal(create_feature_extractor(model, ['layer4'])(x)['layer4'], model.forward_features(x))
    if 'window_size' not in arguments:
        shapes = {axis: 32 * torch.export.Dim(f'sides{axis}', min=2, max=8) for axis in (2, 3)}
        exported, other = torch.export.export(model, (x,), dynamic_shapes=(shapes,)).module(), x.repeat(1, 1, 2, 3)
        assert relative_error(exported(other), model(other)) < 1e-12
    model.train()(x).sum().backward()
    attention = [module for module in model.modules() if isinstance(module, ImageAttention)]
    assert all(layer.query.weight.grad is not None for layer in attention)


@pytest.mark.parametrize('content', [None, 'additive'])
def test_gradients_of_one_image(content):
    """Those of the CNN, whose batch norms keep their statistics."""
    model = trained_like_small(timm.create_model('mobilenetv3_small_050', num_classes=7)).double().eval()
    converted = copy.deepcopy(model)
    convs_to_attention(converted, 'blocks.4.*', content=content)
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    for network in (model, converted):
        network(x).square().sum().backward()
    kept = {key: parameter for key, parameter in converted.named_parameters() if key in dict(model.named_parameters())}
    assert len(kept) > 80
    for key, parameter in kept.items():
        assert relative_error(parameter.grad, model.get_parameter(key).grad) < 1e-8


def trained_like_small(model):
    """With statistics of images, so that deep networks neither die out nor overflow."""
    trained_like(model)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model(torch.randn(4, 3, 64, 64))
    return model


def outputs(model, x):
    result = model(x)
    return result if isinstance(result, torch.Tensor) else torch.cat([y.flatten() for y in result])
