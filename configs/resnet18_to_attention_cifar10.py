_base_ = [
    './_base_/models/model_resnet18_to_attention_cifar.py',
    './_base_/datasets/cifar10_bs100.py',
    './_base_/schedules/cifar_sgd_two_phases.py',
    './_base_/default_runtime.py',
]
