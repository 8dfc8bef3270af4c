"""Attention maps of models, by position, by content, of images; where their heads look, and how widely."""

import copy
import math

import pytest
import timm
import torch
from helpers.convolutions import joined
from helpers.small import SMALL, TIMM_KINDS, model_with_head, small_cmhsa, small_mixed, small_timm
from torch import nn

from attncnn_plugin import attention_maps
from attncnn_plugin.analysis import MeanAttention, head_centers, head_report, layer_maps, mean_attention
from attncnn_plugin.analysis.recorder import attention_layers
from attncnn_plugin.convert import conv_to_mhsa, convs_to_attention
from attncnn_plugin.pruning import prune_heads

IMAGES = (3, 3, 12, 8)  # a grid of 6 rows and 4 columns


def content_model(**kwargs):
    model = small_timm('sa_learned_content_cifar', **kwargs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return model.eval()


def probs_of(model, images, part='all'):
    """By layer, the probabilities of each image, ``(B, N_h, Q, K)``."""
    maps = [mean_attention(model, image[None], part=part) for image in images]
    return {name: torch.stack([own[name].probs for own in maps]) for name in maps[0]}


def log(probs):
    """Scores up to a constant of each query."""
    scores = probs.double().log()
    return scores - scores.mean(-1, keepdim=True)


@pytest.mark.parametrize('name', TIMM_KINDS)
def test_layers_of_every_kind(name):
    """By name, in the order of the blocks, on the grid of the images."""
    model = small_timm(name, depth=12)
    maps = mean_attention(model, torch.randn(IMAGES))
    assert list(maps) == [f'blocks.{i}.attn' for i in range(12)]
    for own in maps.values():
        assert own.grid == (6, 4) and own.num_images == (3 if 'content' in name else 0)
        assert own.probs.shape == (3, 24, 24) and own.of_query()[1] == (3, 2)
        assert torch.allclose(own.probs.sum(-1), torch.ones((), dtype=own.probs.dtype), atol=1e-5)
    (own,) = mean_attention(model.blocks[0].attn, torch.randn(2, 5, 7, SMALL['embed_dim'])).values()  # of tokens
    assert own.grid == (5, 7)


@pytest.mark.parametrize('name', TIMM_KINDS[:3])
def test_position_alone(name):
    """The same of images and of a size, computed in float64 whatever the layer's precision is, kept in float32."""
    model = small_timm(name).bfloat16()
    maps = mean_attention(model, size=(6, 4))
    for part in ('all', 'position'):
        for layer, own in mean_attention(model, torch.randn(IMAGES).bfloat16(), part=part).items():
            assert torch.equal(own.probs, maps[layer].probs) and own.probs.dtype == torch.float32
    expected = copy.deepcopy(model.blocks[1].attn).double().attention_probs((6, 4))
    assert torch.equal(maps['blocks.1.attn'].probs, expected.detach().float())


def test_the_bias_of_cmhsa():
    model = small_cmhsa('attn', null_key=True)
    layer = model.blocks[0].attn
    torch.nn.init.normal_(layer.position.table)
    probs = mean_attention(model, size=(3, 4), part='position')['blocks.0.attn'].probs
    # Each shift of the table has its share, wherever the border is: the null key has those that lead out.
    table = layer.position.table[:, 5:10, 4:11].flatten(1).softmax(-1).reshape(9, 5, 7)  # the middle of 15×15
    for query, key in ((0, 0), (5, 11), (11, 2)):
        shift = key // 4 - query // 4, key % 4 - query % 4
        assert torch.allclose(probs[:, query, key], table[:, shift[0] + 2, shift[1] + 3], atol=1e-6)
    assert (probs.sum(-1) < 1).all()


def test_images_and_their_parts():
    model, images = content_model(), torch.randn(IMAGES)
    probs, position = probs_of(model, images), probs_of(model, images, 'position')
    means, inputs = mean_attention(model, images), {}
    for layer in attention_layers(model).values():
        layer.register_forward_pre_hook(lambda layer, args: inputs.update({layer: args[0].detach()}))
    model(images)
    for name, layer in attention_layers(model).items():
        scores = layer.attention_scores(inputs[layer]), layer.content_scores(inputs[layer])
        expected, content = (own.softmax(-1) for own in scores)
        assert probs[name].shape == (3, 3, 24, 24) and probs[name].dtype == torch.float32
        assert torch.allclose(probs[name], expected, atol=1e-6)
        assert torch.allclose(means[name].probs, expected.mean(0), atol=1e-6)
        # The scores are the sum of both parts.
        parts = [content, position[name]]
        assert torch.allclose(sum(map(log, parts)), log(expected), atol=1e-3)
        assert all(torch.allclose(part.sum(-1), torch.ones(()), atol=1e-5) for part in parts)


def test_the_same_in_parts(monkeypatch):
    """Where the scores of two images do not fit at once, they come one by one."""
    model, images, seen = content_model(), torch.randn(3, 3, 8, 8), []
    whole = mean_attention(model, images)
    layer, scores = model.blocks[0].attn, model.blocks[0].attn.attention_scores
    monkeypatch.setattr(layer_maps, 'CHUNK_ELEMENTS', 3 * 16**2)
    monkeypatch.setattr(layer, 'attention_scores', lambda x: seen.append(len(x)) or scores(x))
    for name, own in mean_attention(model, images).items():
        assert torch.allclose(own.probs, whole[name].probs, atol=1e-6)
    assert seen.count(1) >= len(images)  # the layer itself has other passes


def test_the_model_stays_as_it_was():
    model, images = content_model(proj_drop_rate=0.5, attn_drop_rate=0.5, drop_path_rate=0.5), torch.randn(IMAGES)
    model.train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    first = mean_attention(model, images)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match='cannot be cut into patches'):
        mean_attention(model, torch.randn(1, 3, 7, 7))
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    second = mean_attention(model.eval(), images)
    for name, own in first.items():
        assert torch.equal(own.probs, second[name].probs) and not own.probs.requires_grad


