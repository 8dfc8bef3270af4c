_base_ = './cmhsa3_cifar100.py'

model = dict(backbone=dict(kernel_size=5))
