# A ResNet-50 with the ImageNet weights of mmpretrain whose last stage is attention from the start. Images of 512x512
# pixels have 16x16 there: heads see all of them.
_base_ = './_base_/upernet_ade20k.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmpretrain.ConvToAttention',
        backbone=dict(
            type='mmpretrain.ResNet',
            depth=50,
            num_stages=4,
            out_indices=(0, 1, 2, 3),
            norm_cfg=dict(type='SyncBN', requires_grad=True),
            style='pytorch',
            init_cfg=dict(
                type='Pretrained',
                checkpoint='https://download.openmmlab.com/mmclassification/v0/resnet/'
                'resnet50_8xb32_in1k_20210831-ea4938fc.pth',
                prefix='backbone.')),
        layers='layer4.*.conv2',
        phase='attn',
        content='additive',
        alpha=6.0))
