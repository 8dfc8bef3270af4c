# The second phase without warm-up, with which Li et al. 2021 have their best accuracy.
_base_ = './cmhsa_narrow.py'

custom_hooks = [
    dict(
        type='PhaseTransitionHook',
        epoch=18,
        optim_wrapper=dict(optimizer=dict(lr=5e-4)),
        param_scheduler=[dict(type='CosineAnnealingLR', eta_min=0., begin=0, end=12, convert_to_iter_based=True)])
]
