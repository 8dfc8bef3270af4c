# The schedule of cifar10_sgd_300e.py in 30 epochs, with an optimizer that needs no more of them.
_base_ = './cifar10_sgd_300e.py'

optim_wrapper = dict(optimizer=dict(_delete_=True, type='AdamW', lr=3e-3, weight_decay=0.05))

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=True, begin=0, end=2, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=0., by_epoch=True, begin=2, end=30, convert_to_iter_based=True),
]

train_cfg = dict(max_epochs=30)

auto_scale_lr = dict(base_batch_size=50)
