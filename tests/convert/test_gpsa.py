"""ConViT's gated attention, timm's own code, and the layer built from it."""

import copy

import pytest
import timm
import torch
from timm.models.convit import GPSA
from torch import nn

from attncnn_plugin.convert import gpsa_to_attention


def trained_gpsa(dim=24, num_heads=4, **kwargs):
    """Weights as after some training: the scores by position of two heads have a maximum, of the others a minimum."""
    gpsa = GPSA(dim, num_heads, **kwargs)
    gpsa.local_init()
    with torch.no_grad():
        for parameter in gpsa.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
        gpsa.pos_proj.weight[:2, 2] = torch.tensor([-1.3, -0.2])
        gpsa.pos_proj.weight[2:, 2] = torch.linspace(0, 0.4, num_heads - 2)
        gpsa.gating_param.copy_(torch.linspace(-3, 3, num_heads))
    return gpsa


@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize('qkv_bias', [False, True])
@pytest.mark.parametrize('dim, num_heads', [(24, 4), (18, 9), (10, 5)])
def test_same_outputs(dtype, tolerance, qkv_bias, dim, num_heads):
    gpsa = trained_gpsa(dim, num_heads, qkv_bias=qkv_bias, attn_drop=0.1).to(dtype).eval()
    attention, _ = gpsa_to_attention(gpsa)
    assert not attention.training and attention.attn_drop.p == 0.1
    for side in (1, 2, 5, 14):  # GPSA knows squares alone
        x = torch.randn(2, side, side, dim, dtype=dtype)
        gpsa.rel_indices = gpsa.get_rel_indices(side**2).to(dtype)  # which older versions leave in float32
        with torch.no_grad():
            expected = gpsa(x.flatten(1, 2)).reshape(x.shape)
            assert (attention(x) - expected).abs().max() <= tolerance * max(1, expected.abs().max())
            probs = gpsa.get_attention(x.flatten(1, 2))
            assert (attention.attention_scores(x).softmax(-1) - probs).abs().max() <= tolerance
            positions = gpsa.pos_proj(gpsa.rel_indices).permute(0, 3, 1, 2).softmax(-1)[0]
            assert (attention.position_probs((side, side)) - positions).abs().max() <= tolerance


def test_same_training():
    """Gradients of what both have, and no memory in common."""
    gpsa = trained_gpsa(qkv_bias=True).double()
    attention, _ = gpsa_to_attention(gpsa)
    x = torch.randn(2, 4, 4, 24, dtype=torch.float64)
    gpsa.rel_indices = gpsa.get_rel_indices(16).double()
    outputs = attention(x), gpsa(x.flatten(1, 2)).reshape(x.shape)
    pairs = [
        (attention.encoding.weight, gpsa.pos_proj.weight),
        (attention.gate, gpsa.gating_param),
        (attention.value_proj.weight, gpsa.v.weight),
        (attention.value.weight, gpsa.proj.weight),
    ]
    ours, theirs = (torch.autograd.grad(output.sin().sum(), own) for output, own in zip(outputs, zip(*pairs)))
    theirs = [theirs[0].flip(1), *theirs[1:3]]
    for own, expected in zip(ours, theirs):  # not of W_out: b_v goes another way
        assert (own - expected).abs().max() <= 1e-10
    before = gpsa.proj.weight.clone()
    attention.value.weight.data.zero_()
    assert torch.equal(gpsa.proj.weight, before)


def test_report():
    gpsa = trained_gpsa()
    with torch.no_grad():
        gpsa.pos_proj.weight[0] = torch.tensor([2.0, -4.0, -1.0])  # (column, row, square): α = 1, Δ = (−2, 1)
    attention, report = gpsa_to_attention(gpsa)
    first, *_, last = report.heads
    assert first.center == (-2.0, 1.0) and first.alpha == 1 and first.position_share == pytest.approx(0.0474, abs=1e-4)
    assert last.center is None and last.alpha == pytest.approx(-0.4) and 'not Gaussian' in str(report)
    assert attention.gaussian_heads() is None
    probs = attention.position_probs((9, 9))[0, 4 * 9 + 4]  # of the query in the middle
    assert probs.argmax() == 2 * 9 + 5


def test_every_gpsa_of_a_model():
    convit = timm.create_model('convit_tiny', img_size=64, embed_dim=6, depth=3, local_up_to_layer=2).eval()
    images = torch.randn(2, 3, 64, 64)
    expected = convit(images)

    class OnTokens(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.attention = attention

        def forward(self, x):
            return self.attention(x.unflatten(1, (4, 4))).flatten(1, 2)

    for block in convit.blocks[:2]:
        block.attn = OnTokens(gpsa_to_attention(block.attn)[0])
    assert torch.allclose(convit(images), expected, atol=1e-5)
    with pytest.raises(TypeError, match='gpsa is a MHSA, whose qk, v, pos_proj, gating_param are missing'):
        gpsa_to_attention(convit.blocks[2].attn)


def test_what_is_refused():
    gpsa = trained_gpsa(proj_drop=0.1)
    with pytest.raises(ValueError, match=r'proj_drop=0\.1 of gpsa'):
        gpsa_to_attention(gpsa)
    gpsa.proj_drop.p = 0.0
    adapted = copy.deepcopy(gpsa)
    adapted.v = nn.Sequential(adapted.v)
    with pytest.raises(TypeError, match='whose v are missing or no plain linear layers'):
        gpsa_to_attention(adapted)
    assert gpsa_to_attention(gpsa)[0].training
