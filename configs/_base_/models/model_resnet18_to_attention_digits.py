# A narrow ResNet-18 for images of 16x16 pixels, whose last stage has 4x4.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='ConvToAttention',
        backbone=dict(
            type='ResNet_CIFAR',
            depth=18,
            in_channels=1,
            stem_channels=8,
            base_channels=8,
            strides=(1, 2, 2, 1),
            out_indices=(3, )),
        layers='layer4.*.conv*',
        phase='conv',
        content='additive',
        alpha=6.0),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=64,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0)))
