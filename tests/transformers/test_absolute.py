"""Starts of vision transformers with embeddings of absolute positions."""

import pytest
import torch
from helpers.starts import attention_of, gaussian, small_vit, total_variation
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attncnn_plugin.transformers import init_as_convolution, set_sine_cosine_embedding
from attncnn_plugin.transformers.absolute import nearest_waves, score_matrices, wave_frequencies
from attncnn_plugin.transformers.embeddings import sine_cosine_embedding
from attncnn_plugin.transformers.start import random_images

SIZES = st.tuples(st.integers(1, 6), st.integers(2, 6))
TOKENS = [
    dict(class_token=False, global_pool='avg'),
    dict(),
    dict(reg_tokens=2),
    dict(reg_tokens=2, no_embed_class=True),
    dict(pre_norm=True),
]


@given(SIZES, st.sampled_from(TOKENS), st.sampled_from([1, 3, (2, 3), 5]), st.floats(0.3, 5), st.integers(0, 99))
def test_heads_are_gaussian(size, tokens, kernel_size, alpha, seed):
    """In the first and in the last layer; the report has the same numbers."""
    torch.manual_seed(seed)
    model = small_vit(size=size, embed_dim=64, num_heads=4, **tokens)
    report = init_as_convolution(model, kernel_size, alpha=alpha, seed=seed)
    probs = attention_of(model, random_images(model, seed=seed))
    assert len(report.layers) == len(probs) == 3 and report.alpha == alpha
    for layer, of_layer in zip(report.layers, probs):
        assert (layer.encoding, layer.grid) == ('absolute', size)
        for number, head in enumerate(layer.heads):
            wanted = gaussian(head.shift, alpha, size)
            found = total_variation(of_layer[:, number], wanted)
            assert found < 0.1
            assert found == pytest.approx(head.total_variation, abs=1e-6)
        share = 1 - of_layer[:, :, -size[0] * size[1] :, -size[0] * size[1] :].sum(-1).mean().item()
        assert share == pytest.approx(layer.prefix_share, abs=1e-6)


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


@given(SIZES, st.sampled_from(TOKENS), st.floats(0.3, 5), st.integers(0, 99))
def test_content_changes_the_width_alone(size, tokens, alpha, seed):
    """Scores are LayerNorm's factors of query and key times a function of the shift, 0 at Δ and less elsewhere."""
    torch.manual_seed(seed)
    model, inputs, scores = small_vit(size=size, **tokens), [], []
    images = random_images(model, seed=seed)
    report = init_as_convolution(model, alpha=alpha, seed=seed)
    for block in model.blocks:
        block.norm1.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        block.attn.qkv.register_forward_hook(
            lambda module, args, output: scores.append(output.unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4))
        )
    before = []  # another LayerNorm, before the blocks
    model.norm_pre.register_forward_pre_hook(lambda module, args: before.append(args[0]))
    model.eval()(images)
    patches = size[0] * size[1]
    grid = torch.cartesian_prod(*map(torch.arange, size))
    shifts = grid[None] - grid[:, None]  # (q, k, 2)
    for layer, tokens, (q, k, _) in zip(report.layers, inputs, scores):
        factor = (tokens.var(-1, correction=0) + model.blocks[0].norm1.eps).rsqrt()
        if isinstance(model.norm_pre, nn.LayerNorm):
            factor = factor * (before[0].var(-1, correction=0) + model.norm_pre.eps).rsqrt()
        factor = factor[:, -patches:]
        found = (q @ k.mT / 16**0.5)[:, :, -patches:, -patches:]
        for number, head in enumerate(layer.heads):
            own = found[:, number] * factor.mean() ** 2 / factor[:, :, None] / factor[:, None]
            assert own.max() < 1e-6
            at_shift = (shifts == torch.tensor(head.shift)).all(-1)
            assert torch.allclose(own[:, at_shift], torch.zeros(()).double(), atol=1e-6)
            of_shift = {}
            for shift, values in zip(shifts.flatten(0, 1).tolist(), own.flatten(1).T):
                assert torch.allclose(values, of_shift.setdefault(tuple(shift), values[0]), atol=1e-6)


