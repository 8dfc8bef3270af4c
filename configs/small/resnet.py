# As many multiply-adds as sa_quadratic.py.
_base_ = [
    './_base_/model_resnet.py',
    './_base_/data_cifar10.py',
    './_base_/schedule.py',
    './_base_/runtime.py',
]
