"""mmengine's initializer ConvolutionalHeads, for vision transformers of mmpretrain."""

import pytest
import torch
from helpers.starts import gaussian, total_variation
from mmengine.registry import DefaultScope
from mmpretrain.registry import MODELS

import attncnn_plugin  # noqa: F401
from attncnn_plugin.analysis import mean_attention
from attncnn_plugin.transformers import init_as_convolution
from attncnn_plugin.transformers.embeddings import sine_cosine_embedding
from attncnn_plugin.transformers.start import random_images
from attncnn_plugin.transformers.vision_transformer import find_transformer

ARCH = dict(embed_dims=32, num_layers=2, num_heads=2, feedforward_channels=48)
SWIN_ARCH = dict(embed_dims=16, depths=[2, 1], num_heads=[2, 4])
START = dict(type='ConvolutionalHeads', kernel_size=3)
VIT = dict(type='VisionTransformer', arch=ARCH, img_size=24, patch_size=4)
SMALL = [
    VIT,
    dict(VIT, type='DeiT3'),
    dict(VIT, type='BEiTViT', use_rel_pos_bias=False, use_shared_rel_pos_bias=True),
    dict(type='SwinTransformer', arch=SWIN_ARCH, img_size=48, window_size=3, out_indices=(1,)),
]
HEAD = dict(type='VisionTransformerClsHead', num_classes=4, in_channels=32)
DRAWN = dict(type='TruncNormal', layer='Linear', std=0.02)
BOUNDS = dict(absolute=0.1, relative=1e-6)


@pytest.fixture(autouse=True)
def scope():
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        yield


def built(config, **changes):
    torch.manual_seed(0)
    return MODELS.build(dict(config, **changes))


def assert_started(model, backbone, prefix, layers, bound):
    """What each head attends to is the Gaussian around its shift."""
    maps = mean_attention(model, random_images(find_transformer(backbone))[:1])
    for layer in layers:
        for number, head in enumerate(layer.heads):
            probs = maps[prefix + layer.name].probs[[number]].double()
            assert total_variation(probs, gaussian(head.shift, 2.0, layer.grid)) < bound


@pytest.mark.parametrize('config', SMALL, ids=[config['type'] for config in SMALL])
def test_attention_after_init_weights(config):
    """The start comes last: after tables, embeddings and MLPs that mmpretrain draws, with its own attention."""
    model, other = built(config, init_cfg=[START]), built(config)
    report = init_as_convolution(other)
    model.init_weights()
    encoding = 'absolute' if config['type'] not in ('BEiTViT', 'SwinTransformer') else 'relative'
    assert {layer.encoding for layer in report.layers} == {encoding}
    assert all(head.total_variation < BOUNDS[encoding] for layer in report.layers for head in layer.heads)
    if config['type'] == 'SwinTransformer':
        for layer in report.layers:
            tables = (own.get_submodule(layer.name).relative_position_bias_table for own in (model, other))
            assert torch.equal(*tables)
        return
    assert_started(model, model, '', report.layers, max(BOUNDS[encoding], 1e-5))


def test_in_a_classifier():
    """Of a model, after what its other initializers set; of its backbone, after the model's own."""
    for of_model, of_backbone in (([DRAWN, START], None), ([DRAWN], [START])):
        config = dict(type='ImageClassifier', backbone=dict(VIT, init_cfg=of_backbone), head=HEAD, init_cfg=of_model)
        model = built(config)
        model.init_weights()
        assert_started(model, model.backbone, 'backbone.', init_as_convolution(built(VIT)).layers, 0.1)
        assert model.head.layers.head.weight.std() < 0.03  # initialized, too


