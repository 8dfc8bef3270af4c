"""The attention of other libraries' transformers: that which they compute, where their windows are."""

import math

import pytest
import timm
import torch
from helpers.vits import OF_MMPRETRAIN, OF_TIMM, output_of, small_vit
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attncnn_plugin.analysis import (
    attention_probs_of,
    content_only_probs_of,
    grid_of,
    grids_of,
    mean_attention_probs_of,
    model_reports,
    position_only_probs_of,
    shown_layers,
    vit_attention,
    vit_reports,
)
from attncnn_plugin.analysis.observed_attention import observed_attention
from attncnn_plugin.pruning import prunable_heads, prune_heads
from attncnn_plugin.transformers.attention import TokenPlaces, visit_vit_attention
from attncnn_plugin.transformers.adapters import Attention


def run_attention(model, images):
    """The inputs of each attention and of its output map, in a pass as the model makes it, and the model's output."""
    inputs, outputs, handles = {}, {}, []
    for name, layer in shown_layers(model).items():
        keep = [(layer, inputs), (layer.proj, outputs)]
        handles += [
            module.register_forward_pre_hook(lambda _, args, name=name, store=store: store.update({name: args[0]}))
            for module, store in keep
        ]
    with torch.no_grad():
        output = output_of(model, images)
    for handle in handles:
        handle.remove()
    return inputs, outputs, output


@pytest.mark.parametrize('name', [*OF_TIMM, *OF_MMPRETRAIN])
def test_probabilities_are_those_of_the_fused_attention(name):
    """P·V of what is shown is what the model's own, fused, attention gives; and the model stays as it was."""
    model, images = small_vit(name).double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    inputs, outputs, output = run_attention(model, images)
    found = {}
    visit_vit_attention(model, images, lambda name, probs, places: found.update({name: (probs, places)}))
    assert list(found) == list(shown_layers(model)) == list(inputs)
    for layer_name, (probs, places) in found.items():
        attention = Attention(shown_layers(model)[layer_name])
        values = torch.einsum('bnd,hed->bhne', inputs[layer_name], attention.weight('v'))
        if attention.bias('v') is not None:
            values = values + attention.bias('v')[:, None]
        given = (probs.double() @ values).transpose(1, 2).flatten(2)
        expected = outputs[layer_name]
        if isinstance(getattr(attention.module, 'norm', None), torch.nn.LayerNorm):
            given = attention.module.norm(given)
        assert torch.allclose(given, expected.reshape(given.shape), atol=1e-4 * expected.abs().max().item())
        assert places.grid[0] * places.grid[1] + places.prefix == probs.shape[-1] or places.windows is not None
    assert torch.equal(run_attention(model, images)[2], output)


def same_region(at, other, length, window, shift):
    """Whether two places of an axis are in one window of a Swin transformer, and not on two sides of its border."""
    rolled = [(place - shift) % length for place in (at, other)]
    regions = [sum(place >= border for border in (length - window, length - shift)) if shift else 0 for place in rolled]
    return rolled[0] // window == rolled[1] // window and regions[0] == regions[1]


