# As for CIFAR-10, smaller: 8x8 patches of 2x2 pixels.
_base_ = './model_vit_tiny_convolutional_cifar10.py'

model = dict(
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=64, num_layers=4, num_heads=4, feedforward_channels=128),
        img_size=16,
        patch_size=2,
        in_channels=1),
    head=dict(in_channels=64))
