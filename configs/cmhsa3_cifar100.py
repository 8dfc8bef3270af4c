_base_ = [
    './_base_/models/model_cmhsa3_cifar100.py',
    './_base_/datasets/cifar100_bs128_deit_224.py',
    './_base_/schedules/cifar100_two_phases.py',
    './_base_/default_runtime.py',
]
