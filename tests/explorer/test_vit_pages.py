"""Pages of other libraries' vision transformers: what is in them is the attention that the model computes."""

import math

import pytest
import torch
from helpers.explorer_pages import beside_in, images_of, page_of, probs_in, relative_errors, unpack
from helpers.vits import OF_MMPRETRAIN, OF_TIMM, SIZE, small_vit

from attncnn_plugin import attention_maps
from attncnn_plugin.pruning import prune_heads

OTHERS = {
    **dict.fromkeys([*OF_TIMM, *OF_MMPRETRAIN], ['cls']),
    **dict.fromkeys([name for name in [*OF_TIMM, *OF_MMPRETRAIN] if name.lower().startswith('swin')], []),
    **dict.fromkeys(['beit_base_patch16_224', 'BEiTViT'], ['extra 1']),  # which read the mean of the patches
    **dict.fromkeys(['eva02_tiny_patch14_224', 'eva02_base_patch14_224'], ['extra 1']),
    'deit_tiny_distilled_patch16_224': ['cls', 'extra 2'],
    'vit_relpos_small_patch16_224': [],
    'vit_relpos_base_patch32_plus_rpn_256': [],
    'vit_small_patch16_dinov3': [f'extra {i}' for i in range(1, 6)],
}
SWIN = 'swin_tiny_patch4_window7_224'


def check(layer, probs, image=0):
    """Whether a layer of a page is the attention to an image, within 1/255 of the largest of each query."""
    others = len(layer['others'])
    found, beside = probs_in(layer, 'attention', image), beside_in(layer, 'attention', image)
    patches = probs[..., others:].double()
    assert (relative_errors(found, patches) <= 1 / 255 + 1e-6).all()
    assert torch.allclose(found.amax(-1), patches.amax(-1), rtol=1e-6)
    if others:
        assert torch.equal(beside, probs[..., :others].double())
    assert torch.allclose(beside.sum(-1), 1 - patches.sum(-1), atol=2e-5)
    if layer['keys'] is not None:  # those that a query sees
        for keys, seen in zip(layer['keys'].tolist(), patches.amax(0) > 1e-30):
            assert sorted(keys)[: seen.sum()] == seen.nonzero().flatten().tolist()
            assert set(sorted(keys)[seen.sum() :]) <= {len(seen)}


@pytest.mark.parametrize('name', [*OF_TIMM, *OF_MMPRETRAIN])
def test_every_kind(name):
    model, images, passes = small_vit(name), images_of(2, size=SIZE), []
    model.train()  # some of mmpretrain's give None
    handle = model.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
    layers = unpack(page_of(model, images))['layers']
    handle.remove()
    assert passes == [1, 1] and model.training
    model.eval()
    expected = attention_maps(model, images)
    assert [layer['name'] for layer in layers] == list(expected)
    for layer, probs in zip(layers, expected.values()):
        assert list(layer['parts']) == ['attention'] and layer['heads'] == 3 and layer['others'] == OTHERS[name]
        assert math.prod(layer['grid']) == probs.shape[-1] - len(OTHERS[name]) and layer['centers'] is None
        assert (layer['keys'] is None) == ('swin' not in name.lower() or layer['grid'] == [4, 4])
        for image in range(2):
            check(layer, probs[image], image)


def test_padded_windows():
    """What lies on padding is not lost: it is said to lie outside."""
    model, images = small_vit(SWIN, img_size=40), images_of(2, size=40)  # 10x10 in windows of 4x4
    layers = unpack(page_of(model, images))['layers']
    outside = []
    for layer, probs in zip(layers, attention_maps(model, images).values()):
        check(layer, probs[1], 1)
        beside = beside_in(layer, 'attention', 1)
        assert beside.shape[-1] == int((probs[1].sum(-1) < 1 - 1e-4).any())  # masks hide padding, too
        outside.append(beside.sum().item())
    assert outside[0] > 1


def test_keys_that_one_image_sees():
    """They are there for all images."""
    model, images = small_vit(SWIN), images_of(2, size=SIZE)
    for block in model.layers[0].blocks:
        block.attn.qkv.weight.data *= 100
    layers = unpack(page_of(model, images))['layers'][:2]
    for layer, probs in zip(layers, attention_maps(model, images).values()):
        assert ((probs[1] > 0.1) & (probs[0].amax(0) < 1e-30)).any()
        for image, own in enumerate(probs.double()):
            assert (relative_errors(probs_in(layer, 'attention', image), own) <= 1 / 255 + 1e-6).all()


def test_class_token_comes_later():
    """ConViT: the first layers have no class token."""
    model = small_vit('convit_tiny', depth=3, local_up_to_layer=2)
    layers = unpack(page_of(model, images_of(1, size=SIZE)))['layers']
    assert [layer['others'] for layer in layers] == [[], [], ['cls']]


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', SWIN, 'VisionTransformer', 'SwinTransformer'])
def test_heads_that_were_pruned(name):
    model, images = small_vit(name), images_of(1, size=SIZE)
    first, *others = attention_maps(model, images)
    prune_heads(model, {first: [1]}, images)
    layers = unpack(page_of(model, images))['layers']
    assert [(layer['name'], layer['heads']) for layer in layers] == [(first, 2), *((name, 3) for name in others)]
    check(layers[0], attention_maps(model, images)[first][0])


def test_errors():
    model = small_vit(SWIN, img_size=644, embed_dim=6, depths=(1,), num_heads=(1,), window_size=7)
    with pytest.raises(ValueError, match='blocks.0.attn, 161x161 tokens with 49 keys each'):
        page_of(model, images_of(1, size=644))
