"""The attention of other libraries' transformers: that which they compute, where their windows are."""

import inspect
import math
from contextlib import ExitStack

import pytest
import timm
import torch
from helpers.vits import OF_MMPRETRAIN, OF_TIMM, OTHERS, SETTINGS, new_vit, not_small, output_of, small_vit
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attncnn_plugin.analysis import head_report, mean_attention
from attncnn_plugin.analysis.layer_maps import shown_layers
from attncnn_plugin.analysis.observed_attention import observed_attention
from attncnn_plugin.pruning import prunable_heads, prune_heads
from attncnn_plugin.transformers.adapters import ADAPTERS, Attention, adapter_of
from attncnn_plugin.transformers.attention import TokenPlaces, visit_vit_attention, visited_attention

VIT, BEIT, SWIN = 'vit_tiny_patch16_224', 'beit_base_patch16_224', 'swin_tiny_patch4_window7_224'
UNSEEN = 'cait_xxs24_224', 'VisionTransformer', 'DeiT3'  # in tests of their own


def own_attention(model, images):
    """The probabilities that go through each module's ``attn_drop`` where the library has no fused kernel."""
    found, handles = {}, []
    for name, layer in shown_layers(model).items():
        if isinstance(layer.attn_drop, nn.Module):
            fused, layer.fused_attn = getattr(layer, 'fused_attn', None), False
            keep = lambda _, args, name=name: found.update({name: args[0]})  # noqa: E731
            handles.append((layer.attn_drop.register_forward_pre_hook(keep), layer, fused))
    output_of(model, images)
    for handle, layer, fused in handles:
        handle.remove()
        layer.fused_attn = fused
    return found


def test_every_class_is_tested():
    models = [new_vit(name, **SETTINGS[name]) for name in SETTINGS]
    tested = {adapter_of(module) for model in models for module in model.modules()}
    ours = [adapter for name, adapter in ADAPTERS.items() if not name.startswith('tests.')]
    assert ours and all(adapter in tested for adapter in ours)


@pytest.mark.parametrize('name', [name for name in (*OF_TIMM, *OF_MMPRETRAIN, *OTHERS) if name not in UNSEEN])
@torch.no_grad()
def test_probabilities_are_those_of_the_library(name):
    """To 1e-12 in float64, where the tokens are said to be; the model stays as it was."""
    model, images = small_vit(name).double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected, found, seen, output = own_attention(model, images), {}, {}, output_of(model, images)
    with ExitStack() as stack:
        for layer_name, layer in shown_layers(model).items():
            stack.enter_context(
                visited_attention(Attention(layer), lambda own, _, name=layer_name: found.update({name: own}))
            )
        output_of(model, images)
    assert list(found) == list(expected) == list(shown_layers(model))
    visit_vit_attention(model, images, lambda name, probs, places: seen.update({name: (probs, places)}))
    for layer_name, (probs, places) in seen.items():
        torch.testing.assert_close(found[layer_name], expected[layer_name], rtol=1e-12, atol=1e-13)
        assert torch.equal(probs, found[layer_name])
        assert places.windows is not None or math.prod(places.grid) + places.prefix == probs.shape[-1]
    assert torch.equal(output_of(model, images), output)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize('qk_scale', [None, 0.1])
@torch.no_grad()
def test_probabilities_of_a_function(qk_scale):
    """mmpretrain's has no place where they can be seen: P·V is what the output map gets."""
    utils = pytest.importorskip('mmpretrain.models.utils')
    attention = Attention(utils.MultiheadAttention(24, 3, qk_scale=qk_scale).double().eval())
    x, probs, inputs = torch.randn(2, 7, 24, dtype=torch.float64), [], []
    attention.output.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with visited_attention(attention, lambda own, _: probs.append(own)):
        attention.module(x)
    value = attention.queries_keys_values(x, {})[2]
    torch.testing.assert_close((probs[0] @ value).transpose(1, 2).flatten(2), inputs[0], rtol=1e-12, atol=1e-12)


def test_probabilities_of_the_class_token():
    model, found = small_vit('cait_xxs24_224').double(), []
    attention = model.blocks_token_only[0].attn
    attention.fused_attn = False
    attention.attn_drop.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    with visited_attention(Attention(attention), lambda own, _: found.append(own)):
        model(torch.randn(2, 3, 32, 32, dtype=torch.float64))
    assert found[1].shape == (2, 3, 1, 17)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-13)


