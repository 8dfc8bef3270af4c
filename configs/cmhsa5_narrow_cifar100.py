# Both phases of cmhsa5_cifar100; the second one with narrow heads, wide enough for the convolution, at a quarter of the cost.
# Not in Li et al. 2021, whose heads are as wide as a token: 156.5M parameters in place of 47.3M.
_base_ = './cmhsa5_cifar100.py'

model = dict(backbone=dict(head_dim='exact', min_head_dim=64, qk_dim=64))