@given(st.integers(1, 40), st.integers(-3, 3), st.floats(0.3, 5))
def test_waves_are_nearest_to_the_gaussian(length, shift, alpha):
    """No other coefficients have a smaller divergence, and the total variation is small."""
    shifts = torch.tensor([[shift, 0.0]]).double()
    omega, of_columns = wave_frequencies((length, 1), shifts, room=99)
    if length > 1:
        reach = length - 1 + abs(shift)
        assert omega[-1] >= 2 * torch.pi / 8 and torch.allclose(omega / omega[0] * torch.pi, omega * reach)
    a = nearest_waves(alpha, shift, length, omega)
    keys = torch.arange(length).double()
    distances = keys[None] - keys[:, None] - shift
    wanted = (-alpha * distances**2).softmax(-1)

    def divergence(a):
        scores = (torch.cos(distances[..., None] * omega) * a).sum(-1)
        return (wanted * (wanted.clamp(min=1e-300).log() - scores.log_softmax(-1))).sum(-1).mean() + 1e-5 * a @ a

    for other in (*(a + 1e-3 * torch.randn(8, len(a)).double()), torch.zeros_like(a)):
        assert divergence(other) >= divergence(a) - 1e-12
    scores = (torch.cos(distances[..., None] * omega) * a).sum(-1)
    variation = (scores.softmax(-1) - wanted).abs().sum(-1).mean() / 2
    assert variation < 0.05
    of_position = torch.stack([(keys[:, None] * omega).cos(), (keys[:, None] * omega).sin()], -1).flatten(1)
    of_position = nn.functional.pad(of_position, (1, 0), value=1.0)
    (matrix,) = score_matrices(shifts, alpha, (length, 1), [omega, of_columns])
    assert torch.allclose(of_position @ matrix @ of_position.T, scores - a.sum(), atol=1e-9)


def test_queries_and_keys_are_small():
    """Smaller than those of the parabola, whose scores of far keys are hundreds: steps of Adam move them less."""
    alpha, length = 2.0, 14
    omega, _ = wave_frequencies((length, 1), torch.tensor([[1.0, 0.0]]), room=99)
    assert nearest_waves(alpha, 1.0, length, omega).abs().sum() < 15 < alpha * length**2  # that of the farthest key


@pytest.mark.parametrize('tokens', TOKENS)
def test_prefix_tokens_are_as_they_are(tokens):
    """They look at all tokens, and a patch in the middle gives each the share of a patch in uniform attention."""
    model = small_vit(size=(7, 7), **tokens)
    init_as_convolution(model)
    prefix = model.num_prefix_tokens
    for probs in attention_of(model, random_images(model)):
        assert torch.allclose(probs[:, :, :prefix], torch.tensor(1 / (49 + prefix)).double(), atol=1e-9)
        middle = probs[:, :, prefix + 24, :prefix]
        assert torch.allclose(middle, torch.tensor(1 / (49 + prefix)).double(), rtol=0.3)


def test_the_embedding():
    size, model = (3, 4), small_vit()
    rows, columns = torch.cartesian_prod(torch.arange(3), torch.arange(4)).double().T
    waves = sine_cosine_embedding(size, 32)
    assert torch.allclose(waves[:, 0], rows.sin()) and torch.allclose(waves[:, 8 + 1], (rows / 10000**0.125).cos())
    assert torch.allclose(waves[:, 16], columns.sin()) and torch.allclose(waves.square().sum(1), waves.new_tensor(16))
    prefix = model.pos_embed[0, :1].clone()
    set_sine_cosine_embedding(model)
    assert torch.equal(model.pos_embed[0, 1:], waves) and torch.equal(model.pos_embed[0, :1], prefix)


def test_what_the_other_channels_hold():
    """All but ten directions of the tokens' space are sines and cosines."""
    model = small_vit(size=(6, 6))  # two waves an axis, a constant, and one of the class token
    init_as_convolution(model)
    change = model.pos_embed[0, 1:] - sine_cosine_embedding((6, 6), 32)
    assert torch.linalg.matrix_rank(change, rtol=1e-9) in (9, 10)
    patches = model.patch_embed.proj.weight.flatten(1)
    assert torch.linalg.matrix_rank(patches, rtol=1e-9) == 32 - 10


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
    model(random_images(model))
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


def test_a_checkpoint_wins():
    trained, model = small_vit(), small_vit()
    init_as_convolution(model)
    model.load_state_dict(trained.state_dict())
    images = random_images(model)
    assert torch.equal(model.eval()(images), trained.eval()(images))
