# Figure 2 of Li et al. 2021: attention from a random start, without warm-up.
_base_ = './cmhsa_attn_200e_cifar100.py'

param_scheduler = dict(
    _delete_=True,
    type='CosineAnnealingLR',
    eta_min=1e-5,
    by_epoch=True,
    begin=0,
    end=200,
    convert_to_iter_based=True)
