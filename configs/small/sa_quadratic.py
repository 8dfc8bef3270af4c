_base_ = [
    './_base_/sa_quadratic.py',
    './_base_/data_cifar10.py',
    './_base_/schedule.py',
    './_base_/runtime.py',
]
