_base_ = './sa_learned_cifar10.py'

model = dict(backbone=dict(content=True))
