# Both phases; heads of the second one are wide enough for the convolution, and narrow. Not in Li et al. 2021.
_base_ = './cmhsa_two_phases.py'

model = dict(backbone=dict(head_dim='exact', min_head_dim=16, qk_dim=16))