@given(rows=st.integers(1, 3), columns=st.integers(1, 3), window=st.integers(2, 4))
@pytest.mark.parametrize('kind', ['timm', 'mmpretrain'])
def test_windows(kind, rows, columns, window):
    """Of uniform attention each query sees the tokens of its window alike, on the grid of the image."""
    size = (rows * window, columns * window)
    pixels = tuple(4 * n for n in size)
    if kind == 'timm':
        model = timm.create_model(
            'swin_tiny_patch4_window7_224',
            img_size=pixels,
            embed_dim=4,
            depths=(2,),
            num_heads=(2,),
            window_size=window,
        )
    else:
        registry = pytest.importorskip('mmpretrain').registry
        arch = dict(embed_dims=4, depths=[2], num_heads=[2])
        model = registry.MODELS.build(
            dict(
                type='mmpretrain.SwinTransformer',
                arch=arch,
                img_size=pixels,
                window_size=window,
                out_indices=(0,),
                pad_small_map=True,
            )
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found, left_out = vit_attention(model, torch.randn(1, 3, *pixels))
    assert grid_of(model, torch.randn(1, 3, *pixels)) == size
    for (name, probs), shift in zip(found.items(), (0, window // 2)):
        axes = []
        for length in size:
            # A grid of a single window is not shifted, by mmpretrain if one of the two axes is.
            alone = (
                length == window
                if kind == 'timm'
                else min(size) == window and not model.stages[0].blocks[0].attn.pad_small_map
            )
            own = 0 if alone else shift
            axes.append([[same_region(a, b, length, window, own) for b in range(length)] for a in range(length)])
        together = torch.einsum('ab,cd->acbd', *(torch.tensor(axis).double() for axis in axes))
        together = together.reshape(math.prod(size), -1)
        expected = together / together.sum(1, keepdim=True)
        assert torch.allclose(probs[0].double(), expected.expand(2, -1, -1), atol=1e-6)
        assert torch.allclose(left_out[name], torch.zeros(1, 2), atol=1e-6)


def test_padding_of_windows_is_left_out():
    """5x5 tokens in windows of 4: the last windows have three rows or columns of padding, which attention goes to."""
    model = timm.create_model(
        'swin_tiny_patch4_window7_224', img_size=20, embed_dim=4, depths=(1,), num_heads=(1,), window_size=4
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found, left_out = vit_attention(model, torch.randn(1, 3, 20, 20))
    (probs,), (mass,) = found.values(), left_out.values()
    assert torch.allclose(probs[0, 0].sum(1), torch.ones(25))
    inside = (16 * 1 + 2 * 4 * 1 / 4 + 1 / 16) / 25  # of whole windows, of those with 4 of 16 tokens, of that with one
    assert mass.item() == pytest.approx(1 - inside, abs=1e-6)


def test_places_of_windows():
    """Each query's keys are those of its window, wherever they lie in the image."""
    windows = torch.tensor([[3, 0], [2, 4], [1, 4]])  # 4 is padding
    probs = torch.rand(2 * 3, 1, 2, 2).softmax(-1)
    own, left_out = TokenPlaces((2, 2), windows=windows).between_patches(probs)
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
    probs = mean_attention_probs_of(model, images)
    assert [len(probs[name]) for name in (first, *others)] == [0, 2] + [3] * (len(others) - 1)
    assert [report.num_heads for report in model_reports(model, images)] == [0, 2] + [3] * (len(others) - 1)


@pytest.mark.parametrize('name', ['beit_base_patch16_224', 'swin_tiny_patch4_window7_224'])
def test_one_way_for_all_models(name):
    """The functions for this package's models take the others too."""
    model, images = small_vit(name), torch.randn(3, 3, 32, 32)
    probs, _ = vit_attention(model, images)
    means = mean_attention_probs_of(model, images)
    assert means.keys() == probs.keys() == shown_layers(model).keys() == grids_of(model, images).keys()
    for name, (height, width) in grids_of(model, images).items():
        assert torch.allclose(means[name], probs[name].mean(0), atol=1e-6)
        assert means[name].shape[1:] == (height * width, height * width)
    assert model_reports(model, images) == vit_reports(model, images)
    for some, size in ((None, (4, 4)), (images, (4, 4)), (None, None)):
        with pytest.raises(ValueError, match='which say the grid: give images and no size'):
            model_reports(model, some, size)
    with pytest.raises(ValueError, match='of type ResNet, has no attention layers .* and is no vision transformer'):
        shown_layers(timm.create_model('resnet18'))


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'swin_tiny_patch4_window7_224', 'VisionTransformer'])
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_models_in_half_precision(name, dtype):
    """Their rows add up to 1 as well as they can; tokens are counted exactly, however many there are."""
    model, images = small_vit(name), torch.randn(1, 3, 32, 32)
    expected = mean_attention_probs_of(model, images)
    found = mean_attention_probs_of(model.to(dtype), images.to(dtype))
    for layer, probs in found.items():
        assert probs.dtype == torch.float and torch.allclose(probs.sum(-1), torch.ones(()), atol=1e-5)
        assert (probs - expected[layer]).abs().max() < 0.3  # the weights are rounded


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_windows_in_half_precision(dtype):
    """56x56 tokens, more than half precision counts."""
    model = timm.create_model(
        'swin_tiny_patch4_window7_224', img_size=224, embed_dim=4, depths=(2,), num_heads=(1,), window_size=7
    )
    windows = []
    for model_dtype in (torch.float, dtype):
        own = []
        images = torch.zeros(1, 3, 224, 224, dtype=model_dtype)
        visit_vit_attention(model.to(model_dtype), images, lambda name, probs, places: own.append(places.windows))
        windows.append(torch.stack(own))
    assert torch.equal(*windows)
    assert all(torch.equal(one.flatten().sort()[0], torch.arange(56 * 56)) for one in windows[1])


def test_weights_that_are_not_finite():
    model = small_vit('vit_tiny_patch16_224')
    torch.nn.init.constant_(model.blocks[1].attn.qkv.weight, float('nan'))
    with pytest.raises(ValueError, match='the probabilities of blocks.1.attn are not finite: the parameters of model'):
        vit_attention(model, torch.randn(1, 3, 32, 32))


def test_forward_that_another_set_stays():
    """On the attention of windows, as some libraries do that compute it in their own way."""
    model, images = small_vit('swin_tiny_patch4_window7_224'), torch.randn(1, 3, 32, 32)
    attention = model.layers[0].blocks[0].attn
    own, calls = attention.forward, []
    attention.forward = replaced = lambda *args, **kwargs: calls.append(args) or own(*args, **kwargs)
    vit_attention(model, images)
    assert attention.__dict__.get('forward') is replaced and len(calls) == 1
    assert 'forward' not in model.layers[0].blocks[1].attn.__dict__


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation gives."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize('function', [mean_attention_probs_of, vit_reports])
def test_memory_of_windows(function):
    """Nothing between all patches is there for several images at once: of 16x16 in windows of 4."""
    model = timm.create_model(
        'swin_tiny_patch4_window7_224', img_size=64, embed_dim=4, depths=(2,), num_heads=(4,), window_size=4
    )
    with LargestTensor() as mode:
        function(model, torch.randn(4, 3, 64, 64))
    assert mode.largest == 4 * 256**2


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'swin_tiny_patch4_window7_224'])
def test_images_in_a_pass(name):
    model, images, passes = small_vit(name), torch.randn(5, 3, 32, 32), []
    model.patch_embed.register_forward_pre_hook(lambda _, args: passes.append(len(args[0])))
    expected = mean_attention_probs_of(model, images)
    found = mean_attention_probs_of(model, images, batch_size=2)
    assert passes == [5, 2, 2, 1]
    for layer, probs in expected.items():
        assert torch.allclose(found[layer], probs, atol=1e-6)


def test_criteria_of_pruning_in_half_precision():
    """They ask for distances, which PyTorch has not in bfloat16."""
    model, images, means = small_vit('swin_tiny_patch4_window7_224'), torch.randn(2, 3, 32, 32), []
    for dtype in (torch.float, torch.bfloat16):
        model, images = model.to(dtype), images.to(dtype)
        with torch.no_grad(), observed_attention(prunable_heads(model)) as observed:
            model(images)
        means.append(observed['layers.0.blocks.0.attn'].mean('distances'))
    assert torch.allclose(*means, atol=0.1) and means[1].max() > 0.1


def test_parts_of_the_attention_of_other_libraries():
    """They were an empty dict, as of a model of this package whose attention is by position alone."""
    model, images = small_vit('vit_tiny_patch16_224'), torch.randn(1, 3, 32, 32)
    for probs_of in (attention_probs_of, content_only_probs_of, position_only_probs_of):
        with pytest.raises(ValueError, match='type VisionTransformer, has no attention of this package: .* by vit_att'):
            probs_of(model, images)
