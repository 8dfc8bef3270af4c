# The second phase without warm-up, with which Li et al. 2021 have their best accuracy.
_base_ = './cmhsa5_cifar100.py'

custom_hooks = [
    dict(
        type='PhaseTransitionHook',
        epoch=200,
        optim_wrapper=dict(optimizer=dict(lr=5e-5)),
        param_scheduler=dict(
            type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=0, end=200, convert_to_iter_based=True))
]
