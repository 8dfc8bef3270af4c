"""Vision transformers that start as a convolution: heads by each encoding of positions, and the other methods."""

import copy

import pytest
import timm
import torch
from helpers.small import refused
from helpers.starts import gaussian, small_vit, total_variation
from helpers.vits import own_attention
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attncnn_plugin import attention_maps
from attncnn_plugin.transformers import init_as_convolution, set_sine_cosine_embedding
from attncnn_plugin.transformers.embeddings import sine_cosine_embedding
from attncnn_plugin.transformers.gaussian import log_share_of_peak
from attncnn_plugin.transformers.start import random_images
from attncnn_plugin.transformers.vision_transformer import find_transformer

VIT, BEIT, RELPOS = 'vit_tiny_patch16_224', 'beit_base_patch16_224', 'vit_relpos_small_patch16_224'
TOKENS = [
    dict(class_token=False, global_pool='avg'),
    dict(),
    dict(reg_tokens=2),
    dict(reg_tokens=2, no_embed_class=True),
    dict(pre_norm=True),
]
MODELS = {  # each with what a start may leave between a head and the wanted one
    'absolute': (0.1, [(VIT, dict(embed_dim=64, num_heads=4, **tokens)) for tokens in TOKENS]),
    'relative': (
        1e-6,
        [
            (BEIT, dict()),
            (RELPOS, dict(rel_pos_type='bias')),
            (RELPOS, dict(rel_pos_type='bias', class_token=True)),
            ('vit_srelpos_small_patch16_224', dict(rel_pos_type='bias')),
        ],
    ),
    'rotary': (
        0.15,
        [
            ('eva02_tiny_patch14_224', dict(embed_dim=128)),
            ('eva02_tiny_patch14_224', dict(embed_dim=128, qkv_fused=False)),
            ('vit_small_patch16_dinov3', dict(embed_dim=128)),
            ('vit_small_patch16_dinov3_qkvb', dict(embed_dim=128)),
            ('vit_small_patch16_rope_224', dict(embed_dim=128)),
            # timm 1.0.22 has no mixed frequencies in float64.
            ('vit_small_patch16_rope_mixed_224', dict(embed_dim=128, double=False)),
        ],
    ),
}


@pytest.mark.parametrize('encoding', MODELS)
@given(st.data(), st.integers(0, 99))
def test_heads_are_gaussian(encoding, data, seed):
    """In every layer; the report has the same numbers."""
    torch.manual_seed(seed)
    bound, models = MODELS[encoding]
    name, settings = data.draw(st.sampled_from(models))
    exact = encoding != 'rotary'
    size = data.draw(st.tuples(*[st.integers(2 if exact else 3, 7)] * 2))
    alpha = data.draw(st.floats(0.3, 5) if exact else st.floats(0.5, 2))
    kernel_size = data.draw(st.sampled_from([1, 3, (2, 3), 5] if exact else [3]))
    model = small_vit(name, size, depth=2, **settings)
    shifts = data.draw(st.sampled_from(['ordered', 'random']))
    report = init_as_convolution(model, kernel_size, alpha=alpha, seed=seed, shifts=shifts)
    probs = list(own_attention(model, random_images(find_transformer(model), seed=seed)).values())
    assert len(report.layers) == len(probs) == 2
    patches = size[0] * size[1]
    for layer, of_layer in zip(report.layers, probs):
        assert (layer.encoding, layer.grid) == (encoding, size)
        for number, head in enumerate(layer.heads):
            found = total_variation(of_layer[:, number].double(), gaussian(head.shift, alpha, size))
            assert found < bound
            assert found == pytest.approx(head.total_variation, abs=1e-5)
        share = 1 - of_layer[:, :, -patches:, -patches:].sum(-1).mean().item()
        assert share == pytest.approx(layer.prefix_share, abs=1e-5)


@pytest.mark.parametrize(
    'name, settings', [*((VIT, tokens) for tokens in TOKENS), ('vit_small_patch16_dinov3', dict(embed_dim=128))]
)
def test_prefix_tokens_are_as_they_are(name, settings):
    """They look at all tokens, and a patch in the middle gives each the share of a patch in uniform attention."""
    model = small_vit(name, (7, 7), **settings)
    init_as_convolution(model)
    prefix = model.num_prefix_tokens
    uniform = torch.tensor(1 / (49 + prefix)).double()
    for probs in own_attention(model, random_images(find_transformer(model))).values():
        assert torch.allclose(probs[:, :, :prefix], uniform, atol=1e-9)
        assert torch.allclose(probs[:, :, prefix + 24, :prefix], uniform, rtol=0.3 if name == VIT else 0.5)


