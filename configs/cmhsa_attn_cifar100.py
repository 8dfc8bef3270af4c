# The second phase alone: attention from the start.
_base_ = './cmhsa3_conv_cifar100.py'

model = dict(backbone=dict(phase='attn'))
