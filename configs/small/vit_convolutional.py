# Each head of vit.py begins as a position of a kernel of 3x3 patches.
_base_ = './vit.py'

model = dict(
    backbone=dict(init_cfg=[
        dict(type='TruncNormal', layer='Linear', std=.02),
        dict(type='ConvolutionalHeads', kernel_size=3),
    ]))
