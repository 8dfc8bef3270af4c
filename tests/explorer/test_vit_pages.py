"""Pages of other libraries' vision transformers: what is in them is the attention that the model computes."""

import json
import math

import numpy as np
import pytest
import timm
import torch
from helpers.explorer_pages import beside_in, images_of, page_of, probs_in, relative_errors, unpack
from helpers.processes import run
from helpers.vits import OF_MMPRETRAIN, OF_TIMM, SIZE, small_vit
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attncnn_plugin.explorer import layer_data
from attncnn_plugin.pruning import prune_heads
from attncnn_plugin.transformers.attention import TokenPlaces, visit_vit_attention

OTHERS = {
    **dict.fromkeys([*OF_TIMM, *OF_MMPRETRAIN], ['cls']),
    **dict.fromkeys([name for name in [*OF_TIMM, *OF_MMPRETRAIN] if name.lower().startswith('swin')], []),
    'deit_tiny_distilled_patch16_224': ['cls', 'dist'],
    'vit_relpos_small_patch16_224': [],
    'vit_relpos_base_patch32_plus_rpn_256': [],
    'vit_small_patch16_dinov3': ['cls', 'reg 1', 'reg 2', 'reg 3', 'reg 4'],
}
SWIN = 'swin_tiny_patch4_window7_224'


def visited(model, images):
    """The probabilities of all layers as the model computes them, and their places."""
    found = {}
    visit_vit_attention(model, images, lambda name, probs, places: found.update({name: (probs, places)}))
    return found


def dense(probs, places, image):
    """The probabilities of an image between all patches and the tokens before them, ``(N_h, N, N)``, float64."""
    if places.windows is None:
        return probs[image].double()
    patches, count = places.grid[0] * places.grid[1], len(places.windows)
    whole = torch.zeros(probs.shape[1], patches, patches, dtype=torch.float64)
    for w, window in enumerate(places.windows.tolist()):
        for q, query in enumerate(window):
            for k, key in enumerate(window):
                if query < patches and key < patches:
                    whole[:, query, key] = probs[image * count + w, :, q, k]
    return whole


def check(layer, probs, places, image=0):
    """Whether a layer of a page is the attention of an image, within 1/255 of the largest of each query."""
    expected = dense(probs, places, image)
    found, beside = probs_in(layer, 'attention', image), beside_in(layer, 'attention', image)
    patches = expected[..., places.prefix :]
    assert (relative_errors(found, patches) <= 1 / 255 + 1e-6).all()
    assert torch.allclose(found.amax(-1), patches.amax(-1), rtol=1e-6)
    if places.prefix:
        assert torch.equal(beside, expected[..., : places.prefix])
    assert torch.allclose(beside.sum(-1), 1 - patches.sum(-1), atol=2e-5)


@pytest.mark.parametrize('name', [*OF_TIMM, *OF_MMPRETRAIN])
def test_every_kind(name):
    model, images, passes = small_vit(name), images_of(2, size=SIZE), []
    model.train()  # some of mmpretrain's give None
    handle = model.patch_embed.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
    layers = unpack(page_of(model, images))['layers']
    handle.remove()
    assert passes == [1, 1] and model.training
    model.eval()
    expected = visited(model, images)
    assert [layer['name'] for layer in layers] == list(expected)
    for layer, (probs, places) in zip(layers, expected.values()):
        assert list(layer['parts']) == ['attention'] and layer['heads'] == 3 and layer['others'] == OTHERS[name]
        assert tuple(layer['grid']) == places.grid and layer['centers'] is None
        for image in range(2):
            check(layer, probs, places, image)


@st.composite
def attention(draw):
    """Probabilities between tokens on a grid, and where these lie: all of them, or any patches in each window."""
    height, width = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    images, heads, count = draw(st.integers(1, 2)), draw(st.integers(1, 3)), height * width
    torch.manual_seed(draw(st.integers(0, 99)))
    prefix, windows = draw(st.integers(0, 3)), None
    if draw(st.booleans()):
        size, prefix = draw(st.integers(1, count)), 0
        number = math.ceil(count / size) + draw(st.integers(0, 1))  # the rest is padding
        windows = torch.randperm(number * size).clamp(max=count).reshape(number, size)
        images, count = images * number, size
    scores = torch.randn(images, heads, prefix + count, prefix + count) * draw(st.sampled_from([0.1, 3, 300]))
    masked = None
    if windows is not None:
        masked = (torch.rand(len(windows), count, count) < 0.3) & ~torch.eye(count, dtype=torch.bool)
        scores = scores.unflatten(0, (-1, len(windows))).masked_fill(masked[:, None], -math.inf).flatten(0, 1)
    return scores.softmax(-1), TokenPlaces((height, width), prefix, windows, masked)


