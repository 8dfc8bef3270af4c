# Li et al. 2021, appendix B: 200 epochs of convolution, then 200 of attention, each with 5 epochs of warm-up, then
# cosine; the rates of the second phase are from 1e-5 to 7e-5. Warm-up and cosine begin and end where DeiT's do.
_base_ = './cifar100_adamw_400e.py'

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6 / 3e-4, by_epoch=True, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=5, end=200, convert_to_iter_based=True),
]

custom_hooks = [
    dict(
        type='PhaseTransitionHook',
        epoch=200,
        optim_wrapper=dict(optimizer=dict(lr=5e-5)),
        param_scheduler=[
            dict(type='LinearLR', start_factor=1e-6 / 5e-5, by_epoch=True, begin=0, end=5, convert_to_iter_based=True),
            dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=5, end=200, convert_to_iter_based=True),
        ])
]
