model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='CMHSA',
        img_size=32,
        patch_size=8,
        in_channels=1,
        kernel_size=3,
        num_layers=4,
        phase='conv',
        out_type='avg_featmap'),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=64,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0)))
