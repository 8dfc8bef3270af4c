"""Pages of other libraries' vision transformers: what is in them is the attention that the model computes."""

import pytest
import torch
from helpers.explorer_pages import beside_in, images_of, page_of, probs_in, relative_errors, unpack, visited
from helpers.vits import OF_MMPRETRAIN, OF_TIMM, SIZE, small_vit

from attncnn_plugin.pruning import prune_heads

OTHERS = {
    **dict.fromkeys([*OF_TIMM, *OF_MMPRETRAIN], ['cls']),
    **dict.fromkeys([name for name in [*OF_TIMM, *OF_MMPRETRAIN] if name.lower().startswith('swin')], []),
    'deit_tiny_distilled_patch16_224': ['cls', 'dist'],
    'vit_relpos_small_patch16_224': [],
    'vit_relpos_base_patch32_plus_rpn_256': [],
    'vit_small_patch16_dinov3': ['cls', 'reg 1', 'reg 2', 'reg 3', 'reg 4'],
}
SWIN = 'swin_tiny_patch4_window7_224'


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
    if places.windows is None:
        assert layer['keys'] is None
        return
    count = places.grid[0] * places.grid[1]
    hidden = torch.zeros(*places.windows.shape, 1, dtype=torch.bool) if places.masked is None else places.masked
    for window, own in zip(places.windows, hidden):
        for slot, query in enumerate(window.tolist()):
            if query < count:  # no padding: the keys that it sees
                assert layer['keys'][query].tolist() == torch.where(own[slot], count, window).tolist()


@pytest.mark.parametrize('name', [*OF_TIMM, *OF_MMPRETRAIN])
def test_every_kind(name):
    model, images, passes = small_vit(name), images_of(2, size=SIZE), []
    model.train()  # some of mmpretrain's give None
    handle = model.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
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


def test_class_token_comes_later():
    """ConViT: the first layers have no class token."""
    model = small_vit('convit_tiny', depth=3, local_up_to_layer=2)
    layers = unpack(page_of(model, images_of(1, size=SIZE)))['layers']
    assert [layer['others'] for layer in layers] == [[], [], ['cls']]


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', SWIN, 'VisionTransformer', 'SwinTransformer'])
def test_heads_that_were_pruned(name):
    model, images = small_vit(name), images_of(1, size=SIZE)
    first, second = list(visited(model, images))[:2]
    prune_heads(model, {first: [1], second: [0, 1, 2]}, allow_empty=True)
    layers = unpack(page_of(model, images))['layers']
    assert [layer['heads'] for layer in layers[:2]] == [2, 0] and layers[1]['parts'] == {}
    check(layers[0], *visited(model, images)[first])


def test_errors():
    model = small_vit(SWIN, img_size=644, embed_dim=6, depths=(1,), num_heads=(1,), window_size=7)
    with pytest.raises(ValueError, match='blocks.0.attn, 161x161 tokens with 49 keys each'):
        page_of(model, images_of(1, size=644))
