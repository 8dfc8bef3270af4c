_base_ = [
    './_base_/models/model_resnet18_to_attention_cifar.py',
    './_base_/datasets/cifar100_bs100.py',
    './_base_/schedules/cifar_sgd_two_phases.py',
    './_base_/default_runtime.py',
]

model = dict(head=dict(num_classes=100))
