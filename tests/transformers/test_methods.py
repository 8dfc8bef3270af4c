"""Impulses, the mimetic start, shifts, and the report."""

import pytest
import torch
from helpers.starts import gaussian, small_vit
from torch import nn

from attncnn_plugin.transformers import init_as_convolution
from attncnn_plugin.transformers.embeddings import sine_cosine_embedding
from attncnn_plugin.transformers.start import random_images


def products(attention):
    """W^Q W^Kᵀ of each head, and W^V W^O of all, for rows of tokens."""
    queries, keys, values = attention.qkv.weight.detach().unflatten(0, (3, -1))
    heads = [x.unflatten(0, (attention.num_heads, -1)) for x in (queries, keys)]
    return heads[0].mT @ heads[1], values.T @ attention.proj.weight.detach().T


def test_mimetic():
    """2305.09828: 0.7 (Z + I) as near as heads of 16 channels come, and 0.4 (Z − I), with entries of variance 1/D."""
    model = small_vit(embed_dim=96, num_heads=6)
    report = init_as_convolution(model, method='mimetic')
    assert (report.method, report.alpha) == ('mimetic', None) and 'none' in str(report)
    assert all(head.shift is None and head.total_variation is None for layer in report.layers for head in layer.heads)
    assert torch.allclose(model.pos_embed[0, 1:], sine_cosine_embedding((3, 4), 96))
    by_head = []
    for block in model.blocks:
        of_heads, of_values = products(block.attn)
        noise = of_values / 0.4 + torch.eye(96)
        assert noise.mean().item() == pytest.approx(0, abs=0.01)
        assert noise.std().item() == pytest.approx(96**-0.5, rel=0.05)
        for product in of_heads:
            assert torch.linalg.matrix_rank(product, rtol=1e-9) == 16
            values = torch.linalg.svdvals(product)[:16]  # of 0.7 (Z + I): the largest is about 0.7 · 2.3
            assert 0.7 * 1.7 < values[0] < 0.7 * 2.8 and values[-1] > 0.7 * 1.2
            assert product.trace() > 0
            by_head.append(product)
    assert all(not torch.allclose(by_head[0], product) for product in by_head[1:])


def test_impulse():
    """2505.19985: pre-softmax scores of the normalized embedding alone are largest at the impulses."""
    size = (6, 6)
    model = small_vit(size=size, embed_dim=96, num_heads=2)
    report = init_as_convolution(model, method='impulse', seed=1)
    embedding = nn.functional.layer_norm(model.pos_embed[0, 1:].detach(), (96,))
    assert model.pos_embed.std().item() == pytest.approx(0.36, rel=0.05)
    for layer, block in zip(report.layers, model.blocks):
        queries, keys, _ = block.attn.qkv.weight.detach().unflatten(0, (3, 2, 48))
        assert not block.attn.qkv.bias.any()
        for number, head in enumerate(layer.heads):
            for weight in (queries, keys):
                assert weight[number].norm().item() == pytest.approx(7)
            scores = embedding @ queries[number].T @ keys[number] @ embedding.T
            wanted = gaussian(head.shift, 100.0, size)
            exists = torch.tensor(
                [0 <= i + head.shift[0] < 6 and 0 <= j + head.shift[1] < 6 for i in range(6) for j in range(6)]
            )
            assert torch.equal(scores.argmax(1)[exists], wanted.argmax(1)[exists])
        of_values = products(block.attn)[1]
        assert (of_values / 0.4 + torch.eye(96)).std().item() == pytest.approx(96**-0.5, rel=0.05)


