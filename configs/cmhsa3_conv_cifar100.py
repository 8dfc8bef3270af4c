# Only the first phase.
_base_ = [
    './_base_/models/model_cmhsa3_cifar100.py',
    './_base_/datasets/cifar100_bs128_deit_224.py',
    './_base_/schedules/cifar100_adamw_400e.py',
    './_base_/default_runtime.py',
]
