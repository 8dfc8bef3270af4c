# Table 2 of Cordonnier et al. 2020 is for self-attention. Their ResNet18 (runs/resnet/run.sh of the released code) has
# the same optimizer, but no warm-up and no cosine: the rate is divided by 10 at epochs 80, 150 and 250.
_base_ = [
    'mmpretrain::_base_/models/resnet18_cifar.py',
    './_base_/datasets/cifar10_bs100.py',
    './_base_/schedules/cifar10_sgd_300e.py',
    './_base_/default_runtime.py',
]

param_scheduler = dict(_delete_=True, type='MultiStepLR', by_epoch=True, milestones=[80, 150, 250], gamma=0.1)
