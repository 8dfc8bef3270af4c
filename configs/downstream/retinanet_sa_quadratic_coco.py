# Position-only self-attention, from scratch. Its cost grows with the height plus the width of the grid for each
# pixel, so that there can be tokens of 8x8 pixels, the first of RetinaNet's strides: 100x168 of them.
_base_ = './_base_/retinanet_coco.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmpretrain.SAQuadratic',
        arch='base',
        reduction=8,
        with_cp=True,
        drop_path_rate=0.1),
    neck=dict(in_channels=[400], start_level=0))

optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=1e-4, weight_decay=0.05), paramwise_cfg=dict(norm_decay_mult=0.))