@given(st.data(), st.integers(0, 99))
@pytest.mark.parametrize(
    'heads, alphas, kernels, shortest', [((4, 32), (0.3, 5), [1, 3, 5], 3), ((8, 40), (1, 3), [3], 5)]
)
def test_heads_of_few_channels(heads, alphas, kernels, shortest, data, seed):
    """Eight have room for three waves, five for two."""
    size = data.draw(st.tuples(*[st.integers(shortest, 9)] * 2))
    torch.manual_seed(seed)
    model = small_vit(size=size, num_heads=heads[0], embed_dim=heads[1], depth=1)
    report = init_as_convolution(
        model, data.draw(st.sampled_from(kernels)), alpha=data.draw(st.floats(*alphas)), seed=seed
    )
    assert max(head.total_variation for head in report.layers[0].heads) < 0.1


def test_the_embedding():
    size, model = (3, 4), small_vit()
    rows, columns = torch.cartesian_prod(torch.arange(3), torch.arange(4)).double().T
    waves = sine_cosine_embedding(size, 32)
    assert torch.allclose(waves[:, 0], rows.sin()) and torch.allclose(waves[:, 8 + 1], (rows / 10000**0.125).cos())
    assert torch.allclose(waves[:, 16], columns.sin()) and torch.allclose(waves.square().sum(1), waves.new_tensor(16))
    prefix = model.pos_embed[0, :1].clone()
    set_sine_cosine_embedding(model)
    assert torch.equal(model.pos_embed[0, 1:], waves) and torch.equal(model.pos_embed[0, :1], prefix)


@torch.no_grad()
def test_content_is_read_as_without_the_position():
    """Values and MLPs of LayerNorm(content + position) are in the mean those of LayerNorm(content) before."""
    model, found = small_vit(size=(6, 5), class_token=False, global_pool='avg'), []
    before = [(block.attn.qkv.weight.chunk(3)[2].clone(), block.mlp.fc1.weight.clone()) for block in model.blocks]
    init_as_convolution(model)
    writers = [module.weight for block in model.blocks for module in (block.attn.proj, block.mlp.fc2)]
    writers = torch.cat([*writers, model.patch_embed.proj.weight.flatten(1)], 1).double()
    left, singular, _ = torch.linalg.svd(writers)
    held = left[:, singular < 1e-5 * singular[0]]  # directions into which nothing else writes
    assert held.shape[1] == 9
    for block in model.blocks:
        for norm in (block.norm1, block.norm2):
            norm.register_forward_hook(lambda module, args, output: found.append((args[0].double(), output.double())))
    model(random_images(find_transformer(model)))
    for layer, (block, weights) in enumerate(zip(model.blocks, before)):
        for number, weight in enumerate((block.attn.qkv.weight.chunk(3)[2], block.mlp.fc1.weight)):
            x, normalized = found[2 * layer + number]
            content = nn.functional.layer_norm(x - x @ held @ held.T, x.shape[-1:])
            wanted = content @ weights[number].double().T
            own = normalized @ weight.double().T
            assert (own * wanted).sum() / wanted.square().sum() == pytest.approx(1, abs=0.05)
            assert nn.functional.cosine_similarity(own, wanted, dim=-1).min() > 0.9999


def test_the_same_seed_is_the_same_start():
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(0)
        model = small_vit()
        init_as_convolution(model, seed=seed)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert any(not torch.equal(states[0][key], states[2][key]) for key in states[0])


@pytest.mark.parametrize('shared', [False, True])
def test_class_entries_stay(shared):
    model = small_vit('beit_base_patch16_224', (4, 4), use_rel_pos_bias=not shared, use_shared_rel_pos_bias=shared)
    tables = [parameter for name, parameter in model.named_parameters() if name.endswith('bias_table')]
    assert len(tables) == (1 if shared else 3)
    with torch.no_grad():
        for table in tables:
            table.normal_()
    before = [table[-3:].clone() for table in tables]
    report = init_as_convolution(model)
    assert all(torch.equal(table[-3:], old) for table, old in zip(tables, before))
    assert max(head.total_variation for layer in report.layers for head in layer.heads) < 1e-6
    shifts = {tuple(head.shift for head in layer.heads) for layer in report.layers}
    assert len(shifts) == 1 or not shared


