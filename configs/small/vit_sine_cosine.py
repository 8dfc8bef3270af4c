# The position embedding of vit.py begins with sines and cosines: the control of vit_convolutional.py, which sets it too.
_base_ = './vit.py'

model = dict(
    backbone=dict(init_cfg=[
        dict(type='TruncNormal', layer='Linear', std=.02),
        dict(type='SineCosineEmbedding'),
    ]))