def test_heads_that_share_keys():
    name = 'vit_base_patch16_sapiens2'
    if not timm.is_model(name):
        pytest.skip(f'timm {timm.__version__} has no such model')
    settings = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=6, num_kv_heads=(6, 2), num_classes=0)
    model, images = not_small(timm.create_model(name, **settings)).double(), torch.randn(2, 3, 32, 32).double()
    expected, found = own_attention(model, images), {}
    visit_vit_attention(model, images, lambda name, probs, places: found.update({name: probs}))
    for layer, probs in expected.items():
        torch.testing.assert_close(found[layer], probs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize('kind', ['float', 'bool', 'causal'])
def test_masks(kind):
    attention = small_vit(VIT).double().blocks[0].attn
    if kind != 'float' and 'is_causal' not in inspect.signature(type(attention).forward).parameters:
        pytest.skip(f'timm {timm.__version__} adds bools to the scores')
    attention.fused_attn, found = False, []
    seen = torch.ones(5, 5, dtype=torch.bool).tril() if kind == 'causal' else torch.rand(5, 5) > 0.4
    seen.fill_diagonal_(True)
    mask = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~seen, -torch.inf) if kind == 'float' else seen
    attention.attn_drop.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    with visited_attention(Attention(attention), lambda own, _: found.append(own)):
        attention(torch.randn(2, 5, 24).double(), **{'is_causal': True} if kind == 'causal' else {'attn_mask': mask})
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-13)
    assert not found[1][..., ~seen].any()


def build_swin(kind, pixels, window):
    if kind == 'timm':
        settings = dict(embed_dim=4, depths=(2,), num_heads=(2,), window_size=window, strict_img_size=False)
        model = timm.create_model(SWIN, img_size=pixels, always_partition=pixels[0] > pixels[1], **settings)
        return model, [block.attn for block in model.layers[0].blocks]
    settings = dict(arch=dict(embed_dims=4, depths=[2], num_heads=[2]), img_size=pixels, window_size=window)
    build = pytest.importorskip('mmpretrain').registry.MODELS.build
    model = build(dict(type='mmpretrain.SwinTransformer', out_indices=(0,), pad_small_map=True, **settings))
    return model, [block.attn.w_msa for block in model.stages[0].blocks]


@given(rows=st.integers(2, 9), columns=st.integers(2, 9), window=st.integers(2, 4))
@pytest.mark.parametrize('kind', ['timm', 'mmpretrain'])
@torch.no_grad()
def test_windows(kind, rows, columns, window):
    """They are those that the library cuts a grid of its tokens' numbers into, with its masks, shifts and padding."""
    model, modules = build_swin(kind, (4 * rows, 4 * columns), window)
    images, found, cut = torch.randn(2, 3, 4 * rows, 4 * columns), [], []
    visit_vit_attention(model, images, lambda name, probs, places: found.append(places))
    numbers = torch.arange(1.0, rows * columns + 1)  # padding is 0
    for module in modules:
        module.forward = lambda x, mask=None: cut.append((x[..., 0].long(), mask)) or x
    for number in range(2):
        if kind == 'timm':
            model.layers[0].blocks[number]._attn(numbers.view(1, rows, columns, 1))
        else:
            model.stages[0].blocks[number].attn(numbers[None, :, None], (rows, columns))
    for places, (windows, mask) in zip(found, cut):
        assert places.grid == (rows, columns) and torch.equal((places.windows + 1) % (rows * columns + 1), windows)
        assert places.masked is None if mask is None else torch.equal(places.masked, mask < 0)


def test_padding_of_windows_is_left_out():
    """5x5 tokens in windows of 4: the last windows have three rows or columns of padding, which attention goes to."""
    model = timm.create_model(SWIN, img_size=20, embed_dim=4, depths=(1,), num_heads=(1,), window_size=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    (maps,) = mean_attention(model, torch.randn(1, 3, 20, 20)).values()
    assert torch.allclose(maps.probs[0].sum(1), torch.ones(25))
    inside = (16 * 1 + 2 * 4 * 1 / 4 + 1 / 16) / 25  # of whole windows, of those with 4 of 16 tokens, of that with one
    assert maps.prefix_mass.item() == pytest.approx(1 - inside, abs=1e-6)


def test_places_of_windows():
    """Each query's keys are those of its window, wherever they lie in the image."""
    windows = torch.tensor([[3, 0], [2, 4], [1, 4]])  # 4 is padding
    probs = torch.rand(2 * 3, 1, 2, 2).softmax(-1)
    places = TokenPlaces((2, 2), windows=windows)
    own, left_out = places.of_patches(probs)
    own = places.on_grid(own)
    for image in range(2):
        first, second, third = probs[3 * image : 3 * image + 3, 0]
        expected = torch.zeros(4, 4)
        expected[3, 3], expected[3, 0], expected[0, 3], expected[0, 0] = *first[0], *first[1]
        expected[2, 2] = expected[1, 1] = 1
        assert torch.allclose(own[image, 0], expected)
        assert left_out[image].item() == pytest.approx((second[0, 1] + third[0, 1]).item() / 4)


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'swin_tiny_patch4_window7_224'])
def test_pruned_heads(name):
    """A layer without any heads is its bias; the others are as they are."""
    model, images = small_vit(name), torch.randn(2, 3, 32, 32)
    first, *others = shown_layers(model)
    prune_heads(model, {first: [0, 1, 2], others[0]: [1]}, allow_empty=True)
    maps = mean_attention(model, images)
    assert [len(maps[name].probs) for name in (first, *others)] == [0, 2] + [3] * (len(others) - 1)
    assert [report.num_heads for report in head_report(model, images).layers] == [0, 2] + [3] * (len(others) - 1)


