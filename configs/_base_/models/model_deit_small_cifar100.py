# mmpretrain's DeiT-small, for 100 classes, with the drop path of DeiT, 0.1 for all sizes, which mmpretrain leaves out.
model = dict(
    type='ImageClassifier',
    backbone=dict(type='VisionTransformer', arch='deit-small', img_size=224, patch_size=16, drop_path_rate=0.1),
    head=dict(
        type='VisionTransformerClsHead',
        num_classes=100,
        in_channels=384,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')),
    init_cfg=[
        dict(type='TruncNormal', layer='Linear', std=.02),
        dict(type='Constant', layer='LayerNorm', val=1., bias=0.),
    ],
    train_cfg=dict(augments=[
        dict(type='Mixup', alpha=0.8),
        dict(type='CutMix', alpha=1.0),
    ]))
