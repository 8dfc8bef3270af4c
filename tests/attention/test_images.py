"""What attention in the place of a convolution does that a convolution does not, as the documentation says."""

import contextlib

import pytest
import timm
import torch
from timm.models.vision_transformer import Attention
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from torch import nn

from attncnn_plugin.attention import AttentionLayer
from attncnn_plugin.convert import conv_to_mhsa, convs_to_attention
from attncnn_plugin.pruning import prune_heads


@pytest.mark.parametrize('value', [torch.nan, torch.inf])
@pytest.mark.parametrize('position, finite', [('gaussian', 0), ('table', 144)])
def test_one_pixel_that_is_not_finite(position, finite, value):
    """A table has the 144 finite outputs of the convolution."""
    conv, x = nn.Conv2d(1, 2, 3, padding=1), torch.randn(1, 1, 9, 9)
    x[0, 0, 4, 4] = value
    outputs = [layer(x).isfinite() for layer in (conv, conv_to_mhsa(conv, position=position)[0])]
    assert [output.sum() for output in outputs] == [144, finite]
    assert not finite or torch.equal(*outputs)


def timm_groups(model, decay, left_off):
    return create_optimizer_v2(param_groups_weight_decay(model, decay, no_weight_decay_list=left_off), 'sgd', lr=1.0)


def mmengine_groups(model, decay, left_off):
    build = pytest.importorskip('mmengine.optim').build_optim_wrapper
    keys = {pattern.strip('*.'): dict(decay_mult=0.0) for pattern in left_off}
    optimizer = dict(type='SGD', lr=1.0, weight_decay=decay)
    return build(model, dict(optimizer=optimizer, paramwise_cfg=dict(custom_keys=keys))).optimizer


@pytest.mark.parametrize('build', [timm_groups, mmengine_groups])
@pytest.mark.parametrize('left_off', [[], ['*.encoding.*']])
def test_weight_decay_moves_hard_heads(build, left_off):
    """Whose gradient is 0."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1))
    convs_to_attention(model, '0')
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build(model, 0.05, left_off)
    model(torch.randn(2, 2, 6, 6)).sin().sum().backward()
    assert not model[0].encoding.center.grad.any() and not model[0].encoding.sqrt_precision.grad.any()
    optimizer.step()
    encoding = {name: p for name, p in model.named_parameters() if 'encoding' in name}
    assert torch.equal(encoding['0.encoding.center'], before['0.encoding.center']) == bool(left_off)
    assert all(torch.equal(p, before[name]) for name, p in encoding.items()) or not left_off


def test_feature_extractors():
    """timm knows the layers of the package, and torchvision must be told; of pruned attention it sees the inside."""
    create = pytest.importorskip('torchvision.models.feature_extraction').create_feature_extractor
    cnn = timm.create_model('test_resnet').eval()
    convs_to_attention(cnn, 'layer4.*')
    vit = timm.create_model('vit_tiny_patch16_224', img_size=32, patch_size=8, depth=1).eval()
    prune_heads(vit, {0: [0]})
    for model, node, leaf in ((cnn, 'layer4', AttentionLayer), (vit, 'norm', Attention)):
        x = torch.randn(1, 3, 32, 32)
        with pytest.raises(torch.fx.proxy.TraceError) if model is cnn else contextlib.nullcontext():
            create(model, [node])
        extractor = create(model, [node], tracer_kwargs={'leaf_modules': [leaf]})
        expected = model.eval().forward_features(x)  # the refusal has left it in training mode
        assert torch.allclose(extractor.eval()(x)[node], expected, atol=1e-6)
