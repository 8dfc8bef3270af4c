"""Head reports of mmpretrain's vision transformers, by the mechanism of timm's."""

import pytest
import torch
from mmengine.registry import init_default_scope
from mmpretrain.models.utils.attention import scaled_dot_product_attention_pyimpl
from mmpretrain.registry import MODELS
from torch import nn

from attncnn_plugin.analysis import attention_layers, is_vit, mean_vit_attention, patch_grid, vit_attention, vit_reports

ARCH = dict(embed_dims=12, num_layers=2, num_heads=3, feedforward_channels=24)


def build(kind, **settings):
    init_default_scope('mmpretrain')
    model = MODELS.build(dict(type=kind, arch=ARCH, img_size=32, patch_size=8, drop_rate=0.5, **settings))
    for layer in model.layers:
        nn.init.normal_(layer.attn.qkv.weight, std=0.5)
    return model


@pytest.mark.parametrize(
    'kind, settings, prefix',
    [
        ('VisionTransformer', {}, 1),
        ('VisionTransformer', dict(out_type='avg_featmap', with_cls_token=False), 0),
        ('DistilledVisionTransformer', {}, 2),
    ],
)
@pytest.mark.parametrize('size', [(32, 32), (32, 48)])
def test_attention(kind, settings, prefix, size):
    """Against q and k computed here; inside of a classifier too."""
    model, images = build(kind, **settings), torch.randn(3, 3, *size)
    model.train()
    model.layers[1].attn.scaled_dot_product_attention = scaled_dot_product_attention_pyimpl  # of old PyTorch, of scales
    functions = [layer.attn.scaled_dot_product_attention for layer in model.layers]
    inputs = {}
    for i, layer in enumerate(model.layers):
        layer.attn.register_forward_pre_hook(lambda _, args, i=i: inputs.update({i: args[0].detach()}))
    probs, left_out = vit_attention(nn.ModuleDict(dict(backbone=model)), images)
    assert all(module.training for module in model.modules())
    assert functions == [layer.attn.scaled_dot_product_attention for layer in model.layers]
    assert list(probs) == ['backbone.layers.0.attn', 'backbone.layers.1.attn']
    means = mean_vit_attention(model, images)
    for i, layer in enumerate(model.layers):
        qkv = layer.attn.qkv(inputs[i]).reshape(3, -1, 3, 3, 4)  # (B, N, 3, heads, D_h)
        for head in range(3):
            whole = (qkv[:, :, 0, head] @ qkv[:, :, 1, head].mT / 2).softmax(-1)
            patches = whole[:, prefix:, prefix:] / whole[:, prefix:, prefix:].sum(-1, keepdim=True)
            assert torch.allclose(probs[f'backbone.layers.{i}.attn'][:, head], patches, atol=1e-5)
            assert torch.allclose(means[f'layers.{i}.attn'][head], patches.mean(0), atol=1e-5)
            mass = whole[:, prefix:, :prefix].sum(-1).mean(-1)
            assert torch.allclose(left_out[f'backbone.layers.{i}.attn'][:, head], mass, atol=1e-5)
    assert patch_grid(model, images) == (size[0] // 8, size[1] // 8)
    for report in vit_reports(model, images):
        assert (report.grid, report.num_images, report.num_heads) == (patch_grid(model, images), 3, 3)
        assert [head.prefix_mass for head in report.heads] == pytest.approx(
            left_out[f'backbone.{report.name}'].mean(0).tolist(), abs=1e-6
        )


def test_outputs_are_as_without_a_report():
    model, images = build('VisionTransformer'), torch.randn(2, 3, 32, 32)
    model.eval()
    outputs = []
    before = model(images)
    model.register_forward_hook(lambda _, args, output: outputs.append(output))
    vit_attention(model, images)
    assert torch.equal(outputs[0][0], before[0])


@pytest.mark.parametrize(
    'settings, reason',
    [
        (dict(type='ResNet', depth=18), 'in which no module has a patch_embed'),
        (
            dict(type='MViT', arch='tiny'),
            'is a MultiScaleAttention of mmpretrain.models.backbones.mvit: the classes that are known',
        ),
    ],
)
def test_other_models(settings, reason):
    init_default_scope('mmpretrain')
    model = MODELS.build(settings)
    assert is_vit(model) == (settings['type'] == 'MViT') and not attention_layers(model)
    with pytest.raises(ValueError, match=f'{settings["type"]}.* {reason}'):
        vit_reports(model, torch.randn(1, 3, 32, 32))
