"""Attention maps and head reports of the vision transformers of timm and mmpretrain."""

import json

import pytest
import timm
import torch
from helpers.head_reports import brute_force, check_schema
from helpers.vits import small_vit
from torch import nn

from attncnn_plugin.analysis import head_report, mean_attention

TINY = dict(embed_dim=12, num_heads=3, depth=2, img_size=32, num_classes=4, pos_drop_rate=0.5)
ARCH = dict(embed_dims=12, num_layers=2, num_heads=3, feedforward_channels=24)


def tiny_timm(name, **kwargs):
    return timm.create_model(name, pretrained=False, **{**TINY, **kwargs})


def tiny_mmpretrain(kind, **settings):
    """With one layer as on old versions of PyTorch, in a model that is no transformer itself."""
    build = pytest.importorskip('mmpretrain').registry.MODELS.build
    from mmpretrain.models.utils.attention import scaled_dot_product_attention_pyimpl

    settings.update(arch=ARCH, img_size=32, patch_size=8, drop_rate=0.5)
    model = build(dict(type=f'mmpretrain.{kind}', **settings))
    model.layers[1].attn.scaled_dot_product_attention = scaled_dot_product_attention_pyimpl
    return nn.Sequential(model)


@pytest.mark.parametrize(
    'make, name, settings, prefix',
    [
        (tiny_timm, 'vit_tiny_patch16_224', dict(patch_size=8), 1),
        (tiny_timm, 'vit_tiny_patch16_224', dict(patch_size=8, reg_tokens=3), 4),
        (tiny_timm, 'vit_tiny_patch16_224', dict(patch_size=8, class_token=False, global_pool='avg'), 0),
        (tiny_timm, 'deit_tiny_distilled_patch16_224', dict(patch_size=8), 2),
        (tiny_mmpretrain, 'VisionTransformer', {}, 1),
        (tiny_mmpretrain, 'VisionTransformer', dict(out_type='avg_featmap', with_cls_token=False), 0),
        (tiny_mmpretrain, 'DistilledVisionTransformer', {}, 2),
    ],
)
def test_attention_of_patches(make, name, settings, prefix):
    """Against q and k computed here; the model stays as it was."""
    model, images, inputs = make(name, **settings).train(), torch.randn(5, 3, 32, 32), {}
    layers = {name: module for name, module in model.named_modules() if hasattr(module, 'qkv')}
    for i, (name, layer) in enumerate(layers.items()):
        if make is tiny_timm:
            layer.fused_attn = i == 0
        nn.init.normal_(layer.qkv.weight, std=0.5)
        layer.register_forward_pre_hook(lambda _, args, name=name: inputs.setdefault(name, []).append(args[0].detach()))
    before = [dict(vars(layer)) for layer in layers.values()]
    maps, reports = mean_attention(model, images), head_report(model, images).layers
    assert all(module.training for module in model.modules())
    assert [dict(vars(layer)) for layer in layers.values()] == before  # functions, fused attention
    assert not any(
        getattr(layer, 'attn_drop', layer)._forward_pre_hooks for layer in layers.values() if make is tiny_timm
    )
    assert list(maps) == list(layers) == [report.name for report in reports]
    for report, (name, layer) in zip(reports, layers.items()):
        assert (report.grid, report.num_images) == ((4, 4), 5) and '  other' in str(report)
        x = torch.cat(inputs[name])[:5]
        queries, keys, _ = layer.qkv(x).reshape(5, -1, 3, 3, 4).permute(2, 0, 3, 1, 4)  # (B, heads, N, D_h)
        whole = (queries @ keys.mT / 2).softmax(-1)[:, :, prefix:].detach()
        patches = whole[..., prefix:] / whole[..., prefix:].sum(-1, keepdim=True)
        assert torch.allclose(maps[name].probs, patches.mean(0), atol=1e-5)
        assert torch.allclose(maps[name].prefix_mass, whole[..., :prefix].sum(-1).mean((0, 2)), atol=1e-5)
        for head, own in zip(report.heads, patches.transpose(0, 1)):
            assert head.entropy == pytest.approx(torch.special.entr(own).sum(-1).mean().item(), abs=1e-5)
            assert head.degenerate is None
            assert head.center == pytest.approx(brute_force(own.mean(0), 4, 4)['center'], abs=1e-5)
            assert head.prefix_mass == pytest.approx(maps[name].prefix_mass[head.head].item(), abs=1e-6)
    check_schema(json.dumps(head_report(model, images).to_dict(), allow_nan=False))


