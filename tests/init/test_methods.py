"""The rival starts, values, shifts, and the report."""

import pytest
import torch
from helpers.starts import attention_of, gaussian, small_vit
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attncnn_plugin.init import init_as_convolution, random_images, sine_cosine_embedding


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


def test_impulses_need_positions():
    with pytest.raises(ValueError, match="'impulse' needs an embedding of absolute positions, and blocks.0.attn"):
        init_as_convolution(small_vit('beit_base_patch16_224'), method='impulse')


def test_identity():
    """What a layer of relative tables adds is the shifted tokens, channel groups by their head."""
    model = small_vit('vit_relpos_small_patch16_224', (4, 5), init_values=None).eval()
    report = init_as_convolution(model, alpha=1.0, values='identity')
    for layer, block in zip(report.layers, model.blocks):
        tokens = torch.randn(2, 20, 32).double()
        expected = torch.cat([gaussian(h.shift, 1.0, (4, 5)) @ x for h, x in zip(layer.heads, tokens.chunk(2, -1))], -1)
        assert torch.allclose(block.attn(tokens), expected, atol=1e-6)


@given(st.sampled_from([(1, 3), (3, 1)]), st.integers(0, 99))
def test_values_of_a_convolution(kernel_size, seed):
    """With three heads as wide as the rank of the matrices, and hard ones, a layer is the convolution inside."""
    torch.manual_seed(seed)
    model = small_vit('vit_relpos_small_patch16_224', (4, 5), embed_dim=24, num_heads=3, init_values=None, depth=1)
    model.eval()  # the MLP has dropout
    conv = nn.Conv2d(24, 24, kernel_size, padding='same').double()
    with torch.no_grad():
        low = torch.randn(24, 8, *kernel_size).double()
        conv.weight.copy_(torch.einsum('ormn,rimn->oimn', low, torch.randn(8, 24, *kernel_size).double()))
    report = init_as_convolution(model, kernel_size, alpha=60.0, shifts='in turn', values=conv)
    assert report.layers[0].value_error < 1e-7 and 'values' in str(report)
    tokens = torch.randn(2, 4, 5, 24).double()
    found = model.blocks[0].attn(tokens.flatten(1, 2)).unflatten(1, (4, 5))
    expected = conv(tokens.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    inside = (slice(None), slice(1, -1), slice(None)) if kernel_size == (3, 1) else (slice(None),) * 2 + (slice(1, -1),)
    assert torch.allclose(found[inside], expected[inside], atol=1e-6)


def test_values_of_a_convolution_of_full_rank():
    """‖W − W'‖/‖W‖ by Eckart-Young, for the positions that heads look at and those that they do not."""
    model = small_vit('vit_relpos_small_patch16_224', depth=1)
    conv = nn.Conv2d(32, 32, 3).double()
    report = init_as_convolution(model, shifts='in turn', values=conv)
    parts = torch.linalg.svdvals(conv.weight.detach().permute(2, 3, 0, 1)).flatten(0, 1).square()
    left = parts.sum() - parts[:2, :16].sum()  # heads 0 and 1 look at the first two positions
    assert report.layers[0].value_error == pytest.approx((left / parts.sum()).sqrt().item())


@pytest.mark.parametrize(
    'name, directions',
    [('vit_tiny_patch16_224', 10), ('vit_small_patch16_dinov3', 1), ('vit_relpos_small_patch16_224', 0)],
)
def test_the_error_is_that_of_the_weights_at_the_end(name, directions):
    """Of a convolution that the values could be, the directions of the positions are taken out of the outputs."""
    torch.manual_seed(0)
    model = small_vit(name, embed_dim=96, depth=1)
    conv = nn.Conv2d(96, 96, 1).double()
    with torch.no_grad():
        conv.weight.copy_(nn.init.orthogonal_(torch.empty(96, 96)).view(96, 96, 1, 1))
    report = init_as_convolution(model, kernel_size=1, values=conv)
    value, output = model.blocks[0].attn.qkv.weight[-96:], model.blocks[0].attn.proj.weight
    error = (output @ value - conv.weight[:, :, 0, 0]).norm() / conv.weight.norm()
    assert report.layers[0].value_error == pytest.approx(error.item(), abs=1e-6)
    assert error.item() == pytest.approx((directions / 96) ** 0.5, abs=1e-6)


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(method='conv'), "method='conv' must be one of"),
        (dict(alpha=0), 'alpha=0 must be a number above 0'),
        (dict(alpha=float('inf')), 'alpha=inf must be a number above 0'),
        (dict(kernel_size=0), 'kernel_size=0 must be a whole number'),
        (dict(kernel_size=(3, 3, 3)), r'kernel_size=\(3, 3, 3\) must be'),
        (dict(shifts='all'), "shifts='all' must be one of"),
        (dict(embedding='cosine'), "embedding='cosine' must be one of"),
        (dict(values='zero'), "values='zero' must be one of"),
        (dict(values=nn.Conv2d(3, 3, 3)), 'must be a convolution from 32 to 32 channels'),
        (dict(values=nn.Conv2d(32, 32, 1)), r'has no matrix for a head of .* that looks at shift'),
        (dict(method='mimetic', values=nn.Conv2d(32, 32, 3)), 'for heads with shifts'),
        (dict(layers='layers.*'), r"layers='layers.\*' matches none of blocks.0.attn, blocks.1.attn, blocks.2.attn"),
    ],
)
def test_impossible_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        init_as_convolution(small_vit(), **arguments)


