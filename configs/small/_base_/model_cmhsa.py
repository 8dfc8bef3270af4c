# The network of Li et al. 2021 for 8x8 patches of 4x4 pixels, with the regularization of DeiT.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='CMHSA',
        img_size=32,
        patch_size=4,
        kernel_size=3,
        num_layers=6,
        feedforward_channels=384,
        phase='conv',
        out_type='avg_featmap',
        drop_path_rate=0.1),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=48,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')),
    train_cfg=dict(augments=[
        dict(type='Mixup', alpha=0.8),
        dict(type='CutMix', alpha=1.0),
    ]))
