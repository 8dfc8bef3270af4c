# As for CIFAR-10, smaller: 8x8 patches of 2x2 pixels.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='VisionTransformer',
        arch=dict(embed_dims=64, num_layers=4, num_heads=4, feedforward_channels=128),
        img_size=16,
        patch_size=2,
        in_channels=1,
        with_cls_token=False,
        out_type='avg_featmap',
        init_cfg=[
            dict(type='TruncNormal', layer='Linear', std=.02),
            dict(type='ConvolutionalHeads', kernel_size=3),
        ]),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=64,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0)))
