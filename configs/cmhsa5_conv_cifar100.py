_base_ = './cmhsa3_conv_cifar100.py'

model = dict(backbone=dict(kernel_size=5))
