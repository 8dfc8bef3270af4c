# A ResNet-50 with the ImageNet weights of mmpretrain whose last stage is attention from the start. What is not about the
# attention is as in mmdetection's config: the first stage is frozen, batch norms keep their statistics.
_base_ = './_base_/retinanet_coco.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmpretrain.ConvToAttention',
        backbone=dict(
            type='mmpretrain.ResNet',
            depth=50,
            num_stages=4,
            out_indices=(0, 1, 2, 3),
            frozen_stages=1,
            norm_eval=True,
            style='pytorch',
            init_cfg=dict(
                type='Pretrained',
                checkpoint='https://download.openmmlab.com/mmclassification/v0/resnet/'
                'resnet50_8xb32_in1k_20210831-ea4938fc.pth',
                prefix='backbone.')),
        layers='layer4.*.conv2',
        phase='attn',
        content='additive',
        alpha=6.0,
        # Images of 800x1333 pixels have 25x42 in the last stage, and 50x84 before its first 3x3 convolution. For heads
        # that see all of them: None.
        window_size=7))