def test_patches_that_look_at_no_patch():
    """All of the attention to the class token: nothing is left to be renormalized, and nothing is divided by it."""
    model = tiny_timm('vit_tiny_patch16_224', patch_size=8)
    patches, qkv = model.patch_embed.proj, model.blocks[0].attn.qkv
    with torch.no_grad():
        for tensor in (model.pos_embed, model.cls_token, *patches.parameters(), *qkv.parameters()):
            tensor.zero_()
        model.cls_token[..., 0], patches.bias[0] = 1, -1
        qkv.bias[:12], qkv.weight[12:24, 0] = 1, 100
    report = head_report(model, torch.randn(1, 3, 32, 32)).layers[0]
    assert all(head.prefix_mass == 1 and head.center is None and head.entropy == 0 for head in report.heads)


def test_convit_that_is_a_convolution():
    """Its positional heads, begun hard and with the content shut off, are the nine shifts; rows are not columns."""
    settings = dict(embed_dim=4, num_heads=9, depth=3, local_up_to_layer=2, patch_size=4, locality_strength=40.0)
    model = timm.create_model('convit_tiny', img_size=32, num_classes=4, **settings)
    for block in model.blocks[:2]:
        nn.init.constant_(block.attn.gating_param, 30.0)
    reports = head_report(model, torch.randn(2, 3, 32, 32)).layers
    for report in reports[:2]:
        assert report.summary == '3x3 convolution, error 0'
        assert report.heads[1].nearest_shift == (0, -1) and report.heads[3].nearest_shift == (-1, 0)
        assert [head.prefix_mass for head in report.heads] == pytest.approx([0.0] * 9, abs=1e-6)
    assert reports[2].heads[0].prefix_mass > 0  # the class token has come


def test_what_is_not_of_images():
    model, images = tiny_timm('vit_tiny_patch16_224'), torch.randn(1, 3, 32, 32)
    for call in (lambda: head_report(model, size=(4, 4)), lambda: mean_attention(model, images, part='position')):
        with pytest.raises(ValueError, match='a VisionTransformer, depends on images, which say the grid'):
            call()


@pytest.mark.parametrize(
    'name, settings',  # 40 pixels are 10x10 patches, which 4x4 windows pad
    [('swin_tiny_patch4_window7_224', dict(img_size=40)), ('swinv2_tiny_window8_256', {}), ('SwinTransformer', {})],
)
def test_entropies_in_windows(name, settings):
    """Against those between all patches; uniform heads have those of the keys that a query sees."""
    size = settings.get('img_size', 32)
    model, uniform, images = small_vit(name, **settings), small_vit(name, **settings), torch.randn(3, 3, size, size)
    with torch.no_grad():
        for parameter in uniform.parameters():
            parameter.zero_()
    each, seen = [mean_attention(model, image[None]) for image in images], mean_attention(uniform, images)
    for report in head_report(model, images).layers:
        probs = torch.stack([maps[report.name].probs for maps in each])
        entropy = torch.special.entr(probs.double()).sum(-1).mean((0, 2))
        largest = (seen[report.name].probs[0] > 1e-20).sum(-1).double().log().mean()
        assert [head.entropy for head in report.heads] == pytest.approx(entropy.tolist(), abs=1e-5)
        assert [head.relative_entropy for head in report.heads] == pytest.approx((entropy / largest).tolist(), abs=1e-5)


@pytest.mark.parametrize('side', [8, 10])  # which 4x4 windows pad
@pytest.mark.parametrize('shift', [0, 2])
def test_entropies_of_hard_heads_in_windows(side, shift):
    """Each key in the window counts, though a hard head leaves 0 of it; one behind the mask of a shift does not."""
    model = small_vit('swin_tiny_patch4_window7_224', img_size=4 * side)
    layer = model.layers[0].blocks[shift // 2].attn
    with torch.no_grad():
        layer.qkv.weight[:24], layer.qkv.bias[:24] = 0, 0
        rows, columns = torch.meshgrid(torch.arange(-3.0, 4), torch.arange(-3.0, 4), indexing='ij')
        distance = rows.abs() + torch.minimum(columns.abs(), (columns - 1).abs())  # to the query, or the next
        layer.relative_position_bias_table.copy_(-200 * distance.reshape(49, 1))
    name = f'layers.0.blocks.{shift // 2}.attn'
    maps = mean_attention(model, torch.randn(2, 3, 4 * side, 4 * side), layers=name)[name]
    whole = -(-side // 4) * 4
    part = [(own - shift) % whole // 4 * 2 + (own < shift) for own in range(side)]  # window, and side of its seam
    one = torch.tensor(part) == torch.tensor(part)[:, None]
    seen = torch.einsum('ik,jl->ijkl', one.int(), one.int()).flatten(2).flatten(0, 1) > 0
    entropy = torch.special.entr(maps.probs.double()).sum(-1).mean(-1)
    expected = entropy / seen.sum(-1).double().log().mean()
    assert ((maps.probs > 1e-40) <= seen).all() and (maps.probs.double().amax(0)[seen] == 0).any()
    assert maps.relative_entropy.tolist() == pytest.approx(expected.tolist(), abs=1e-6) and (entropy > 0.05).all()
