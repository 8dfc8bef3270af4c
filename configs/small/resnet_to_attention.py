# The convolutions of the last stage, for 8x8 pixels, become attention.
_base_ = [
    './_base_/model_resnet.py',
    './_base_/data_cifar10.py',
    './_base_/two_phases.py',
    './_base_/runtime.py',
]

model = dict(
    backbone=dict(
        _delete_=True,
        type='ConvToAttention',
        backbone={{_base_.model.backbone}},
        layers='layer3.*.conv*',
        phase='conv',
        content='additive',
        alpha=6.0))

custom_hooks = [
    dict(
        type='PhaseTransitionHook',
        epoch=18,
        optim_wrapper=dict(optimizer=dict(lr=1e-3)),
        param_scheduler=[
            dict(type='LinearLR', start_factor=1e-3, begin=0, end=1, convert_to_iter_based=True),
            dict(type='CosineAnnealingLR', eta_min=0., begin=1, end=12, convert_to_iter_based=True),
        ])
]
