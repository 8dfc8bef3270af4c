# The network of Cordonnier et al. 2020, narrower and of fewer blocks, without dropout: it is trained too briefly for it.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='SAQuadratic',
        arch=dict(embed_dims=64, num_layers=4, num_heads=9, feedforward_channels=128),
        img_size=32,
        out_type='avg_featmap'),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=64,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0)))
