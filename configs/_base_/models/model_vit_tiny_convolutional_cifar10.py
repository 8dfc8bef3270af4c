# mmpretrain's DeiT-tiny for 8x8 patches of 4x4 pixels, with the mean over the patches instead of a class token.
# Queries, keys, values and their output begin as in timm, the MLPs as in mmpretrain. Each head then begins as a position of a kernel of 3x3 patches.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='VisionTransformer',
        arch='deit-tiny',
        img_size=32,
        patch_size=4,
        with_cls_token=False,
        out_type='avg_featmap',
        init_cfg=[
            dict(type='TruncNormal', layer='Linear', std=.02),
            dict(type='ConvolutionalHeads', kernel_size=3),
        ]),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=192,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0)))
