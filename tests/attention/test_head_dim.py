"""Heads with values of D_h channels, W_val X, and queries and keys of D_k (C20, section 2), against their equations."""

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st

from attncnn_plugin.attention import (
    ContentAttention,
    GeneralizedQuadraticAttention,
    LearnedAttention,
    QuadraticAttention,
)
from attncnn_plugin.convert import mhsa_to_conv
from attncnn_plugin.pruning import reset_heads
from attncnn_plugin.pruning.prune import fold_into_bias, head_means, merge_duplicate

LAYERS = {
    'quadratic': QuadraticAttention,
    'generalized': GeneralizedQuadraticAttention,
    'learned': LearnedAttention,
    'content': ContentAttention,
    'content, narrow': lambda *args, **kwargs: ContentAttention(*args, qk_dim=2, **kwargs),
    'content, all terms': lambda *args, **kwargs: ContentAttention(*args, terms=('qk', 'qr', 'uk', 'vr'), **kwargs),
    'vr': lambda *args, **kwargs: ContentAttention(*args, terms=('vr',), **kwargs),
}
POSITION_ONLY = ['quadratic', 'generalized', 'learned', 'vr']


def by_equation(layer, x):
    """concat_h(P_h X W_val) W_out + b (C20, eq. 1 to 3), head by head."""
    if layer.depends_on_content:
        probs = layer.attention_scores(x).softmax(-1)
    else:
        probs = layer.attention_probs(x.shape[1:3]).expand(len(x), -1, -1, -1)
    tokens, width = x.flatten(1, 2), layer.head_dim
    heads = [
        probs[:, h] @ (tokens @ layer.value_proj.weight[h * width : (h + 1) * width].T) for h in range(layer.num_heads)
    ]
    output = torch.cat(heads, dim=-1) @ layer.value.weight.T + layer.value.bias
    return output.reshape(*x.shape[:3], -1)


@given(
    st.sampled_from(list(LAYERS)),
    st.sampled_from([1, 2, 3, 11]),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 2**31),
)
def test_outputs(kind, head_dim, height, width, batch, seed):
    torch.manual_seed(seed)
    layer = LAYERS[kind](8, 3, head_dim=head_dim, out_dim=5, dtype=torch.float64)
    x = torch.randn(batch, height, width, 8, dtype=torch.float64, requires_grad=True)
    expected = by_equation(layer, x)
    parameters = [x, *layer.parameters()]
    gradients = torch.autograd.grad(expected.sin().sum(), parameters, allow_unused=True)
    output = layer(x)
    assert (output - expected).abs().max() <= 1e-12
    for ours, reference in zip(torch.autograd.grad(output.sin().sum(), parameters), gradients):
        assert (ours - (0 if reference is None else reference)).abs().max() <= 1e-10


@pytest.mark.parametrize('kind', LAYERS)
def test_value_matrices(kind):
    layer = LAYERS[kind](8, 3, head_dim=2, out_dim=5, dtype=torch.float64)
    matrices = layer.value_matrices()
    assert matrices.shape == (3, 5, 8) and (torch.linalg.matrix_rank(matrices) == 2).all()
    x = torch.randn(2, 4, 3, 8, dtype=torch.float64)
    if layer.depends_on_content:
        probs = layer.attention_scores(x).softmax(-1)
    else:
        probs = layer.attention_probs((4, 3)).expand(2, -1, -1, -1)
    output = torch.einsum('bhqk,bkd,hod->bqo', probs, x.flatten(1, 2), matrices) + layer.value.bias
    assert (layer(x).flatten(1, 2) - output).abs().max() <= 1e-12


@pytest.mark.parametrize('kind', LAYERS)
def test_pruned_and_loaded(kind):
    layer = LAYERS[kind](8, 3, head_dim=2)
    x = torch.randn(2, 4, 3, 8)
    with torch.no_grad():
        layer.value.weight[:, 2:4] = 0
        expected = layer(x)
        layer.prune_heads([1])
        assert layer.value_proj.weight.shape == (4, 8) and layer.value_proj.out_features == 4
        assert torch.allclose(layer(x), expected, atol=1e-6)
        fresh = LAYERS[kind](8, 3, head_dim=2)
        fresh.load_state_dict(layer.state_dict())
        assert fresh.num_heads == 2 and torch.equal(fresh(x), layer(x))
        layer.prune_heads([0, 1], allow_empty=True)
        assert torch.allclose(layer(x), layer.value.bias.expand(2, 4, 3, -1))


