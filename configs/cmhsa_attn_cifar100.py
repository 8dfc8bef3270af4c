# Only the second phase: attention from the start. The rate is from Li et al. 2021's range for networks at their start;
# cmhsa_attn_200e_cifar100.py has the second phase's.
_base_ = './cmhsa3_conv_cifar100.py'

model = dict(backbone=dict(phase='attn'))
