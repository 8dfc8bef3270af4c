# The recipe of cifar10_sgd_300e.py in 30 epochs.
_base_ = './cifar10_sgd_300e.py'

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=True, begin=0, end=2, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=0., by_epoch=True, begin=2, end=30, convert_to_iter_based=True),
]

train_cfg = dict(max_epochs=30)

auto_scale_lr = dict(base_batch_size=50)