def test_layers_that_lost_heads():
    model = content_model()
    prune_heads(model, {0: [0, 2], 1: [1]})
    for part in ('all', 'position'):
        maps = mean_attention(model, torch.randn(IMAGES), part=part)
        assert [own.probs.shape for own in maps.values()] == [(1, 24, 24), (2, 24, 24)]


@pytest.mark.parametrize(
    'settings, message',
    [
        (dict(), 'images=None and size=None: give images, or the size'),
        (dict(images=torch.randn(IMAGES), size=(4, 4)), r'\(3, 3, 12, 8\).* and size=\(4, 4\): give images'),
        (dict(images=torch.randn(IMAGES)[:0]), r'inputs=<Tensor of shape \(0, 3, 12, 8\)> are none'),
        (dict(size=(4, 4), part='position'), r'scores of blocks.0.attn, .* depend on images'),
        (dict(size=(4, 4), part='both'), "part='both' is unknown: choose 'all' or 'position'"),
    ],
)
def test_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        mean_attention(content_model(), **settings)


def test_models_in_half_precision():
    model, images = content_model(), torch.randn(IMAGES)
    expected = mean_attention(model, images)
    for name, own in mean_attention(model.bfloat16(), images).items():
        assert own.probs.dtype == torch.float and (own.probs - expected[name].probs).abs().max() < 0.05


def test_layers_that_are_not_there():
    images = torch.randn(IMAGES)
    for function in (mean_attention, attention_maps):
        with pytest.raises(ValueError, match='no attention.*convolution phase'):
            function(small_cmhsa('conv'), images)
    for model in (content_model(), small_timm('sa_quadratic_cifar')):
        model.extra = small_timm('sa_learned_content_cifar').blocks[0].attn
        with pytest.raises(ValueError, match='extra is attention that the model does not run on images'):
            mean_attention(model, images)
    with pytest.raises(ValueError, match='layer has 1 axes of pixels'):
        mean_attention(conv_to_mhsa(nn.Conv1d(2, 2, 3))[0], size=(5, 5))


# ---- CNNs whose convolutions became attention: layers of different grids, with fewer queries than keys


SIZES = [(8, 10), (8, 10), (4, 5)]
SHIFTS = [(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)]


def hybrid(content, **options):
    """Three layers at 8x10, 8x10 to 4x5, and 4x5 pixels."""
    convs = [nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1, stride=2), nn.Conv2d(6, 6, 3, padding=1)]
    layers = [conv_to_mhsa(conv, content=content, **options)[0] for conv in convs]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).eval()


@pytest.mark.parametrize('window_size', [None, 3])
@pytest.mark.parametrize('content', ['additive', 'gated'])
def test_maps_of_convolutions(content, window_size):
    """The maps times the pixels are the heads that the layer puts out."""
    model, x = hybrid(content, alpha=2, window_size=window_size), torch.randn(3, 3, 8, 10)
    for layer in (model[0], model[2], model[4]):
        nn.init.normal_(layer.query.weight)
    assert [own.grid for own in mean_attention(model, x).values()] == SIZES
    probs = probs_of(model, x)
    for name, layer in model.named_children():
        if name in probs:
            assert torch.allclose(joined(layer, probs[name], x), layer(x).flatten(2), atol=1e-4)
        x = layer(x)


@pytest.mark.parametrize('content', [None, 'additive'])
def test_centres_and_queries_of_convolutions(content):
    """Hard heads: the centre is the shift, from a query of the layer, and the map is the pixel there."""
    maps = mean_attention(hybrid(content), torch.randn(3, 3, 8, 10))
    for own in maps.values():
        centers, widths = head_centers(own)
        assert torch.allclose(centers, torch.tensor(SHIFTS).double(), atol=1e-3) and widths.max() < 0.05
        for query in (None, (2, 2)):
            all_keys, (row, column) = own.of_query(query)
            assert all(keys[row + down, column + right] > 0.999 for (down, right), keys in zip(SHIFTS, all_keys))
    assert maps['2'].of_query((3, 4))[1] == (2, 4)  # 0, 2, 4 … are queries


