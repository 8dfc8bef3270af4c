"""Starts of vision transformers with relative position biases: exact."""

import pytest
import torch
from helpers.starts import attention_of, gaussian, small_vit
from hypothesis import given
from hypothesis import strategies as st

from attncnn_plugin.transformers import init_as_convolution
from attncnn_plugin.transformers.start import random_images

SIZES = st.tuples(st.integers(2, 7), st.integers(2, 7))
VITS = [
    ('beit_base_patch16_224', dict()),
    ('vit_relpos_small_patch16_224', dict(rel_pos_type='bias')),
    ('vit_relpos_small_patch16_224', dict(rel_pos_type='bias', class_token=True)),
    ('vit_srelpos_small_patch16_224', dict(rel_pos_type='bias')),
]


def bias_of(model, block):
    attention = block.attn
    if hasattr(attention, '_get_rel_pos_bias'):
        return attention._get_rel_pos_bias()[0]
    return (attention.rel_pos or model.shared_rel_pos).get_bias()[0]


@given(SIZES, st.sampled_from(VITS), st.floats(0.3, 5), st.sampled_from([1, 3, (3, 4)]), st.integers(0, 99))
def test_tables(size, vit, alpha, kernel_size, seed):
    name, settings = vit
    model = small_vit(name, size, **settings).eval()
    report = init_as_convolution(model, kernel_size, alpha=alpha, seed=seed)
    patches = size[0] * size[1]
    probs = attention_of(model, random_images(model))
    for layer, block, of_layer in zip(report.layers, model.blocks, probs):
        assert (layer.encoding, layer.grid) == ('relative', size)
        bias = bias_of(model, block)
        for number, head in enumerate(layer.heads):
            wanted = gaussian(head.shift, alpha, size)
            own = bias[number, -patches:, -patches:]
            assert torch.allclose(own.softmax(-1), wanted, atol=1e-6)
            among = of_layer[:, number, -patches:, -patches:]
            assert torch.allclose(among / among.sum(-1, keepdim=True), wanted.expand_as(among), atol=1e-6)
            assert head.total_variation < 1e-6


@pytest.mark.parametrize('name, settings', VITS[:2])
def test_the_bias_itself(name, settings):
    """b_δ = −α‖δ − Δ‖², plus log(N / Σ_δ exp(−α‖δ‖²)) where there are class tokens."""
    model = small_vit(name, (4, 5), **settings).eval()
    report = init_as_convolution(model, alpha=1.5)
    plane = sum(torch.tensor(-1.5 * shift**2).exp() for shift in range(-9, 10)) ** 2
    constant = (20 / plane).log() if model.num_prefix_tokens else 0.0
    for layer, block in zip(report.layers, model.blocks):
        bias = bias_of(model, block)[:, -20:, -20:].unflatten(1, (4, 5)).unflatten(3, (4, 5))
        for number, (row, column) in enumerate(head.shift for head in layer.heads):
            for q in ((0, 0), (1, 3), (3, 4)):
                for k in ((0, 0), (2, 2), (3, 4)):
                    distance = (k[0] - q[0] - row) ** 2 + (k[1] - q[1] - column) ** 2
                    found = bias[(number, *q, *k)].item()
                    assert found == pytest.approx(float(constant) - 1.5 * distance, abs=1e-5)


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


def test_windows():
    """Swin's, also shifted ones: each attends among the patches of its window that are neighbours in the image."""
    window, height = 4, 12
    model = small_vit(
        'swin_tiny_patch4_window7_224',
        (height, height),
        depth=None,
        window_size=window,
        embed_dim=16,
        depths=(2,),
        num_heads=(2,),
    )
    report = init_as_convolution(model, alpha=1.0)
    assert [layer.grid for layer in report.layers] == [(4, 4)] * 2
    plain, shifted = attention_of(model, random_images(model)[:1])
    origin = torch.arange(height).reshape(3, window)  # rows of each window
    for layer, probs, rows in ((report.layers[0], plain, origin), (report.layers[1], shifted, (origin + 2) % height)):
        probs = probs.reshape(3, 3, 2, 16, 16)
        for i in range(3):
            for j in range(3):
                region = torch.cartesian_prod(rows[i], rows[j])  # where in the image
                for number, head in enumerate(layer.heads):
                    wanted = gaussian(head.shift, 1.0, (window, window)).log()
                    together = ((region[:, None] - region[None]).abs() < window).all(-1)
                    wanted = wanted.masked_fill(~together, -torch.inf).softmax(-1)
                    assert torch.allclose(probs[i, j, number], wanted, atol=1e-6)
        assert max(head.total_variation for head in layer.heads) < 1e-6


@pytest.mark.parametrize('name', ['vit_relpos_small_patch16_224', 'vit_srelpos_small_patch16_224'])
@pytest.mark.parametrize('rel_pos_type', ['mlp', 'mlp_swin'])
def test_an_mlp_is_refused(name, rel_pos_type):
    """The sentence says what can be started; the model stays as it was."""
    model = small_vit(name, rel_pos_type=rel_pos_type)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    message = (
        r'the relative positions of blocks.0.attn are a RelPosMlp without a table of biases: a start needs such a '
        r"table \(BEiT, Swin, vit_relpos_\* with rel_pos_type='bias'\), rotations, or an embedding of absolute "
        'positions$'
    )
    with pytest.raises(ValueError, match=message):
        init_as_convolution(model)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    init_as_convolution(model, method='mimetic')  # without the bias
