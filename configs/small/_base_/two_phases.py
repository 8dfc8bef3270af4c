# 18 epochs of convolution, then 12 of attention, each with one of warm-up, then cosine.
_base_ = './schedule.py'

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, begin=0, end=1, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=0., begin=1, end=18, convert_to_iter_based=True),
]

custom_hooks = [
    dict(
        type='PhaseTransitionHook',
        epoch=18,
        optim_wrapper=dict(optimizer=dict(lr=5e-4)),
        param_scheduler=[
            dict(type='LinearLR', start_factor=1e-3, begin=0, end=1, convert_to_iter_based=True),
            dict(type='CosineAnnealingLR', eta_min=0., begin=1, end=12, convert_to_iter_based=True),
        ])
]

train_cfg = dict(max_epochs=30)