def test_shifts_in_turn():
    """All nine positions, head after head and layer after layer."""
    report = init_as_convolution(small_vit(num_heads=4, depth=5), shifts='in turn')
    found = [head.shift for layer in report.layers for head in layer.heads]
    kernel = [(row, column) for row in (-1.0, 0.0, 1.0) for column in (-1.0, 0.0, 1.0)]
    assert found == (3 * kernel)[:20]


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
    images = random_images(model, number=50)
    assert images.shape == (50, 3, 64, 96) and images.dtype == torch.float64
    assert images.mean().item() == pytest.approx(0, abs=1e-6) and images.std().item() == pytest.approx(1, abs=1e-6)
    amplitude = torch.fft.fft2(images).abs().square().mean((0, 1)).sqrt()
    assert (amplitude[4, 0] / amplitude[16, 0]).item() == pytest.approx(4, rel=0.3)
    assert torch.equal(images, random_images(model, number=50)) and not torch.equal(
        images, random_images(model, number=50, seed=1)
    )


def test_the_model_is_as_it_was_otherwise():
    """Modes, fused attention and hooks."""
    model = small_vit(pos_drop_rate=0.5, attn_drop_rate=0.5).train()
    fused = [block.attn.fused_attn for block in model.blocks]
    init_as_convolution(model)
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())
    assert [block.attn.fused_attn for block in model.blocks] == fused
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_given_images():
    """The start is calibrated on them: images of twice the contrast have the same attention."""
    model = small_vit()
    images = 3 * random_images(model)
    report = init_as_convolution(model, images=images)
    (first, *_) = attention_of(model, images)
    own = first[:, 0, 1:, 1:] / first[:, 0, 1:, 1:].sum(-1, keepdim=True)
    head = report.layers[0].heads[0]
    found = (own - gaussian(head.shift, 2.0, (3, 4))).abs().sum(-1).mean().item() / 2
    assert head.total_variation == pytest.approx(found, abs=1e-6) and found < 0.2


@pytest.mark.parametrize('pixels', [12, 24])
@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'eva02_tiny_patch14_224'])
def test_images_of_another_size(name, pixels):
    """Their grid is not that of the positions that are set, even if the model takes them."""
    model = small_vit(name, (4, 4), dynamic_img_size=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    message = rf'images of shape \(2, 3, {pixels}, {pixels}\) have {pixels // 4}×{pixels // 4} patches, but .* 4×4'
    with pytest.raises(ValueError, match=message):
        init_as_convolution(model, images=torch.randn(2, 3, pixels, pixels).double())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize('method', ['gaussian', 'impulse', 'mimetic'])
def test_an_error_leaves_the_model_as_it_was(method):
    model = small_vit()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError):  # patches have three channels
        init_as_convolution(model, method=method, images=random_images(model)[:, :2])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
