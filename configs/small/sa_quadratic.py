_base_ = [
    './_base_/model_sa_quadratic.py',
    './_base_/data_cifar10.py',
    './_base_/schedule.py',
    './_base_/runtime.py',
]

default_hooks = dict(heads=dict(type='AttentionVisualizationHook'))  # the centres by epoch, and pictures
