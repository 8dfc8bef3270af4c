"""Small vision transformers of four libraries, one for each kind of attention."""

import pytest
import timm
import torch
import torchvision
from torch import nn

from attncnn_plugin.pruning import prunable_heads

from .small import small_model, small_timm, trained_like
from .versions import hugging_face_library

SIZE = 32
WITH_MLP = 'vit_relpos_small_patch16_224'  # which gives biases of relative positions, and cannot start as a convolution
SMALL = dict(img_size=SIZE, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5)
SWIN = dict(img_size=SIZE, embed_dim=12, depths=(2, 2), num_heads=(3, 3), window_size=4, num_classes=5)
OF_TIMM = {
    'vit_tiny_patch16_224': SMALL,
    'deit_tiny_distilled_patch16_224': {**SMALL, 'qk_norm': True},
    WITH_MLP: SMALL,
    'vit_relpos_base_patch32_plus_rpn_256': {**SMALL, 'rel_pos_type': 'bias'},  # by a table
    'beit_base_patch16_224': SMALL,
    'swin_tiny_patch4_window7_224': SWIN,
    'eva02_tiny_patch14_224': SMALL,
    'eva02_base_patch14_224': SMALL,  # queries, keys and values by three maps
    'vit_small_patch16_dinov3': SMALL,
}
ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=24)
SWIN_ARCH = dict(embed_dims=12, depths=[2, 2], num_heads=[3, 3])
OF_MMPRETRAIN = {
    'VisionTransformer': dict(arch=ARCH, img_size=SIZE, patch_size=8),
    'DeiT3': dict(arch=ARCH, img_size=SIZE, patch_size=8),
    'BEiTViT': dict(arch=ARCH, img_size=SIZE, patch_size=8),
    'SwinTransformer': dict(arch=SWIN_ARCH, img_size=SIZE, patch_size=4, window_size=4, out_indices=(1,)),
}

OTHERS = {  # those that cannot start as a convolution, of either library
    'swinv2_tiny_window8_256': SWIN,
    'swinv2_cr_tiny_224': SWIN,
    'convit_tiny': dict(SMALL, local_up_to_layer=1),
    'cait_xxs24_224': SMALL,
    'vit_small_patch16_rope_224': SMALL,
    'ViTEVA02': dict(arch=ARCH, img_size=SIZE, patch_size=8),
    'SwinTransformerV2': {**OF_MMPRETRAIN['SwinTransformer'], 'arch': dict(SWIN_ARCH, extra_norm_every_n_blocks=0)},
}
TINY = dict(image_size=SIZE, patch_size=8, hidden_size=24, num_hidden_layers=2, num_attention_heads=3)
TINY.update(intermediate_size=24, num_labels=5)
OF_HUGGING_FACE = {
    'transformers.ViT': TINY,
    'transformers.DeiT': TINY,
    'transformers.Dinov2': dict(TINY, mlp_ratio=1),
    'transformers.Dinov2WithRegisters': dict(TINY, mlp_ratio=1, num_register_tokens=2),
    'transformers.DINOv3ViT': dict(TINY, num_register_tokens=2),
    'transformers.Beit': dict(TINY, use_relative_position_bias=True, layer_scale_init_value=0.5),
    'transformers.Swin': dict(
        image_size=SIZE, patch_size=4, embed_dim=12, depths=[2, 2], num_heads=[3, 3], window_size=4, num_labels=5
    ),
}
SWIN_OF_TORCHVISION = dict(
    patch_size=[4, 4], embed_dim=12, depths=[2, 2], num_heads=[3, 3], window_size=[4, 4], num_classes=5
)
OF_TORCHVISION = {
    'torchvision.VisionTransformer': dict(
        image_size=SIZE, patch_size=8, num_layers=2, num_heads=3, hidden_dim=24, mlp_dim=24, num_classes=5
    ),
    'torchvision.SwinTransformer': SWIN_OF_TORCHVISION,
    'torchvision.SwinTransformerV2': SWIN_OF_TORCHVISION,
}
SETTINGS = {**OF_TIMM, **OF_MMPRETRAIN, **OTHERS, **OF_HUGGING_FACE, **OF_TORCHVISION}
NO_START = *OTHERS, WITH_MLP, 'torchvision.SwinTransformerV2'


