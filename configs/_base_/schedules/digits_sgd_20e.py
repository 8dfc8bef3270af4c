# The recipe of cifar10_sgd_300e.py in 20 epochs.
_base_ = './cifar10_sgd_300e.py'

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=True, begin=0, end=1, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=0., by_epoch=True, begin=1, end=20, convert_to_iter_based=True),
]

train_cfg = dict(max_epochs=20)

auto_scale_lr = dict(base_batch_size=50)
