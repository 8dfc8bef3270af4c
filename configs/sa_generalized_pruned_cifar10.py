# Degenerate heads of a trained network removed, and the rest trained on (Cordonnier et al. 2020, appendix E and Figure
# 13), as in runs/quadratic-generalized-pruned of the released code: condition numbers above 1000 (1e5 in the text), and
# nothing makes up for a removed head, so that the accuracy falls at first.
_base_ = './sa_generalized_cifar10.py'

load_from = 'work_dirs/sa_generalized_cifar10/epoch_300.pth'

optim_wrapper = dict(optimizer=dict(lr=0.01))

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=True, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=0., by_epoch=True, begin=5, end=100, convert_to_iter_based=True),
]

train_cfg = dict(max_epochs=100)

custom_hooks = [dict(type='HeadPruningHook', epochs=[0], bias_correction=False)]