@given(attention())
def test_any_grid(case):
    """Whatever a model's windows are, and whichever keys of them its queries do not see."""
    probs, places = case
    count = 1 if places.windows is None else len(places.windows)
    images = torch.zeros(len(probs) // count, 3, 8, 8)
    of_images = iter(probs.split(count))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_data, 'visit_vit_attention', lambda _, x, visit: visit('attn', next(of_images), places))
        patch.setattr(layer_data, 'shown_layers', lambda model: ['attn'])
        patch.setattr(layer_data, 'find_transformer', lambda model: ('', model))
        patch.setattr(layer_data, 'prefix_names', lambda model: ['cls', 'reg 1', 'reg 2'])
        layers = layer_data.observed_layers(None, images)
    layer = unpack(f'id="data">{json.dumps(layers)}<')[0]
    for image in range(len(images)):
        check(layer, probs, places, image)
    if places.windows is None:
        assert layer['keys'] is None
        return
    for window, hidden in zip(places.windows, places.masked):
        for slot, query in enumerate(window):
            if query < places.grid[0] * places.grid[1]:
                seen = torch.where(hidden[slot], places.grid[0] * places.grid[1], window)
                assert layer['keys'][query].tolist() == seen.tolist()


def test_padded_windows():
    """What lies on padding is not lost: it is said to lie outside."""
    model, images = small_vit(SWIN, img_size=40), images_of(2, size=40)  # 10x10 in windows of 4x4
    layers = unpack(page_of(model, images))['layers']
    outside = []
    for layer, (probs, places) in zip(layers, visited(model, images).values()):
        check(layer, probs, places, 1)
        beside = beside_in(layer, 'attention', 1)
        assert beside.shape[-1] == int((dense(probs, places, 1).sum(-1) < 1 - 1e-4).any())  # masks hide padding, too
        outside.append(beside.sum().item())
    assert outside[0] > 1


def test_masks_of_shifted_windows():
    """The keys that a query sees are a piece of the image, though the window goes around its border."""
    layers = unpack(page_of(small_vit(SWIN), images_of(2, size=SIZE)))['layers']
    assert (layers[0]['keys'] < 64).all()
    assert sorted(layers[1]['keys'][0]) == [0, 1, 8, 9, *[64] * 12]  # shifted by 2 of 4


def test_class_token_comes_later():
    """ConViT: the first layers have no class token."""
    model = timm.create_model(
        'convit_tiny', img_size=32, patch_size=8, embed_dim=12, num_heads=3, depth=3, local_up_to_layer=2
    )
    layers = unpack(page_of(model, images_of(1, size=32)))['layers']
    assert [layer['others'] for layer in layers] == [[], [], ['cls']]


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', SWIN, 'VisionTransformer', 'SwinTransformer'])
def test_heads_that_were_pruned(name):
    model, images = small_vit(name), images_of(1, size=SIZE)
    first, second = list(visited(model, images))[:2]
    prune_heads(model, {first: [1], second: [0, 1, 2]}, allow_empty=True)
    layers = unpack(page_of(model, images))['layers']
    assert [layer['heads'] for layer in layers[:2]] == [2, 0] and layers[1]['parts'] == {}
    check(layers[0], *visited(model, images)[first])


def test_inside_of_a_classifier():
    model, images = small_vit('vit_tiny_patch16_224'), images_of(1, size=SIZE)
    layers = unpack(page_of(nn.ModuleDict(dict(backbone=model)), images))['layers']
    assert [(layer['name'], layer['label']) for layer in layers] == [
        (f'backbone.blocks.{i}.attn', f'block {i}') for i in range(2)
    ]
    layers = unpack(page_of(small_vit(SWIN), images))['layers']  # two blocks of the same number
    assert [layer['label'] for layer in layers] == [f'stage {i} block {j}' for i in range(2) for j in range(2)]


