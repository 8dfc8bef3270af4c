# Cordonnier et al. 2020, Table 2.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='SAQuadratic',
        arch='base',
        img_size=32,
        out_type='avg_featmap',
        drop_rate=0.1,
        attn_drop_rate=0.1),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=400,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0)))