@pytest.mark.parametrize('num_heads', [3, 12])
def test_the_released_order_of_impulses(num_heads):
    """Positions 4, 1, 5, 3, 7, 0, 2, 6, 8 of the kernel, the centre first, from the first one again in each layer."""
    report = init_as_convolution(small_vit(embed_dim=48, num_heads=num_heads), method='impulse', seed=3)
    released = [(index // 3 - 1, index % 3 - 1) for index in (4, 1, 5, 3, 7, 0, 2, 6, 8)]
    for layer in report.layers:
        assert [head.shift for head in layer.heads] == (2 * released)[:num_heads]


def test_impulses_of_another_kernel():
    """All positions, the nearest first; those of the released order in the middle of a larger one."""
    report = init_as_convolution(small_vit(num_heads=16, embed_dim=64, depth=1), (2, 4), method='impulse')
    found = [head.shift for head in report.layers[0].heads]
    assert found[:8] == found[8:] and set(found) == {(row, column) for row in (0, 1) for column in (-1, 0, 1, 2)}
    assert found[:4] == [(0, 0), (0, 1), (0, -1), (1, 0)]


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(method='conv'), "method='conv' must be one of"),
        (dict(alpha=0), 'alpha=0 must be a number above 0'),
        (dict(alpha=float('inf')), 'alpha=inf must be a number above 0'),
        (dict(kernel_size=0), 'kernel_size=0 must be a positive integer'),
        (dict(kernel_size=(3, 3, 3)), r'kernel_size=\(3, 3, 3\) must be'),
        (dict(method='impulse'), "needs absolute positions, not relative ones: use 'gaussian' with a large alpha"),
    ],
)
def test_impossible_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        init_as_convolution(small_vit('beit_base_patch16_224'), **arguments)


def test_random_shifts():
    report = init_as_convolution(small_vit(num_heads=4, depth=20), kernel_size=(1, 3))
    found = [head.shift for layer in report.layers for head in layer.heads]
    assert set(found) == {(0.0, -1.0), (0.0, 0.0), (0.0, 1.0)} and all(found.count(shift) > 10 for shift in found)


def test_the_table():
    report = init_as_convolution(small_vit(depth=2))
    lines = str(report).splitlines()
    assert ' '.join(lines[0].split()) == 'layer encoding grid head shift total variation to other tokens'
    assert len(lines) == 5 and lines[1].startswith('blocks.0.attn  absolute  3×4   0')
    for line, head in zip(lines[1:], (head for layer in report.layers for head in layer.heads)):
        assert '({:g}, {:g})'.format(*head.shift) in line and f'{head.total_variation:.2g}' in line


def test_random_images():
    """Mean 0, deviation 1; the amplitude falls as 1/f; of the type and size of the model's own images."""
    model = small_vit(size=(16, 24))
    images = torch.cat([random_images(model, seed=seed) for seed in range(12)])
    assert images.shape == (48, 3, 64, 96) and images.dtype == torch.float64
    mean, deviation = images[:4].mean().item(), images[:4].std().item()
    assert mean == pytest.approx(0, abs=1e-6) and deviation == pytest.approx(1, abs=1e-6)
    amplitude = torch.fft.fft2(images).abs().square().mean((0, 1)).sqrt()
    assert (amplitude[4, 0] / amplitude[16, 0]).item() == pytest.approx(4, rel=0.3)
    assert torch.equal(images[:4], random_images(model)) and not torch.equal(images[:4], images[4:8])


def test_the_model_is_as_it_was_otherwise():
    """Modes, fused attention and hooks."""
    model = small_vit(pos_drop_rate=0.5, attn_drop_rate=0.5).train()
    fused = [block.attn.fused_attn for block in model.blocks]
    init_as_convolution(model)
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())
    assert [block.attn.fused_attn for block in model.blocks] == fused
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize('method', ['impulse', 'mimetic'])
def test_values_of_heads_that_are_too_narrow(method):
    model = small_vit(embed_dim=32, num_heads=2)
    model.blocks[1].attn.qkv, model.blocks[1].attn.proj = nn.Linear(32, 72).double(), nn.Linear(24, 32).double()
    with pytest.raises(ValueError, match='the heads of blocks.1.attn must have 32 channels together, as a token'):
        init_as_convolution(model, method=method)


@pytest.mark.parametrize('method', ['gaussian', 'impulse', 'mimetic'])
def test_an_error_leaves_the_model_as_it_was(method):
    model = small_vit()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.patch_embed.register_forward_hook(lambda module, args, output: output[..., :-1])
    with pytest.raises(RuntimeError):  # tokens have 32 channels
        init_as_convolution(model, method=method)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
