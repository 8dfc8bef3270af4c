_base_ = './sa_quadratic_cifar10.py'

model = dict(backbone=dict(arch='base-16heads'))
