# Position-only self-attention, from scratch, on tokens of 8x8 pixels.
_base_ = './_base_/upernet_ade20k.py'

model = dict(
    data_preprocessor=dict(test_cfg=dict(size_divisor=32)),  # whole tokens, at the neck's largest stride too
    backbone=dict(
        _delete_=True,
        type='mmpretrain.SAQuadratic',
        arch='base',
        reduction=8,
        with_cp=True,
        out_indices=(1, 2, 3, 5),
        drop_path_rate=0.1),
    # Maps of stride 8.
    neck=dict(type='Feature2Pyramid', embed_dim=400, rescales=[2, 1, 0.5, 0.25]),
    decode_head=dict(in_channels=[400, 400, 400, 400]),
    auxiliary_head=dict(in_channels=400))

optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=1e-4, weight_decay=0.05), paramwise_cfg=dict(norm_decay_mult=0.))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type='PolyLR', eta_min=0., power=1., begin=1500, end=160000, by_epoch=False),
]
