"""Head reports of timm's vision transformers."""

import json

import pytest
import timm
import torch
from helpers.head_reports import brute_force, check_schema
from helpers.vits import small_vit
from torch import nn

from attncnn_plugin.analysis import (
    reports_to_dict,
    vit_attention,
    vit_reports,
)

TINY = dict(embed_dim=12, num_heads=3, depth=2, img_size=32, num_classes=4, pos_drop_rate=0.5)


def tiny_timm(name, **kwargs):
    return timm.create_model(name, pretrained=False, **{**TINY, **kwargs})


@pytest.mark.parametrize(
    'name, kwargs, prefix',
    [
        ('vit_tiny_patch16_224', dict(patch_size=8), 1),
        ('vit_tiny_patch16_224', dict(patch_size=8, reg_tokens=3), 4),
        ('vit_tiny_patch16_224', dict(patch_size=8, class_token=False, global_pool='avg'), 0),
        ('deit_tiny_distilled_patch16_224', dict(patch_size=8), 2),
    ],
)
def test_vit_attention(name, kwargs, prefix):
    """Against q and k computed here."""
    model, images = tiny_timm(name, **kwargs).train(), torch.randn(5, 3, 32, 32)
    inputs = {}
    for i, block in enumerate(model.blocks):
        block.attn.fused_attn = i == 0
        nn.init.normal_(block.attn.qkv.weight, std=0.5)
        block.attn.register_forward_pre_hook(lambda _, args, i=i: inputs.update({i: args[0].detach()}))
    probs, left_out = vit_attention(model, images)
    assert all(module.training for module in model.modules())
    assert [block.attn.fused_attn for block in model.blocks] == [True, False]
    assert not any(block.attn.attn_drop._forward_pre_hooks for block in model.blocks)
    assert list(probs) == ['blocks.0.attn', 'blocks.1.attn']
    for i, block in enumerate(model.blocks):
        qkv = block.attn.qkv(inputs[i]).reshape(5, -1, 3, 3, 4)  # (B, N, 3, heads, D_h)
        for head in range(3):
            whole = (qkv[:, :, 0, head] @ qkv[:, :, 1, head].mT / 2).softmax(-1)
            patches = whole[:, prefix:, prefix:] / whole[:, prefix:, prefix:].sum(-1, keepdim=True)
            assert torch.allclose(probs[f'blocks.{i}.attn'][:, head], patches, atol=1e-5)
            mass = whole[:, prefix:, :prefix].sum(-1).mean(-1)
            assert torch.allclose(left_out[f'blocks.{i}.attn'][:, head], mass, atol=1e-5)
    reports = vit_reports(model, images)
    assert [report.grid for report in reports] == [(4, 4)] * 2 and {report.num_images for report in reports} == {5}
    for report in reports:
        for head, maps in zip(report.heads, probs[report.name].transpose(0, 1)):
            expected = brute_force(maps.mean(0), 4, 4)
            assert head.entropy == pytest.approx(torch.special.entr(maps).sum(-1).mean().item(), abs=1e-5)
            assert head.degenerate is None
            assert head.center == pytest.approx(expected['center'], abs=1e-5)
            assert head.prefix_mass == pytest.approx(left_out[report.name][:, head.head].mean().item(), abs=1e-5)
        assert 'no patch' in str(report)
    check_schema(json.dumps(reports_to_dict(reports), allow_nan=False))


def test_patches_that_look_at_no_patch():
    """All of the attention to the class token: nothing is left to be renormalized, and nothing is divided by it."""
    model = tiny_timm('vit_tiny_patch16_224', patch_size=8)
    with torch.no_grad():
        for tensor in (
            model.pos_embed,
            model.cls_token,
            model.patch_embed.proj.weight,
            model.patch_embed.proj.bias,
            *model.blocks[0].attn.qkv.parameters(),
        ):
            tensor.zero_()
        model.cls_token[..., 0], model.patch_embed.proj.bias[0] = 1, -1
        model.blocks[0].attn.qkv.bias[:12] = 1
        model.blocks[0].attn.qkv.weight[12:24, 0] = 100
    report = vit_reports(model, torch.randn(1, 3, 32, 32))[0]
    assert all(head.prefix_mass == 1 and head.center is None and head.entropy == 0 for head in report.heads)