def not_small(model):
    """The model with random weights of deviation 0.3, in evaluation mode."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.eval()  # some of mmpretrain's give None
    return model


# Rotations of 8 channels cannot make a Gaussian of a head.
FOR_START = {
    **dict.fromkeys(
        ('eva02_tiny_patch14_224', 'eva02_base_patch14_224', 'vit_small_patch16_dinov3'), dict(embed_dim=96)
    ),
    'transformers.DINOv3ViT': dict(hidden_size=96),
}


def vit_to_start(name, **changes):
    """One of these as it begins, in evaluation mode, with heads that are wide enough for a start as a convolution."""
    model = new_vit(name, **{**SETTINGS[name], **FOR_START.get(name, {}), **changes})
    model.eval()
    return model


def small_vit(name, **changes):
    """One of these, or another of timm, with weights that are not small, in evaluation mode."""
    return not_small(new_vit(name, **{**SETTINGS.get(name, SMALL), **changes}))


def new_vit(name, **settings):
    """A model of timm, a backbone of mmpretrain, or a classifier of the library in its name, as it begins."""
    library, _, kind = name.rpartition('.')
    if library == 'transformers':
        transformers = hugging_face_library()
        if not hasattr(transformers, f'{kind}Config'):
            pytest.skip(f'transformers {transformers.__version__} has no {kind}')
        config = getattr(transformers, f'{kind}Config')(**settings)
        return getattr(transformers, f'{kind}Model' if kind == 'DINOv3ViT' else f'{kind}ForImageClassification')(config)
    if library == 'torchvision':
        if kind == 'VisionTransformer':
            return torchvision.models.VisionTransformer(**settings)
        swin, version = torchvision.models.swin_transformer, kind.removeprefix('SwinTransformer')
        parts = dict(
            block=getattr(swin, f'SwinTransformerBlock{version}'),
            downsample_layer=getattr(swin, f'PatchMerging{version}'),
        )
        return torchvision.models.SwinTransformer(**settings, **parts)
    if timm.is_model(name):
        return timm.create_model(name, **settings)
    registry = pytest.importorskip('mmpretrain').registry
    return registry.MODELS.build(dict(type=f'mmpretrain.{name}', **settings))


def output_of(model, images):
    """Logits, or the last feature map."""
    output = model(images)
    for name in ('logits', 'last_hidden_state'):  # of Hugging Face
        if hasattr(output, name):
            return getattr(output, name)
    return output[-1] if isinstance(output, tuple) else output


def own_attention(model, images):
    """The probabilities that go through each module's ``attn_drop`` where the library has no fused kernel, by name."""
    found, handles = {}, []
    for name, layer in model.named_modules():
        if isinstance(getattr(layer, 'attn_drop', None), nn.Module):
            fused, layer.fused_attn = getattr(layer, 'fused_attn', None), False
            keep = lambda _, args, name=name: found.update({name: args[0]})  # noqa: E731
            handles.append((layer.attn_drop.register_forward_pre_hook(keep), layer, fused))
    with torch.no_grad():
        output_of(model, images)
    for handle, layer, fused in handles:
        handle.remove()
        layer.fused_attn = fused
    return found


def map_of_outputs(model, name):
    """The map that takes the outputs of all heads of a layer, one after the other, as libraries call it."""
    module, beside = model.get_submodule(name), getattr(model.get_submodule(name.rpartition('.')[0]), 'output', None)
    places = (*((module, own) for own in ('proj', 'o_proj', 'out_proj', 'last')), (beside, 'dense'))
    return next(getattr(owner, own) for owner, own in places if hasattr(owner, own))  # of old transformers beside


def output_map(model, name, head):
    """The map that takes the outputs of all heads of a layer, and the columns of one; they lie one after the other."""
    layer = prunable_heads(model)[name]
    if layer.layer is not None:
        return layer.output, layer.output_entries([head])
    output = map_of_outputs(model, name)
    return output, torch.arange(output.in_features).view(layer.num_heads, -1)[head]


def small_classifier(name):
    """A vision transformer, or a network of this package, as after some training; and the side of its images."""
    torch.manual_seed(0)
    if name.startswith('sa_'):
        return trained_like(small_timm(name, num_classes=5)), 16
    if name.startswith('cmhsa'):
        return trained_like(small_model(name, num_classes=5, depth=1)), 16
    return trained_like(small_vit(name)), SIZE