@pytest.mark.parametrize('alpha', [1.0, 0.02])  # the second is wide: what a window hides would count
def test_windows(alpha):
    """Swin's, also shifted ones: each attends among the patches of its window that are neighbours in the image."""
    window, height = 4, 12
    settings = dict(depth=None, window_size=window, embed_dim=16, depths=(2,), num_heads=(2,))
    model = small_vit('swin_tiny_patch4_window7_224', (height, height), **settings)
    report = init_as_convolution(model, alpha=alpha)
    assert [layer.grid for layer in report.layers] == [(4, 4)] * 2
    plain, shifted = own_attention(model, random_images(find_transformer(model))[:1]).values()
    origin = torch.arange(height).reshape(3, window)  # rows of each window
    for layer, probs, rows in ((report.layers[0], plain, origin), (report.layers[1], shifted, (origin + 2) % height)):
        probs = probs.reshape(3, 3, 2, 16, 16)
        for i in range(3):
            for j in range(3):
                region = torch.cartesian_prod(rows[i], rows[j])  # where in the image
                for number, head in enumerate(layer.heads):
                    wanted = gaussian(head.shift, alpha, (window, window)).log()
                    together = ((region[:, None] - region[None]).abs() < window).all(-1)
                    wanted = wanted.masked_fill(~together, -torch.inf).softmax(-1)
                    assert torch.allclose(probs[i, j, number], wanted, atol=1e-6)
        assert max(head.total_variation for head in layer.heads) < 1e-6


def products(attention):
    """W^Q W^Kᵀ of each head, and W^V W^O of all, for rows of tokens."""
    queries, keys, values = attention.qkv.weight.detach().unflatten(0, (3, -1))
    heads = [x.unflatten(0, (attention.num_heads, -1)) for x in (queries, keys)]
    return heads[0].mT @ heads[1], values.T @ attention.proj.weight.detach().T


def test_mimetic():
    """2305.09828: 0.7 (Z + I) as near as heads of 16 channels come, and 0.4 (Z − I), with entries of variance 1/D."""
    model = small_vit(embed_dim=96, num_heads=6)
    report = init_as_convolution(model, method='mimetic')
    assert 'none' in str(report)
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


@pytest.mark.parametrize('num_heads', [3, 12])
def test_the_released_order(num_heads):
    """Positions 4, 1, 5, 3, 7, 0, 2, 6, 8 of the kernel, the centre first, from the first one again in each layer."""
    report = init_as_convolution(small_vit(embed_dim=96, num_heads=num_heads), seed=3)
    released = [(index // 3 - 1, index % 3 - 1) for index in (4, 1, 5, 3, 7, 0, 2, 6, 8)]
    for layer in report.layers:
        assert [head.shift for head in layer.heads] == (2 * released)[:num_heads]


def test_the_order_in_another_kernel():
    """All positions, the nearest first; those of the released order in the middle of a larger one."""
    report = init_as_convolution(small_vit(num_heads=16, embed_dim=128, depth=1), (2, 4))
    found = [head.shift for head in report.layers[0].heads]
    assert found[:8] == found[8:] and set(found) == {(row, column) for row in (0, 1) for column in (-1, 0, 1, 2)}
    assert found[:4] == [(0, 0), (0, 1), (0, -1), (1, 0)]


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(method='conv'), "method='conv' is unknown: choose one of"),
        (dict(shifts='centre'), r"shifts='centre' is unknown: choose one of \('ordered', 'random'\)"),
        (dict(alpha=0), 'alpha=0 must be a number above 0'),
        (dict(alpha=float('inf')), 'alpha=inf must be a number above 0'),
        (dict(kernel_size=0), 'kernel_size=0 must be a positive integer'),
        (dict(kernel_size=(3, 3, 3)), r'kernel_size=\(3, 3, 3\) must be'),
    ],
)
def test_impossible_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        init_as_convolution(small_vit('beit_base_patch16_224'), **arguments)


def test_random_shifts():
    report = init_as_convolution(small_vit(num_heads=4, depth=20), kernel_size=(1, 3), shifts='random')
    found = [head.shift for layer in report.layers for head in layer.heads]
    assert set(found) == {(0.0, -1.0), (0.0, 0.0), (0.0, 1.0)} and all(found.count(shift) > 10 for shift in found)


def test_the_table():
    report = init_as_convolution(small_vit(depth=2))
    lines = str(report).splitlines()
    assert ' '.join(lines[0].split()) == 'layer encoding grid head shift total variation to other tokens'
    assert len(lines) == 5 and lines[1].startswith('blocks.0.attn  absolute  3×4   0')
    for line, head in zip(lines[1:], (head for layer in report.layers for head in layer.heads)):
        assert '({:g}, {:g})'.format(*head.shift) in line and f'{head.total_variation:.2g}' in line


