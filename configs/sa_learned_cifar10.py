_base_ = './sa_quadratic_cifar10.py'

model = dict(backbone=dict(type='SALearned'))