def tiny(name, **settings):
    return timm.create_model(name, embed_dim=6, num_classes=2, **settings).eval()


def test_tokens_of_windows():
    """56x56 of them, which would be ten million probabilities a head."""
    model = tiny(SWIN, depths=(2,), num_heads=(2,))
    images = images_of(1, size=224)
    page = page_of(model, images)
    assert len(page) <= 2_000_000
    content = unpack(page)
    assert content['grid'] == [56, 56] and content['layers'][0]['keys'].shape == (3136, 49)
    for layer, (probs, places) in zip(content['layers'], visited(model, images).values()):
        where = places.windows == 56 * 28 + 27
        window, slot = (int(index) for index in where.nonzero()[0])
        found = probs_in(layer, 'attention')[:, 56 * 28 + 27, places.windows[window]]
        assert (relative_errors(found, probs[window, :, slot].double()) <= 1 / 255 + 1e-6).all()


@pytest.mark.slow
def test_swin_in_ten_megabytes():
    page = page_of(timm.create_model(SWIN).eval(), images_of(2, size=224))
    assert len(page.encode()) <= 10_000_000


def test_errors():
    with pytest.raises(
        ValueError, match='blocks.0.attn, 33x33 tokens with 1089 keys each.* a model that takes smaller'
    ):
        page_of(tiny('vit_tiny_patch16_224', img_size=66, patch_size=2, depth=1, num_heads=1), images_of(1, size=66))
    with pytest.raises(ValueError, match='blocks.0.attn, 161x161 tokens with 49 keys each'):
        page_of(tiny(SWIN, img_size=644, depths=(1,), num_heads=(1,)), images_of(1, size=644))
    with pytest.raises(ValueError, match='no attention layers of this package'):
        page_of(timm.create_model('resnet18', num_classes=2), images_of())
    model, images = small_vit('vit_tiny_patch16_224'), images_of(size=SIZE)
    with pytest.raises(ValueError, match='max_bytes=20,000, with 2 layers and images of shape'):
        page_of(model, images, max_bytes=20_000)
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight.fill_(float('nan'))
    with pytest.raises(ValueError, match='blocks.1.attn are not finite'):
        page_of(model, images)


CONFIG = """
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='VisionTransformer', img_size=32, patch_size=8,
        arch=dict(embed_dims=12, num_layers=2, num_heads=3, feedforward_channels=12)),
    head=dict(type='VisionTransformerClsHead', num_classes=2, in_channels=12))
data_preprocessor = dict(num_classes=2, mean=[128] * 3, std=[64] * 3, to_rgb=True)
test_dataloader = dict(dataset=dict(pipeline=[
    dict(type='LoadImageFromFile'), dict(type='Resize', scale=(32, 32)), dict(type='PackInputs')]))
"""


def test_tool(repository, tmp_path):
    """A config of mmpretrain and a checkpoint."""
    pytest.importorskip('mmpretrain')
    from mmengine.config import Config
    from mmengine.registry import init_default_scope
    from mmpretrain.registry import MODELS

    config, checkpoint, out = tmp_path / 'vit.py', tmp_path / 'model.pth', tmp_path / 'explorer.html'
    config.write_text(CONFIG)
    init_default_scope('mmpretrain')
    model = MODELS.build(Config.fromfile(config).model).eval()
    torch.save(dict(state_dict=model.state_dict()), checkpoint)
    photo = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    np.save(tmp_path / 'photo.npy', photo)
    tool = repository / 'tools/visualization/attention_explorer.py'
    run('python', tool, config, checkpoint, tmp_path / 'photo.npy', '--out', out, folder=tmp_path)
    content = unpack(out.read_text(encoding='utf-8'))
    assert (content['pictures'][0] == photo).all()
    expected = visited(model, (torch.from_numpy(photo).permute(2, 0, 1)[None].float() - 128) / 64)
    assert [layer['name'] for layer in content['layers']] == list(expected)
    for layer, (probs, places) in zip(content['layers'], expected.values()):
        check(layer, probs, places)