def test_convit_that_is_a_convolution():
    """Its positional heads, begun hard and with the content shut off, are the nine shifts; rows are not columns."""
    model = timm.create_model(
        'convit_tiny',
        embed_dim=4,
        num_heads=9,
        depth=3,
        local_up_to_layer=2,
        img_size=32,
        patch_size=4,
        locality_strength=40.0,
        num_classes=4,
    )
    for block in model.blocks[:2]:
        nn.init.constant_(block.attn.gating_param, 30.0)
    reports = vit_reports(model, torch.randn(2, 3, 32, 32))
    for report in reports[:2]:
        assert report.summary == 'one convolution, 3x3, error 0'
        assert report.heads[1].nearest_shift == (0, -1) and report.heads[3].nearest_shift == (-1, 0)
        assert [head.prefix_mass for head in report.heads] == pytest.approx([0.0] * 9, abs=1e-6)
    assert reports[2].heads[0].prefix_mass > 0  # the class token has come


@pytest.mark.parametrize(
    'name, kwargs, reason',
    [
        ('pvt_v2_b0', {}, 'patch_embed gives no grid'),
        (
            'cait_xxs24_224',
            dict(embed_dim=12, depth=1, num_heads=3),
            'is a TalkingHeadAttn of timm.models.cait: the classes',
        ),
        (
            'samvit_base_patch16',
            dict(embed_dim=12, depth=1, num_heads=3, img_size=64, global_attn_indexes=()),
            'is a Attention of timm.models.vision_transformer_sam',
        ),
        (
            'vit_dwee_patch16_reg1_gap_256',
            dict(embed_dim=16, depth=1, num_heads=2, img_size=224),
            'is a DiffAttention of timm.layers.diff_attention',
        ),
        ('resnet18', {}, 'in which no module has a patch_embed'),
    ],
)
def test_other_timm_models(name, kwargs, reason):
    if not timm.is_model(name):
        pytest.skip(f'timm {timm.__version__} has no {name}')
    model = timm.create_model(name, pretrained=False, **kwargs)
    size = 64 if name.startswith('sam') else 224
    with pytest.raises(ValueError, match=f'{type(model).__name__}.*{reason}'):
        vit_reports(model, torch.randn(1, 3, size, size))


def test_timm_model_without_attention():
    model = tiny_timm('vit_tiny_patch16_224')
    for block in model.blocks:
        block.attn = nn.Identity()
    with pytest.raises(ValueError, match='whose blocks have no attention with num_heads: the classes that are known'):
        vit_attention(model, torch.randn(1, 3, 32, 32))


SWIN = dict(embed_dim=4, depths=(2,), num_heads=(2,), window_size=4, num_classes=3)


@pytest.mark.parametrize('tokens', [8, 10])  # in windows of 4, the latter with padding
@pytest.mark.parametrize('name', ['swin_tiny_patch4_window7_224', 'swinv2_tiny_window8_256'])
def test_uniform_heads_in_windows(name, tokens):
    """Uniform among the keys that a query sees, of which shifted windows hide some."""
    try:
        model = timm.create_model(name, img_size=4 * tokens, **SWIN)
    except RuntimeError:
        if (name, tokens) != ('swinv2_tiny_window8_256', 10):
            raise
        pytest.skip(f'timm {timm.__version__} has no padding in Swin v2')
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if 'mlp' not in parameter_name or 'cpb' in parameter_name:  # v2's bias
                parameter.zero_()
    images = torch.randn(3, 3, 4 * tokens, 4 * tokens)
    probs, _ = vit_attention(model, images)
    for report in vit_reports(model, images):
        seen = (probs[report.name][0] > 1e-20).sum(-1)
        assert (report.kind.uniform, report.num_heads) == (2, 2)
        for head in report.heads:
            assert head.relative_entropy == pytest.approx(1, abs=1e-5)
            assert head.entropy == pytest.approx(seen.float().log().mean().item(), abs=1e-5)


@pytest.mark.parametrize('name', ['swin_tiny_patch4_window7_224', 'SwinTransformer'])
def test_entropies_in_windows(name):
    """Against those between all patches."""
    model, images = small_vit(name), torch.randn(3, 3, 32, 32)
    uniform = small_vit(name)
    with torch.no_grad():
        for parameter in uniform.parameters():
            parameter.zero_()
    probs, (seen, _) = vit_attention(model, images)[0], vit_attention(uniform, images)
    for report in vit_reports(model, images):
        entropy = torch.special.entr(probs[report.name].double()).sum(-1).mean((0, 2))
        largest = (seen[report.name][0, 0] > 1e-20).sum(-1).double().log().mean()
        assert [head.entropy for head in report.heads] == pytest.approx(entropy.tolist(), abs=1e-5)
        assert [head.relative_entropy for head in report.heads] == pytest.approx((entropy / largest).tolist(), abs=1e-5)