def test_the_model_is_as_it_was_otherwise():
    """Modes, fused attention and hooks."""
    model = small_vit(pos_drop_rate=0.5, attn_drop_rate=0.5).train()
    fused = [block.attn.fused_attn for block in model.blocks]
    init_as_convolution(model)
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())
    assert [block.attn.fused_attn for block in model.blocks] == fused
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_compiled_models():
    """That have run on as many images already: they start as they do uncompiled."""
    expected = small_vit(depth=1)
    inside, other = copy.deepcopy(expected), copy.deepcopy(expected)
    inside.compile(backend='eager')
    report = init_as_convolution(expected)
    for model in (inside, torch.compile(other, backend='eager')):
        with torch.no_grad():
            model.eval()(torch.randn(4, 3, *expected.patch_embed.img_size, dtype=torch.float64))
        assert [own.heads for own in init_as_convolution(model).layers] == [own.heads for own in report.layers]
    for model in (inside, other):
        assert all(map(torch.equal, model.parameters(), expected.parameters()))


def test_a_model_without_values():
    with pytest.raises(ValueError, match='model is a VisionTransformer on the meta device, without values'):
        init_as_convolution(small_vit().to('meta'))


def test_attention_that_does_not_run():
    model = small_vit(depth=2)
    model.blocks[1].forward = lambda x, **_: x
    with refused(model, 'blocks.1.attn is attention that a VisionTransformer does not run on patches'):
        init_as_convolution(model)


def test_values_of_heads_that_are_too_narrow():
    model = small_vit(embed_dim=32, num_heads=2)
    model.blocks[1].attn.qkv, model.blocks[1].attn.proj = nn.Linear(32, 72).double(), nn.Linear(24, 32).double()
    with pytest.raises(ValueError, match='the heads of blocks.1.attn need 32 channels together'):
        init_as_convolution(model, method='mimetic')


@pytest.mark.parametrize('method', ['gaussian', 'mimetic'])
def test_an_error_leaves_the_model_as_it_was(method):
    model = small_vit()
    model.patch_embed.register_forward_hook(lambda module, args, output: output[..., :-1])
    with refused(model, 'size', RuntimeError):  # tokens have 32 channels
        init_as_convolution(model, method=method)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize('alpha, share', [(2, 0.046), (6, 0.65), (20, 0.92)])
def test_the_class_token_at_the_border(alpha, share):
    """It gets what the patch outside would have; the share of uniform attention inside."""
    model = timm.create_model(VIT, depth=1)
    init_as_convolution(model, alpha=alpha)
    (maps,) = attention_maps(model, torch.randn(1, 3, 224, 224)).values()
    of_class = maps[0, :, 1:, 0].unflatten(1, (14, 14))  # (N_h, H, W)
    assert of_class[:, 0, 1:-1].amax(0).mean().item() == pytest.approx(share, rel=0.01)  # of the head that looks up
    assert torch.allclose(of_class[:, 1:-1, 1:-1], torch.tensor(1 / 197), rtol=0.2)


@pytest.mark.parametrize(
    'name, part, change, message',
    [
        ('eva02_tiny_patch14_224', 'patch_embed.proj', dict(bias=None), 'the patch embedding of Eva has no bias: rot'),
        (
            BEIT,
            'blocks.1.attn',
            dict(window_size=None),
            'relative positions of blocks.1.attn are a Attention without a table of biases',
        ),
        (
            VIT,
            'patch_embed',
            dict(proj=nn.Identity()),
            'patch_embed of VisionTransformer has no convolution that makes',
        ),
        (
            VIT,
            'patch_embed',
            dict(grid_size=None, img_size=None),
            'does not say for which grid it is: build it with an',
        ),
        (VIT, '', dict(pos_embed=None), 'a VisionTransformer has no position encoding that is known: relative'),
    ],
)
def test_models_without_what_a_start_needs(name, part, change, message):
    model = small_vit(name, embed_dim=64)
    for key, value in change.items():
        setattr(model.get_submodule(part), key, value)
    with refused(model, message):
        init_as_convolution(model)


def test_small_numbers():
    """Heads that see all patches alike, and fewer than four channels."""
    assert log_share_of_peak(1e-3, 9) == 0 < log_share_of_peak(1.0, 9)
    assert torch.equal(sine_cosine_embedding((2, 2), 3), torch.zeros(4, 3).double())
