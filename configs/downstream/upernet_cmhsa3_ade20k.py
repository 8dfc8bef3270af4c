# CMHSA from scratch: 80,000 iterations of convolutions, then as many of attention (L21 has two halves too, on images to
# classify).
_base_ = './_base_/upernet_ade20k.py'

model = dict(
    data_preprocessor=dict(test_cfg=dict(size_divisor=32)),  # whole patches, at the neck's largest stride too
    backbone=dict(
        _delete_=True,
        type='mmpretrain.CMHSA',
        img_size=512,
        patch_size=16,
        kernel_size=3,
        num_layers=6,
        head_dim='exact',
        qk_dim=64,
        phase='conv',
        out_indices=(1, 2, 3, 5),
        drop_path_rate=0.1),
    # Maps of stride 16, as mmsegmentation has it for vision transformers.
    neck=dict(type='Feature2Pyramid', embed_dim=768, rescales=[4, 2, 1, 0.5]),
    decode_head=dict(in_channels=[768, 768, 768, 768]),
    auxiliary_head=dict(in_channels=768))

optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=1e-4, weight_decay=0.05), paramwise_cfg=dict(norm_decay_mult=0.))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type='PolyLR', eta_min=0., power=1., begin=1500, end=80000, by_epoch=False),
]
custom_hooks = [
    dict(
        type='mmpretrain.PhaseTransitionHook',
        iter=80000,
        optim_wrapper=dict(optimizer=dict(lr=2e-5)),
        param_scheduler=[
            dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500),
            dict(type='PolyLR', eta_min=0., power=1., begin=1500, by_epoch=False),
        ])
]
