_base_ = [
    './_base_/model_vit.py',
    './_base_/data_cifar10.py',
    './_base_/schedule.py',
    './_base_/runtime.py',
]

optim_wrapper = dict(optimizer=dict(lr=1e-3))
