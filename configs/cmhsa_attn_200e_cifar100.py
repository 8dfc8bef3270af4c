# Figure 2 of Li et al. 2021: attention from a random start, with the epochs, the rate and the warm-up of the second phase.
_base_ = './cmhsa_attn_cifar100.py'

optim_wrapper = dict(optimizer=dict(lr=5e-5))

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6 / 5e-5, by_epoch=True, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=5, end=200, convert_to_iter_based=True),
]

train_cfg = dict(max_epochs=200)
