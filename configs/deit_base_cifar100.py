_base_ = './deit_small_cifar100.py'

model = dict(backbone=dict(arch='deit-base'), head=dict(in_channels=768))
