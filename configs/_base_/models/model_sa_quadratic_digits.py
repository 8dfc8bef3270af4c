model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='SAQuadratic',
        arch='tiny',
        img_size=16,
        in_channels=1,
        out_type='avg_featmap'),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=64,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0)))
