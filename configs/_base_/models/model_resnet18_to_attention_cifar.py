# The convolutions of the last stage become attention; 4x4 pixels for images of 32x32.
_base_ = 'mmpretrain::_base_/models/resnet18_cifar.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='ConvToAttention',
        backbone=dict(type='ResNet_CIFAR', depth=18, num_stages=4, out_indices=(3, ), style='pytorch'),
        layers='layer4.*.conv*',
        phase='conv',
        content='additive',
        alpha=6.0))
