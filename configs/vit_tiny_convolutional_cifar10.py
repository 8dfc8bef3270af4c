_base_ = [
    './_base_/models/model_vit_tiny_convolutional_cifar10.py',
    './_base_/datasets/cifar10_bs100.py',
    './_base_/schedules/cifar10_adamw_300e.py',
    './_base_/default_runtime.py',
]