@pytest.mark.parametrize('backbone, name', [(VIT, 'layers.0.attn.'), (dict(type='SAQuadratic'), 'blocks.0.')])
def test_the_recipe_of_a_classifier(backbone, name):
    """It draws the linear maps of its backbone, of mmpretrain or of this package, and no position."""
    for init_cfg in ([DRAWN], None):
        model = built(dict(type='ImageClassifier', backbone=backbone, head=HEAD, init_cfg=init_cfg))
        before = {key: value.clone() for key, value in model.backbone.named_parameters()}
        model.init_weights()
        after = dict(model.backbone.named_parameters())
        assert torch.equal(after[f'{name}proj.weight'], before[f'{name}proj.weight']) == (init_cfg is None)
        assert init_cfg is None or after[f'{name}proj.weight'].std().item() == pytest.approx(0.02, rel=0.1)
        assert all(torch.equal(value, before[key]) for key, value in after.items() if 'encoding' in key)


def test_beside_a_checkpoint(tmp_path):
    """mmengine would load it over the start. Of a part of the model it is loaded before, and is not overwritten."""
    trained = built(VIT)
    with torch.no_grad():
        trained.layers[0].ln1.bias.normal_(std=0.1)
    torch.save(trained.state_dict(), tmp_path / 'trained.pth')
    pretrained = dict(type='Pretrained', checkpoint=str(tmp_path / 'trained.pth'))
    for init_cfg in ([pretrained, START], [START, pretrained]):
        with pytest.raises(ValueError, match='has Pretrained beside ConvolutionalHeads, whose start'):
            built(VIT, init_cfg=init_cfg).init_weights()
    config = dict(type='ImageClassifier', backbone=dict(VIT, init_cfg=pretrained), head=HEAD)
    with pytest.raises(ValueError, match=r'layers\.0\.ln1\.bias of VisionTransformer holds different numbers'):
        built(config, init_cfg=START).init_weights()
    model = built(config, init_cfg=dict(START, overwrite=True))
    model.init_weights()
    assert torch.equal(model.backbone.layers[0].ln1.bias, trained.layers[0].ln1.bias)
    assert not torch.equal(model.backbone.layers[0].attn.qkv.weight, trained.layers[0].attn.qkv.weight)


def test_the_record():
    """mmengine's log says what set each parameter."""
    model = built(VIT, init_cfg=START)
    record = {}
    model._dump_init_info = lambda: record.update(
        {name: model._params_init_info[parameter]['init_info'] for name, parameter in model.named_parameters()}
    )
    model.init_weights()
    set_by = [name for name, info in record.items() if info.startswith('ConvolutionalHeads')]
    assert {'pos_embed', 'layers.0.attn.qkv.weight', 'layers.1.attn.qkv.weight'} <= set(set_by)


def test_without_init_weights():
    """The initializer itself, of a model that is in no init_weights."""
    from attncnn_plugin.mm.initializers import ConvolutionalHeads

    model, other = built(VIT), built(VIT)
    ConvolutionalHeads(alpha=1.0, seed=3, shifts='random')(model)
    init_as_convolution(other, alpha=1.0, seed=3, shifts='random')
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())
    assert model.init_cfg == other.init_cfg


def test_sines_and_cosines_alone():
    """The embedding of the start, and all else as drawn."""
    model, started, plain = (built(VIT, init_cfg=config) for config in (dict(type='SineCosineEmbedding'), START, None))
    for network in (model, started, plain):
        torch.manual_seed(0)
        network.init_weights()
    assert torch.allclose(model.pos_embed[0, 1:], sine_cosine_embedding((6, 6), 32).float())
    changed = [name for name, value in model.named_parameters() if not torch.equal(value, plain.get_parameter(name))]
    assert changed == ['pos_embed'] and not torch.equal(
        started.layers[0].attn.qkv.weight, plain.layers[0].attn.qkv.weight
    )


def test_refusals():
    with pytest.raises(TypeError, match="init_as_convolution.* got an unexpected keyword argument 'kernel'"):
        built(VIT, init_cfg=[dict(type='ConvolutionalHeads', kernel=3)]).init_weights()
    with pytest.raises(ValueError, match='has TruncNormal after ConvolutionalHeads: put that last'):
        built(VIT, init_cfg=[START, DRAWN]).init_weights()
    with pytest.raises(ValueError, match='a RotaryEmbeddingFast has no angles to read'):
        built(dict(type='ViTEVA02', arch='tiny', img_size=28), init_cfg=[START]).init_weights()
