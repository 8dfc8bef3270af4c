_base_ = './sa_learned_digits.py'

model = dict(backbone=dict(content=True))

# An epoch takes three times as long as without content, and fewer of them are enough.
optim_wrapper = dict(optimizer=dict(lr=2e-3))

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=True, begin=0, end=2, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=0., by_epoch=True, begin=2, end=12, convert_to_iter_based=True),
]

train_cfg = dict(max_epochs=12)
