"""Attention probabilities of models: by position, by content, of images."""

import subprocess
import sys

import pytest
import timm
import torch
from helpers.small import SMALL, TIMM_KINDS, small_cmhsa, small_timm
from torch import nn

from attncnn_plugin.analysis import (
    attention_layers,
    attention_probs_of,
    content_only_probs_of,
    grid_of,
    mean_attention_probs_of,
    model_attention,
    position_only_probs_of,
)
from attncnn_plugin.attention import QuadraticAttention
from attncnn_plugin.pruning import prune_heads
from attncnn_plugin.transformers import image_means

IMAGES = (3, 3, 12, 8)  # a grid of 6 rows and 4 columns
POSITIONS = ['relative_learned', 'relative_sinusoidal', 'relative_quadratic', 'relative_generalized']


def content_model(**kwargs):
    model = small_timm('sa_learned_content_cifar', **kwargs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return model.eval()


def input_of(layer, model, images):
    """What the layer gets when the model runs."""
    inputs = []
    handle = layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    model.eval()(images)
    handle.remove()
    return inputs[0].detach()


def log(probs):
    """Scores up to a constant of each query."""
    scores = probs.double().log()
    return scores - scores.mean(-1, keepdim=True)


@pytest.mark.slow
def test_it_needs_neither_mmengine_nor_matplotlib():
    program = (
        'import sys; sys.modules.update({name: None for name in ("mmengine", "mmpretrain", "mmcv", '
        '"matplotlib")}); import attncnn_plugin.analysis'
    )
    subprocess.run([sys.executable, '-c', program], check=True)


@pytest.mark.parametrize('name', TIMM_KINDS)
def test_the_layers_of_every_kind_by_name(name):
    model = small_timm(name, depth=12)
    layers = attention_layers(model)
    assert list(layers) == [f'blocks.{i}.attn' for i in range(12)]
    assert all(model.get_submodule(name) is layer for name, layer in layers.items())
    assert {layer.depends_on_content for layer in layers.values()} == {'content' in name}


def test_the_layers_of_cmhsa():
    assert attention_layers(small_cmhsa('conv')) == {}
    layers = attention_layers(small_cmhsa('attn'))
    assert list(layers) == ['blocks.0.attn', 'blocks.1.attn'] and all(
        layer.depends_on_content for layer in layers.values()
    )


@pytest.mark.parametrize('name', TIMM_KINDS[:4])
def test_probabilities_by_position(name):
    layer = small_timm(name).blocks[0].attn.bfloat16()
    probs = layer.position_probs((6, 4))
    assert probs.dtype == torch.float32
    assert torch.equal(probs, layer.attention_probs((6, 4)))


def test_probabilities_by_the_positional_term():
    layer = content_model(position='relative_quadratic').blocks[0].attn
    alone = QuadraticAttention(16, 3)
    alone.encoding.load_state_dict(layer.encoding.state_dict())
    assert torch.allclose(layer.position_probs((6, 4)), alone.attention_probs((6, 4)), atol=1e-6)
    assert content_model().blocks[0].attn.position_probs((6, 4)) is None  # q·r_δ depends on the query


def test_probabilities_by_the_bias_of_cmhsa():
    layer = small_cmhsa('attn', null_key=True).blocks[0].attn
    torch.nn.init.normal_(layer.position.table)
    probs = layer.position_probs((3, 4))
    # Each shift of the table has its share, wherever the border is: the null key has those that lead out.
    table = layer.position.table_of((3, 4))[0].flatten(1).softmax(-1).reshape(9, 5, 7)
    for query, key in ((0, 0), (5, 11), (11, 2)):
        shift = key // 4 - query // 4, key % 4 - query % 4
        assert torch.allclose(probs[:, query, key], table[:, shift[0] + 2, shift[1] + 3], atol=1e-6)
    assert (probs.sum(-1) < 1).all()


@pytest.mark.parametrize('position', POSITIONS)
def test_probabilities_of_images_and_their_parts(position):
    model, images = content_model(position=position), torch.randn(IMAGES)
    probs = attention_probs_of(model, images)
    content, position = content_only_probs_of(model, images), position_only_probs_of(model, images)
    for name, layer in attention_layers(model).items():
        expected = layer.attention_scores(input_of(layer, model, images)).softmax(-1)
        assert probs[name].shape == (3, 3, 24, 24) and probs[name].dtype == torch.float32
        assert torch.allclose(probs[name], expected, atol=1e-6)
        # The scores are the sum of both parts.
        parts = [part[name] for part in (content, position)]
        assert torch.allclose(sum(map(log, parts)), log(expected), atol=1e-3)
        assert all(torch.allclose(part.sum(-1), torch.ones(()), atol=1e-5) for part in parts)


def test_content_alone_knows_nothing_of_positions():
    """Tokens in another order have the same probabilities in that order; with positions they have not."""
    model = content_model(depth=1)
    images = torch.randn(2, 3, 4, 4)
    # The blocks of 2x2 pixels in reverse order.
    other = images.reshape(2, 3, 2, 2, 2, 2).flip(2, 4).reshape(images.shape)
    for probs_of, equal in ((content_only_probs_of, True), (attention_probs_of, False)):
        one, two = (probs_of(model, x)['blocks.0.attn'] for x in (images, other))
        assert torch.allclose(one, two.flip(2, 3), atol=1e-5) == equal


def test_probabilities_of_cmhsa_give_its_output():
    model, images = small_cmhsa('attn', null_key=True), torch.randn(2, 3, 16, 12)
    for parameter in model.blocks.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer = model.blocks[1].attn
    x = input_of(layer, model, images)
    probs = attention_probs_of(model, images)['blocks.1.attn']
    assert probs.shape == (2, 9, 48, 48) and (probs.sum(-1) < 1 - 1e-6).any()
    heads = probs @ layer.value(x).flatten(1, 2).unflatten(-1, (9, -1)).transpose(1, 2)
    expected = layer.out(heads.transpose(1, 2).reshape(2, 8, 6, -1))
    assert torch.allclose(layer(x), expected, atol=1e-3)
    content = content_only_probs_of(model, images)['blocks.1.attn']
    assert torch.allclose(content.sum(-1), torch.ones(()), atol=1e-5)
    position = position_only_probs_of(model, images)['blocks.1.attn']
    assert torch.allclose(position[1], layer.position_probs((8, 6)), atol=1e-6)
    product = content * position
    assert torch.allclose(product / product.sum(-1, keepdim=True), probs / probs.sum(-1, keepdim=True), atol=1e-4)


def test_the_mean_over_images():
    model, images = content_model(), torch.randn(5, 3, 8, 8)
    mean = mean_attention_probs_of(model, images, batch_size=2)
    for name, probs in attention_probs_of(model, images).items():
        assert torch.allclose(mean[name], probs.mean(0), atol=1e-6)
    assert mean_attention_probs_of(small_timm('sa_quadratic_cifar'), images) == {}


def test_the_mean_over_images_is_the_same_in_parts(monkeypatch):
    """Where the scores of two images do not fit at once, they come one by one."""
    model, images = content_model(), torch.randn(3, 3, 8, 8)
    whole, seen = mean_attention_probs_of(model, images), []
    few_images = model_attention.few_images
    monkeypatch.setattr(image_means, 'CHUNK_ELEMENTS', 3 * 16**2)
    monkeypatch.setattr(model_attention, 'few_images', lambda *args: seen.append(few_images(*args)) or seen[-1])
    for name, probs in mean_attention_probs_of(model, images).items():
        assert torch.allclose(probs, whole[name], atol=1e-6)
    assert [[len(part) for part in parts] for parts in seen] == [[1, 1, 1]] * 2


def test_a_detector_asks_for_more_than_images():
    """Of a model whose forward pass takes boxes too, the network alone runs, by a module that has its layers."""

    class Detector(nn.Module):
        def __init__(self, backbone):
            super().__init__()
            self.neck, self.backbone = timm.create_model('resnet18'), backbone  # another one with forward_features

        def forward(self, images, boxes):
            raise AssertionError('the whole detector ran')

    model, images = content_model(), torch.randn(IMAGES)
    expected = attention_probs_of(model, images)
    probs = attention_probs_of(Detector(model), images)
    assert list(probs) == [f'backbone.{name}' for name in expected]
    assert all(torch.equal(probs[f'backbone.{name}'], own) for name, own in expected.items())


def test_the_model_stays_as_it_was():
    model, images = content_model(proj_drop_rate=0.5, attn_drop_rate=0.5, drop_path_rate=0.5), torch.randn(IMAGES)
    model.train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    first = attention_probs_of(model, images)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    second = attention_probs_of(model.eval(), images)
    assert all(torch.equal(first[name], second[name]) and not first[name].requires_grad for name in first)


def test_the_model_stays_as_it_was_after_an_error():
    model = content_model().train()
    with pytest.raises(ValueError, match='cannot be cut into patches'):
        attention_probs_of(model, torch.randn(1, 3, 7, 7))
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize('name', TIMM_KINDS)
def test_the_grid(name):
    assert grid_of(small_timm(name), torch.randn(IMAGES)) == (6, 4)


def test_the_grid_of_cmhsa():
    assert grid_of(small_cmhsa('attn'), torch.randn(2, 3, 16, 12)) == (8, 6)
    with pytest.raises(ValueError, match='no attention layers.*convolution phase'):
        grid_of(small_cmhsa('conv'), torch.randn(2, 3, 16, 12))


def test_layers_without_heads():
    model = content_model()
    prune_heads(model, {0: [0, 1, 2], 1: [1]}, allow_empty=True)
    for probs_of in (attention_probs_of, content_only_probs_of, position_only_probs_of):
        probs = probs_of(model, torch.randn(IMAGES))
        assert [layer.shape for layer in probs.values()] == [(3, 0, 24, 24), (3, 2, 24, 24)]
    model = timm.create_model('sa_quadratic_cifar', **SMALL)
    prune_heads(model, {0: [0, 1, 2]}, allow_empty=True)
    assert model.blocks[0].attn.position_probs((3, 3)).shape == (0, 9, 9)


def test_layers_that_the_model_does_not_run():
    for model in (content_model(), small_timm('sa_quadratic_cifar')):
        model.extra = small_timm('sa_learned_content_cifar').blocks[0].attn
        for function in (grid_of, mean_attention_probs_of):
            with pytest.raises(ValueError, match='extra is attention that the model does not run on images'):
                function(model, torch.randn(IMAGES))
