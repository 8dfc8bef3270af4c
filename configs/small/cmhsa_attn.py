# Only the second phase: attention from a random start.
_base_ = './cmhsa_conv.py'

model = dict(backbone=dict(phase='attn'))
optim_wrapper = dict(optimizer=dict(lr=1e-3))
