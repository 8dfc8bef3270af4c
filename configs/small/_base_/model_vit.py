# 8x8 patches of 4x4 pixels, the mean over the patches instead of a class token. Queries, keys, values and their
# output begin as in timm, the MLPs as in mmpretrain.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='VisionTransformer',
        arch=dict(embed_dims=96, num_layers=6, num_heads=4, feedforward_channels=384),
        img_size=32,
        patch_size=4,
        with_cls_token=False,
        out_type='avg_featmap',
        init_cfg=[dict(type='TruncNormal', layer='Linear', std=.02)]),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=96,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0)))
