_base_ = './sa_learned_digits.py'

model = dict(backbone=dict(content=True))

# With content, the learning rate of the others does not leave the starting point.
optim_wrapper = dict(optimizer=dict(lr=0.05))

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=True, begin=0, end=4, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=0., by_epoch=True, begin=4, end=20, convert_to_iter_based=True),
]

train_cfg = dict(max_epochs=20)
