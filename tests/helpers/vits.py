"""Small vision transformers of four libraries, one for each kind of attention."""

import sys

import pytest
import timm
import torch
import torchvision

SIZE = 32
WITH_MLP = 'vit_relpos_small_patch16_224'  # which gives biases of relative positions, and cannot start as a convolution
SMALL = dict(img_size=SIZE, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5)
OF_TIMM = {
    'vit_tiny_patch16_224': SMALL,
    'deit_tiny_distilled_patch16_224': {**SMALL, 'qk_norm': True},
    WITH_MLP: SMALL,
    'vit_relpos_base_patch32_plus_rpn_256': {**SMALL, 'rel_pos_type': 'bias'},  # by a table
    'beit_base_patch16_224': SMALL,
    'swin_tiny_patch4_window7_224': dict(
        img_size=SIZE, embed_dim=12, depths=(2, 2), num_heads=(3, 3), window_size=4, num_classes=5
    ),
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
    'SwinTransformer': dict(
        arch=SWIN_ARCH,
        img_size=SIZE,
        patch_size=4,
        window_size=4,
        out_indices=(1,),
    ),
}

SWIN = dict(img_size=SIZE, embed_dim=12, depths=(2, 2), num_heads=(3, 3), window_size=4, num_classes=5)
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
    'ViT': TINY,
    'DeiT': TINY,
    'Dinov2': dict(TINY, mlp_ratio=1),
    'Dinov2WithRegisters': dict(TINY, mlp_ratio=1, num_register_tokens=2),
    'DINOv3ViT': dict(TINY, num_register_tokens=2),
    'Beit': dict(TINY, use_relative_position_bias=True, layer_scale_init_value=0.5),
    'Swin': dict(
        image_size=SIZE, patch_size=4, embed_dim=12, depths=[2, 2], num_heads=[3, 3], window_size=4, num_labels=5
    ),
}
OF_TORCHVISION = {
    'VisionTransformer': dict(
        image_size=SIZE, patch_size=8, num_layers=2, num_heads=3, hidden_dim=24, mlp_dim=24, num_classes=5
    ),
    **{
        block: dict(
            patch_size=[4, 4],
            embed_dim=12,
            depths=[2, 2],
            num_heads=[3, 3],
            window_size=[4, 4],
            num_classes=5,
            block=block,
            downsample_layer=f'PatchMerging{block[20:]}',
        )
        for block in ('SwinTransformerBlock', 'SwinTransformerBlockV2')
    },
}


def hugging_face(name, **changes):
    """A small classifier of Hugging Face transformers, with weights that are not small, in evaluation mode."""
    transformers = pytest.importorskip('transformers.models') and sys.modules['transformers']
    config = getattr(transformers, f'{name}Config')(**{**OF_HUGGING_FACE[name], **changes})
    kind = 'Model' if name == 'DINOv3ViT' else 'ForImageClassification'
    return not_small(getattr(transformers, f'{name}{kind}')(config))


def of_torchvision(name, **changes):
    """A small model of torchvision, with weights that are not small, in evaluation mode."""
    settings = {**OF_TORCHVISION[name], **changes}
    if name == 'VisionTransformer':
        return not_small(torchvision.models.VisionTransformer(**settings))
    for key in ('block', 'downsample_layer'):
        settings[key] = getattr(torchvision.models.swin_transformer, settings[key])
    return not_small(torchvision.models.SwinTransformer(**settings))


def not_small(model):
    """The model with random weights of deviation 0.3, in evaluation mode."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.eval()  # some of mmpretrain's give None
    return model


def small_vit(name, **changes):
    """One of these, with weights that are not small, in evaluation mode."""
    return not_small(new_vit(name, **{**{**OF_TIMM, **OF_MMPRETRAIN, **OTHERS}[name], **changes}))


def new_vit(name, **settings):
    """A model of timm, or a backbone of mmpretrain, as it begins."""
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