@pytest.mark.parametrize('name', [VIT, 'sa_learned_content_cifar'])
def test_compiled_models(name):
    """That have run on such images already."""
    model = small_vit(VIT) if name == VIT else timm.create_model(name, embed_dim=12, depth=1, num_heads=3).eval()
    images, layers = torch.randn(1, 3, 32, 32), prunable_heads(model)
    expected = mean_attention(model, images)
    model.compile(backend='eager')
    with torch.no_grad():
        model(images)
        with observed_attention(layers) as observed:
            model(images)
    for compiled in (model, torch.compile(model, backend='eager')):
        found = mean_attention(compiled, images)
        assert all(compiled.get_submodule(layer).num_heads == 3 for layer in found)
        assert all(torch.equal(own.probs, maps.probs) for own, maps in zip(found.values(), expected.values()))
    for layer, maps in expected.items():
        assert observed[layer].mean('entropy').shape == maps.probs.shape[:1]


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'swin_tiny_patch4_window7_224', 'VisionTransformer'])
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_models_in_half_precision(name, dtype):
    """Their rows add up to 1 as well as they can; tokens are counted exactly, however many there are."""
    model, images = small_vit(name), torch.randn(1, 3, 32, 32)
    expected = mean_attention(model, images)
    for name, own in mean_attention(model.to(dtype), images).items():
        assert own.probs.dtype == torch.float and torch.allclose(own.probs.sum(-1), torch.ones(()), atol=1e-5)
        assert (own.probs - expected[name].probs).abs().max() < 0.3  # the weights are rounded


def test_what_cannot_be_shown():
    with pytest.raises(ValueError, match='of type ResNet, has no attention layers .* and is no vision transformer'):
        shown_layers(timm.create_model('resnet18'))
    with pytest.raises(ValueError, match=r'gives no grid of at least 2 patches for these images: its grid is \(1, 1\)'):
        mean_attention(small_vit(VIT, patch_size=32), torch.randn(1, 3, 32, 32))
    twice = small_vit(VIT)
    twice.blocks[1].attn = twice.blocks[0].attn
    with pytest.raises(ValueError, match='blocks.0.attn of a VisionTransformer runs 2 times, but once was needed'):
        mean_attention(twice, torch.randn(1, 3, 32, 32))
    with pytest.raises(ValueError, match='images=<Tensor of shape .*> are none, but at least one is needed'):
        head_report(small_vit(VIT), torch.randn(0, 3, 32, 32))
    model = small_vit('vit_tiny_patch16_224')
    torch.nn.init.constant_(model.blocks[1].attn.qkv.weight, float('nan'))
    with pytest.raises(ValueError, match='the probabilities of blocks.1.attn are not finite: the parameters of model'):
        mean_attention(model, torch.randn(1, 3, 32, 32))


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation gives."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize('function', [mean_attention, head_report])
def test_memory_of_windows(function):
    """Nothing between all patches is there for several images at once: of 16x16 in windows of 4."""
    model = timm.create_model(SWIN, img_size=64, embed_dim=4, depths=(2,), num_heads=(4,), window_size=4)
    with LargestTensor() as mode:
        function(model, torch.randn(4, 3, 64, 64))
    assert mode.largest == 4 * 256**2


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'swin_tiny_patch4_window7_224'])
def test_images_in_a_pass(name):
    model, images, passes = small_vit(name), torch.randn(5, 3, 32, 32), []
    model.patch_embed.register_forward_pre_hook(lambda _, args: passes.append(len(args[0])))
    means = mean_attention(model, images)
    assert passes == [4, 1]
    of_images = [mean_attention(model, image[None]) for image in images]
    for layer, own in means.items():
        assert torch.allclose(own.probs, sum(maps[layer].probs for maps in of_images) / 5, atol=1e-6)
        assert own.probs.shape[1:] == (math.prod(own.grid),) * 2


def test_criteria_of_pruning_in_half_precision():
    """They ask for distances, which PyTorch has not in bfloat16."""
    model, images, means = small_vit('swin_tiny_patch4_window7_224'), torch.randn(2, 3, 32, 32), []
    for dtype in (torch.float, torch.bfloat16):
        model, images = model.to(dtype), images.to(dtype)
        with torch.no_grad(), observed_attention(prunable_heads(model)) as observed:
            model(images)
        means.append(observed['layers.0.blocks.0.attn'].mean('distances'))
    assert torch.allclose(*means, atol=0.1) and means[1].max() > 0.1
