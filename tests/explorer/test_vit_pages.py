"""Pages of other libraries' vision transformers: what is in them is the attention that the model computes."""

import math

import pytest
import timm
import torch
from helpers.explorer_pages import beside_in, images_of, page_of, pictures_of, probs_in, relative_errors, unpack
from helpers.versions import hugging_face_library
from helpers.vits import OF_HUGGING_FACE, OF_MMPRETRAIN, OF_TIMM, OF_TORCHVISION, SIZE, not_small, small_vit
from timm.layers import to_2tuple

from attncnn_plugin import attention_maps
from attncnn_plugin.explorer import explorer_page
from attncnn_plugin.pruning import prune_heads

KINDS = [*OF_TIMM, *OF_MMPRETRAIN, *OF_HUGGING_FACE, *OF_TORCHVISION]
OTHERS = {
    **dict.fromkeys(KINDS, ['cls']),
    **dict.fromkeys([name for name in KINDS if 'swin' in name.lower()], []),
    # Which read the mean of the patches.
    **dict.fromkeys(['beit_base_patch16_224', 'BEiTViT', 'transformers.Beit'], ['extra 1']),
    **dict.fromkeys(['eva02_tiny_patch14_224', 'eva02_base_patch14_224'], ['extra 1']),
    **dict.fromkeys(['deit_tiny_distilled_patch16_224', 'transformers.DeiT'], ['cls', 'extra 2']),
    **dict.fromkeys(['transformers.Dinov2WithRegisters', 'transformers.DINOv3ViT'], ['cls', 'extra 2', 'extra 3']),
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
        assert torch.allclose(beside, probs[..., :others].double(), rtol=1e-6)  # images alone and in batches differ
    assert torch.allclose(beside.sum(-1), 1 - patches.sum(-1), atol=2e-5)
    if layer['keys'] is not None:  # those that a query sees
        for keys, seen in zip(layer['keys'].tolist(), patches.amax(0) > 1e-30):
            assert sorted(keys)[: seen.sum()] == seen.nonzero().flatten().tolist()
            assert set(sorted(keys)[seen.sum() :]) <= {len(seen)}


@pytest.mark.parametrize('name', KINDS)
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
        assert math.prod(layer['grid']) == probs.shape[-1] - len(OTHERS[name]) and 'centers' not in layer
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
    with pytest.raises(ValueError, match='blocks.0.attn has 161x161 tokens with 49 keys each'):
        page_of(model, images_of(1, size=644))


MORE_KINDS = {
    'maxvit_nano_rw_256': dict(img_size=128),  # windows, and grids of tokens that lie apart
    'vit_small_patch14_reg4_dinov2': dict(img_size=(28, 56), patch_size=14, embed_dim=24, num_heads=3, depth=2),
    'cait_xxs24_224': dict(img_size=SIZE, patch_size=8, embed_dim=24, depth=2, num_heads=3),
    'pvt_v2_b0': dict(),
    'xcit_nano_12_p16_224': dict(img_size=SIZE),
}


def made(name):
    settings = MORE_KINDS[name]
    height, width = to_2tuple(settings.get('img_size', 64))
    return timm.create_model(name, **settings).eval(), images_of(1, size=height, width=width)


@pytest.mark.parametrize('name', list(MORE_KINDS)[:2])
def test_more_kinds(name):
    model, images = made(name)
    content, expected = unpack(page_of(model, images)), attention_maps(model, images)
    assert [layer['name'] for layer in content['layers']] == list(expected) and content['leftOut'] == []
    for layer, probs in zip(content['layers'], expected.values()):
        check(layer, probs[0])


def test_mixed_heads_and_a_class_token_alone():
    """CaiT mixes heads after the softmax: negative weights count as 0, and the page has the least one."""
    model, images = made('cait_xxs24_224')
    content, expected = unpack(page_of(model, images)), attention_maps(model, images)
    assert content['leftOut'] == ['blocks_token_only.0.attn', 'blocks_token_only.1.attn']
    for layer in content['layers']:
        probs = expected[layer['name']][0]
        assert layer['least'] == pytest.approx(probs.min().item()) and probs.min() < 0
        assert relative_errors(probs_in(layer, 'attention'), probs.clamp(min=0).double()).max() <= 1 / 255 + 1e-6


def test_pooled_keys_and_queries():
    """PVT: each query, of a finer grid, lies between the rows of its keys. Hiera: in the middle of those it pools."""
    model, images = made('pvt_v2_b0')
    layers, expected = unpack(page_of(model, images))['layers'], attention_maps(model, images)
    assert [layer['name'] for layer in layers] == list(expected)
    for layer, side in zip(layers, (16, 16, 8, 8, 4, 4, 2, 2)):
        assert layer['grid'] == [2, 2] and len(layer['rows']) == len(layer['columns']) == side
        assert layer['rows'] == pytest.approx([(i + 0.5) * 2 / side - 0.5 for i in range(side)])
        assert (
            relative_errors(probs_in(layer, 'attention'), expected[layer['name']][0].double()).max() <= 1 / 255 + 1e-6
        )
    model = timm.create_model('hiera_tiny_224', img_size=128, stages=(1, 1, 1, 1), embed_dim=24).eval()
    content = unpack(page_of(model, images_of(1, size=128)))
    assert [layer['grid'] for layer in content['layers'][:2]] == [[32, 32], [32, 32]] and content['grid'] == [32, 32]
    pooled = content['layers'][1]
    assert pooled['rows'] == pooled['columns'] == [0.5 + 2 * i for i in range(16)]
    for number, keys in enumerate(pooled['keys']):
        row, column = (pooled[axis][at] for axis, at in zip(('rows', 'columns'), divmod(number, 16)))
        first = [8 * int(at // 8) for at in (row, column)]
        assert sorted(keys) == [32 * (first[0] + i) + first[1] + j for i in range(8) for j in range(8)]
    assert probs_in(pooled, 'attention').sum(-1) == pytest.approx(1, abs=0.01)


class PooledInRows(torch.nn.Module):
    """Attention to keys that are pooled in the order of tokens, as NextViT's: they are no patches of a grid."""

    def __init__(self):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 4, 4, 4)

    def forward(self, images):
        tokens = self.patches(images).flatten(2)
        keys = torch.nn.functional.avg_pool1d(tokens, 4).mT[:, None]
        return torch.nn.functional.scaled_dot_product_attention(tokens.mT[:, None], keys, keys)


def test_what_is_no_patches():
    with pytest.raises(ValueError, match='no attention of a PooledInRows is between all patches of a grid'):
        page_of(PooledInRows(), images_of(1, size=64))
    with pytest.raises(ValueError, match='no attention of a Xcit is between all patches of a grid'):
        page_of(*made('xcit_nano_12_p16_224'))


def test_keyword_arguments_and_a_call():
    """CLIP: the vision tower alone, of keyword arguments, and inside of the whole model."""
    transformers = hugging_face_library()
    tower = dict(image_size=SIZE, patch_size=8, hidden_size=24, num_hidden_layers=2, num_attention_heads=3)
    vision = not_small(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**tower, intermediate_size=24)))
    whole = transformers.CLIPModel(transformers.CLIPConfig(vision_config=vision.config.to_dict()))
    whole.vision_model.load_state_dict(getattr(vision, 'vision_model', vision).state_dict())
    images = images_of(2, size=SIZE)
    call = lambda model, images: model.get_image_features(pixel_values=images)  # noqa: E731
    pages = [
        unpack(page_of(vision, images)),
        unpack(explorer_page(vision, dict(pixel_values=images), pictures_of(images))),
    ]
    pages.append(unpack(page_of(whole, images, call=call)))
    for page in pages:
        for layer, probs in zip(page['layers'], attention_maps(vision, images).values()):
            assert layer['others'][0] in ('cls', 'extra 1') and layer['grid'] == [4, 4]
            for image in range(2):
                check(layer, probs[image], image)


def test_text_is_refused():
    transformers = hugging_face_library()
    size = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=24)
    model, images = transformers.BertModel(transformers.BertConfig(**size)), images_of(1)
    with pytest.raises(ValueError, match=r'no page of a BertModel with images=.*\(1, 3, 16, 16\)'):
        page_of(model, images)
    with pytest.raises(ValueError, match='no attention of a BertModel is between all patches of a grid'):
        explorer_page(model, dict(input_ids=torch.ones(1, 5, dtype=torch.long)), pictures_of(images))
