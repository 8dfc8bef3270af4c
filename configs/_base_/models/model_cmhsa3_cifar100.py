# Li et al. 2021, section 4, with the regularization of DeiT.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='CMHSA',
        img_size=224,
        patch_size=16,
        kernel_size=3,
        num_layers=6,
        phase='conv',
        out_type='avg_featmap',
        drop_path_rate=0.1),
    head=dict(
        type='LinearClsHead',
        num_classes=100,
        in_channels=768,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')),
    train_cfg=dict(augments=[
        dict(type='Mixup', alpha=0.8),
        dict(type='CutMix', alpha=1.0),
    ]))
