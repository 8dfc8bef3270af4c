"""Starts of vision transformers with rotary embeddings."""

import pytest
import torch
from helpers.starts import attention_of, gaussian, small_vit, total_variation
from hypothesis import given
from hypothesis import strategies as st

from attncnn_plugin.transformers import init_as_convolution, rotary
from attncnn_plugin.transformers.rotary import constant_queries_and_keys, rotation_angles
from attncnn_plugin.transformers.start import random_images

SIZES = st.tuples(st.integers(3, 8), st.integers(3, 8))
VITS = [
    ('eva02_tiny_patch14_224', dict()),
    ('eva02_tiny_patch14_224', dict(qkv_fused=False)),
    ('vit_small_patch16_dinov3', dict()),
    ('vit_small_patch16_dinov3_qkvb', dict()),
    ('vit_small_patch16_rope_224', dict()),
    ('vit_small_patch16_rope_mixed_224', dict()),
]


@given(SIZES, st.sampled_from(VITS), st.floats(0.5, 2), st.integers(0, 99))
def test_heads_are_near_gaussian(size, vit, alpha, seed):
    name, settings = vit
    torch.manual_seed(seed)
    # timm 1.0.22 has no mixed frequencies in float64.
    model = small_vit(name, size, embed_dim=128, double='mixed' not in name, **settings)
    report = init_as_convolution(model, alpha=alpha, seed=seed)
    for layer, probs in zip(report.layers, attention_of(model, random_images(model, seed=seed))):
        assert (layer.encoding, layer.grid) == ('rotary', size)
        for number, head in enumerate(layer.heads):
            wanted = gaussian(head.shift, alpha, size)
            found = total_variation(probs[:, number].double(), wanted)
            assert found < 0.15
            assert found == pytest.approx(head.total_variation, abs=1e-5)


@given(SIZES, st.integers(0, 99))
def test_series_against_a_fit_here(size, seed):
    """Rotated as the equation says, a pair of channels at a time; the scores are nearest to −α‖δ − Δ‖² near Δ."""
    generator = torch.Generator().manual_seed(seed)
    frequencies = torch.cat([torch.tensor([0.01, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 2.6, 3.0])] * 2).double()
    grid = torch.cartesian_prod(*(torch.arange(n) for n in size)).double()
    angles = torch.cat([grid[:, :1] * frequencies[:9], grid[:, 1:] * frequencies[9:]], 1)  # (patches, 18)
    shift = torch.randint(-1, 2, (1, 2), generator=generator).double()
    queries, keys = constant_queries_and_keys(angles[None], shift, 1.0, size, 0.0)
    scores = torch.zeros(len(grid), len(grid), dtype=torch.float64)
    for pair in range(18):
        for sign in (0, 1):
            turn = [
                vector[0, pair].real * (angle.cos() if sign == 0 else angle.sin())
                + vector[0, pair].imag * (-angle.sin() if sign == 0 else angle.cos())
                for vector, angle in ((queries, angles[:, pair]), (keys, angles[:, pair]))
            ]
            scores += turn[0][:, None] * turn[1][None]
    assert total_variation(scores.softmax(-1)[None], gaussian(shift[0].tolist(), 1.0, size)) < 0.03


def test_no_rotation_of_class_tokens():
    """Class and register tokens look at all tokens; a patch in the middle gives each about the share of a patch."""
    model = small_vit('vit_small_patch16_dinov3', (7, 7), embed_dim=128)
    init_as_convolution(model)
    prefix = model.num_prefix_tokens
    assert prefix == 5
    for probs in attention_of(model, random_images(model)):
        assert torch.allclose(probs[:, :, :prefix], torch.tensor(1 / (49 + prefix)).double(), atol=1e-9)
        middle = probs[:, :, prefix + 24, :prefix]
        assert torch.allclose(middle, torch.tensor(1 / (49 + prefix)).double(), rtol=0.5)


def test_an_error_leaves_no_hooks(monkeypatch):
    """At the second layer."""
    model, calls = small_vit('eva02_tiny_patch14_224', (4, 4)), []

    def angles(*args):
        calls.append(args)
        if len(calls) == 2:
            raise ValueError('no angles')
        return rotation_angles(*args)

    monkeypatch.setattr(rotary, 'rotation_angles', angles)
    with pytest.raises(ValueError, match='no angles'):
        init_as_convolution(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