def test_state_dicts_of_other_widths_are_refused():
    plain, narrow, wide = (QuadraticAttention(8, 4, head_dim=head_dim) for head_dim in (None, 2, 4))
    with pytest.raises(RuntimeError, match='value_proj.weight is in the state dict.* build it with head_dim=2'):
        plain.load_state_dict(narrow.state_dict(), strict=False)
    with pytest.raises(RuntimeError, match='value_proj.weight is not in the state dict.* build it with head_dim=None'):
        narrow.load_state_dict(plain.state_dict(), strict=False)
    with pytest.raises(RuntimeError, match='other widths than those of the model'):
        wide.load_state_dict(narrow.state_dict(), strict=False)
    queries = [ContentAttention(8, 4, qk_dim=qk_dim, position='absolute_sinusoidal') for qk_dim in (2, 4)]
    with pytest.raises(RuntimeError, match='other widths than those of the model'):
        queries[1].load_state_dict(queries[0].state_dict(), strict=False)


def test_means_of_heads_become_a_bias():
    layer = QuadraticAttention(8, 3, head_dim=2)
    x = torch.randn(2, 4, 3, 8)
    with torch.no_grad():
        layer.encoding.sqrt_precision[1] = 0  # uniform: the same output everywhere in an image
        with head_means([layer]) as (means,):
            expected = layer(x[:1])
        fold_into_bias(layer, [1], means.mean)
        layer.prune_heads([1])
        assert torch.allclose(layer(x[:1]), expected, atol=1e-6)
    with pytest.raises(ValueError, match='head_dim=2 channels, so that one head cannot take the values of two'):
        merge_duplicate(layer, 1, 0)


def test_nearest_convolution():
    layer = QuadraticAttention(8, 9, head_dim=2, dtype=torch.float64)
    with torch.no_grad():
        layer.encoding.center.copy_(torch.cartesian_prod(*[torch.arange(-1.0, 2)] * 2))
        layer.encoding.sqrt_precision.fill_(40)
    conv, fit = mhsa_to_conv(layer, 3)
    x = torch.randn(2, 6, 5, 8, dtype=torch.float64)
    assert fit.bound <= 1e-12
    assert (conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1) - layer(x)).abs().max() <= 1e-12


@pytest.mark.parametrize('kind', LAYERS)
def test_half_precision(kind):
    layer = LAYERS[kind](8, 3, head_dim=2)
    x = torch.randn(2, 5, 4, 8)
    expected = layer(x)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.bfloat16 and torch.allclose(output.float(), expected, atol=0.05)
    output = layer.to(torch.bfloat16)(x.bfloat16())
    assert output.dtype == torch.bfloat16 and torch.allclose(output.float(), expected, atol=0.1)


@pytest.mark.parametrize('name', ['sa_quadratic_cifar', 'sa_learned_content_cifar'])
def test_ablation_of_the_paper(name):
    """D_h = D/N_h, which C20 advises against: 9·44 channels of values, of 400."""
    with torch.device('meta'):
        layer = timm.create_model(name, head_dim=44).blocks[0].attn
    assert layer.value_proj.weight.shape == (396, 400) and layer.value.weight.shape == (400, 396)


@pytest.mark.parametrize('position', [None, 'relative_quadratic', 'relative_generalized'])
def test_reset_heads(position):
    """All of a head is drawn anew, and nothing of the others."""
    layer = QuadraticAttention(8, 3, head_dim=2)
    if position is not None:
        layer = ContentAttention(8, 3, position=position, terms=('qk', 'uk', 'vr'), head_dim=2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(7)
    reset_heads(layer, [1])
    for name, (dim, entries) in layer.head_parameters().items():
        heads = layer.get_parameter(name).unflatten(dim, (3, entries)).movedim(dim, 0)
        assert (heads[[0, 2]] == 7).all() and (heads[1] != 7).all(), name
    assert (layer.value.bias == 7).all()
