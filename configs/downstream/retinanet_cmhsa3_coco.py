# CMHSA from scratch: 6 epochs of convolutions, then 6 of attention (L21 has two halves too, on images to classify).
_base_ = './_base_/retinanet_coco.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmpretrain.CMHSA',
        img_size=1344,  # images of 800x1333 pixels, of either orientation
        patch_size=16,
        kernel_size=3,
        num_layers=6,
        head_dim='exact',
        qk_dim=64,
        phase='conv',
        drop_path_rate=0.1,
        # Each of 50x84 patches attends to all of them: 2.6 GB for a block and an image, of which one block is kept.
        with_cp=True),
    # One map of stride 16 for all levels, so there are strides of 16 to 256 instead of 8 to 128, with anchors of the
    # same sizes.
    neck=dict(in_channels=[768], start_level=0),
    bbox_head=dict(anchor_generator=dict(octave_base_scale=2, strides=[16, 32, 64, 128, 256])))

optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=1e-4, weight_decay=0.05), paramwise_cfg=dict(norm_decay_mult=0.))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=500),
    dict(type='CosineAnnealingLR', begin=0, end=6, convert_to_iter_based=True),
]
custom_hooks = [
    dict(
        type='mmpretrain.PhaseTransitionHook',
        epoch=6,
        optim_wrapper=dict(optimizer=dict(lr=2e-5)),
        param_scheduler=[
            dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=500),
            dict(type='CosineAnnealingLR', begin=0, convert_to_iter_based=True),
        ])
]
