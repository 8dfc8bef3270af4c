_base_ = [
    './_base_/models/model_sa_quadratic_cifar.py',
    './_base_/datasets/cifar10_bs100.py',
    './_base_/schedules/cifar10_sgd_300e.py',
    './_base_/default_runtime.py',
]

default_hooks = dict(heads=dict(type='AttentionVisualizationHook'))  # the centres by epoch (Figure 3), and pictures
