"""The attention of other libraries' transformers: that which they compute, where their windows are."""

import math

import pytest
import timm
import torch
from helpers.vits import OF_MMPRETRAIN, OF_TIMM, OTHERS, not_small, output_of, own_attention, small_vit
from hypothesis import given
from hypothesis import strategies as st
from timm.models.swin_transformer import WindowAttention
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attncnn_plugin import attention_maps
from attncnn_plugin.analysis import head_report, mean_attention
from attncnn_plugin.pruning import prunable_heads
from attncnn_plugin.pruning.degenerate import observed_attention

UNSEEN = 'VisionTransformer', 'DeiT3'  # whose dropout is no module
VIT, SWIN = 'vit_tiny_patch16_224', 'swin_tiny_patch4_window7_224'


def own_windows(block, grid):
    """The numbers of the tokens in each window, from 1, as the library cuts a grid of them; 0 is padding."""
    cut, module = [], getattr(block.attn, 'w_msa', block.attn)
    numbers = torch.arange(1.0, math.prod(grid) + 1)
    module.forward = lambda x, mask=None: cut.append(x[..., 0].long()) or x
    if module is block.attn:
        (block._attn if hasattr(block, '_attn') else block._shifted_window_attn)(numbers.view(1, *grid, 1))
    else:
        block.attn(numbers[None, :, None], grid)
    del module.forward
    return cut[0]


def on_grid(probs, windows, patches):
    """The probabilities of windows, ``(B·windows, N_h, M, M)``, between all patches."""
    images = len(probs) // len(windows)
    whole = probs.new_zeros(images, probs.shape[1], patches + 1, patches + 1)
    for image, own in enumerate(probs.unflatten(0, (images, -1))):
        for window, of_window in zip(windows, own):
            whole[image, :, window[:, None], window] = of_window
    return whole[:, :, 1:, 1:]


@pytest.mark.parametrize('name', [name for name in (*OF_TIMM, *OF_MMPRETRAIN, *OTHERS) if name not in UNSEEN])
def test_probabilities_are_those_of_the_library(name):
    """To 1e-12 in float64, where the tokens are said to be; the model stays as it was."""
    model, images = small_vit(name).double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected, output, maps = own_attention(model, images), output_of(model, images), attention_maps(model, images)
    assert list(maps) == list(expected)
    for layer, probs in expected.items():
        if 'swin' in name.lower():
            side = math.isqrt(maps[layer].shape[-1])
            block = model.get_submodule(layer.removesuffix('.w_msa').removesuffix('.attn'))
            probs = on_grid(probs, own_windows(block, (side, side)), side**2)
        torch.testing.assert_close(maps[layer], probs, rtol=1e-12, atol=1e-13)
    assert torch.equal(output_of(model, images), output)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@given(rows=st.integers(2, 9), columns=st.integers(2, 9), window=st.integers(2, 4))
@pytest.mark.parametrize('kind', ['timm', 'mmpretrain'])
def test_windows(kind, rows, columns, window):
    """They are those that the library cuts a grid of its tokens' numbers into, with its masks, shifts and padding."""
    pixels = 4 * rows, 4 * columns
    if kind == 'timm':
        settings = dict(embed_dim=4, depths=(2,), num_heads=(2,), window_size=window, strict_img_size=False)
        model = timm.create_model(SWIN, img_size=pixels, always_partition=rows > columns, **settings)
        blocks = model.layers[0].blocks
    else:
        settings = dict(arch=dict(embed_dims=4, depths=[2], num_heads=[2]), img_size=pixels, window_size=window)
        build = pytest.importorskip('mmpretrain').registry.MODELS.build
        model = build(dict(type='mmpretrain.SwinTransformer', out_indices=(0,), pad_small_map=True, **settings))
        blocks = model.stages[0].blocks
    images = torch.randn(2, 3, *pixels)
    model.eval()  # mmpretrain's gives None
    expected, maps = own_attention(model, images), attention_maps(model, images)
    assert maps.keys() == expected.keys()
    for block, (layer, probs) in zip(blocks, expected.items()):
        whole = on_grid(probs, own_windows(block, (rows, columns)), rows * columns)
        torch.testing.assert_close(maps[layer], whole)


def test_windows_of_other_blocks():
    """Attention of timm's Swin in a block of one's own."""
    cut = nn.Sequential(nn.Unflatten(3, (2, 4)), nn.Unflatten(2, (2, 4)))  # (B, D, 2, 4, 2, 4)
    model = nn.Sequential(nn.Conv2d(3, 24, 4, 4), cut, WindowAttention(24, 3, window_size=(4, 4)))
    cut.register_forward_hook(lambda _, args, x: x.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(0, 2))
    model, windows = not_small(model).double(), torch.arange(1, 65).view(2, 4, 2, 4).transpose(1, 2).reshape(-1, 16)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    layer, probs = next(iter(own_attention(model, images).items()))
    expected = on_grid(probs, windows, 64)
    torch.testing.assert_close(attention_maps(model, images)[layer], expected, rtol=1e-12, atol=1e-13)


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


@pytest.mark.parametrize('name', [VIT, 'sa_learned_content_cifar'])
def test_compiled_models(name):
    """That have run on such images already."""
    model = small_vit(VIT) if name == VIT else timm.create_model(name, embed_dim=12, depth=1, num_heads=3).eval()
    images, layers = torch.randn(1, 3, 32, 32), prunable_heads(model)
    expected = mean_attention(model, images)
    model.compile(backend='eager')
    with torch.no_grad():
        model(images)
        with observed_attention(model, layers) as observed:
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
    assert {probs.dtype for probs in attention_maps(model.to(dtype), images).values()} == {torch.float32}
    for name, own in mean_attention(model, images).items():
        assert own.probs.dtype == torch.float and torch.allclose(own.probs.sum(-1), torch.ones(()), atol=1e-5)
        assert (own.probs - expected[name].probs).abs().max() < 0.3  # the weights are rounded


def test_what_cannot_be_shown():
    with pytest.raises(ValueError, match=r'no .* is between all patches of a grid, .*: its shapes are blocks.0.attn '):
        mean_attention(small_vit(VIT, patch_size=32), torch.randn(1, 3, 32, 32))
    with pytest.raises(ValueError, match='inputs=<Tensor of shape .*> are none, but at least one is needed'):
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
    assert mode.largest <= 4 * 257**2


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
        with torch.no_grad(), observed_attention(model, prunable_heads(model)) as observed:
            model(images)
        means.append(observed['layers.0.blocks.0.attn'].mean('distances'))
    assert torch.allclose(*means, atol=0.1) and means[1].max() > 0.1