def test_a_convolution_in_the_head_of_a_network():
    """After what its forward_features runs."""
    model, layers = timm.create_model('mobilenetv3_small_050'), ['blocks.5.0.conv', 'conv_head']
    convs_to_attention(model, layers)
    assert list(mean_attention(model, torch.randn(1, 3, 64, 64))) == layers


# ---- Models that have attention of other libraries too


def test_mixed_models():
    """All attention is shown, as it is of each part by itself."""
    model, images = small_mixed(), torch.randn(5, 3, 16, 16)
    names = ['stem', 'patches', 'vit.blocks.0.attn', 'vit.blocks.1.attn']
    maps, recorded = mean_attention(model, images), attention_maps(model, images)
    assert list(maps) == list(recorded) == names
    assert [own.grid for own in maps.values()] == [(16, 16), (4, 4), (4, 4), (4, 4)]
    for name, own in maps.items():
        assert torch.allclose(own.probs, recorded[name].mean(0), atol=1e-6) and own.num_images == 5
    assert torch.equal(maps['stem'].probs, mean_attention(model.stem, images)[''].probs)
    reports = head_report(model, images).layers
    assert [(own.name, own.attention) for own in reports] == [
        *[(name, part) for name in names[:2] for part in ('position', 'images')],
        *[(name, 'images') for name in names[2:]],
    ]
    assert list(mean_attention(model, images, layers='vit.*')) == names[2:]
    with pytest.warns(UserWarning, match=r'is left out, .*: vit.blocks.0.attn \(1, 4, 16, 16\)'):
        assert list(mean_attention(model, images, part='position')) == names[:2]
    with pytest.raises(ValueError, match='layers chooses none of the attention that was seen: stem, patches, vit'):
        mean_attention(model, images, layers='blocks.*')


def test_left_out_with_a_warning():
    """Negative weights of mixed heads are no shares, and attention to pooled keys is not between patches."""
    settings = dict(img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=3)
    cait = timm.create_model('cait_xxs24_224', **settings).eval()
    nn.init.constant_(cait.blocks[0].attn.proj_w.bias, -1)
    with pytest.raises(ValueError, match='no attention of a Cait .* without negative weights: .* blocks.0.attn'):
        head_report(cait, torch.randn(2, 3, 32, 32))
    nn.init.eye_(cait.blocks[0].attn.proj_w.weight)
    nn.init.zeros_(cait.blocks[0].attn.proj_w.bias)
    with pytest.warns(UserWarning, match='of a Cait is left out, .*: blocks_token_only.0.attn'):
        assert list(mean_attention(cait, torch.randn(2, 3, 32, 32))) == ['blocks.0.attn']


# ---- Centres and widths of heads


@pytest.mark.parametrize(
    'name, factor, width',
    [
        ('sa_quadratic_cifar', 0.5, 2.0),
        ('sa_generalized_cifar', [[0.5, 0.0], [0.0, 0.25]], math.sqrt((4 + 16) / 2)),
        ('sa_quadratic_cifar', 0.0, 1000.0),
        ('sa_generalized_cifar', [[1.0, 1.0], [1.0, 1.0]], math.sqrt((1e6 + 0.25) / 2)),
    ],
)
def test_centres_and_widths_of_gaussian_heads(name, factor, width):
    model = model_with_head((1.0, -2.0), name, factor)
    centers, widths = head_centers(mean_attention(model, size=(6, 4))['blocks.0.attn'])
    assert centers[0].tolist() == [1, -2] and widths[0].item() == pytest.approx(width)
    expected = model.blocks[0].attn.encoding.center.detach().double()
    assert torch.equal(centers, expected)
    model.blocks[0].attn.encoding.center.data += 1  # as a training goes on
    assert torch.equal(centers, expected)


def test_centres_and_widths_of_other_heads():
    probs = torch.zeros(3, 15, 15)
    probs[:, :, 0] = 1
    probs[0, 7] = probs[2, 7] = 0  # of the query in row 1, column 2, which gives nothing to the grid by head 2
    probs[0, 7, 2 * 5 + 1], probs[0, 7, 2 * 5 + 3] = 0.1, 0.3  # of 0.4: the rest is outside of the grid
    maps = MeanAttention(probs, (3, 5))
    centers, widths = head_centers(maps)
    expected = torch.tensor([[1, 0.5], [-1, -2], [math.nan, math.nan]], dtype=torch.float64)
    assert torch.allclose(centers, expected, atol=1e-6, equal_nan=True)
    expected = torch.tensor([math.sqrt(0.75 / 2), 0, math.nan], dtype=torch.float64)
    assert torch.allclose(widths, expected, atol=1e-6, equal_nan=True)
    assert torch.equal(maps.of_query((2, 4))[0], probs[:, 14].double().unflatten(1, (3, 5)))


@pytest.mark.parametrize('query', [(3, 0), (0, 5), (-1, 0)])
def test_queries_outside_of_the_grid(query):
    maps = MeanAttention(torch.eye(15)[None], (3, 5))
    with pytest.raises(ValueError, match='row from 0 to 2 and a column from 0 to 4'):
        maps.of_query(query)
